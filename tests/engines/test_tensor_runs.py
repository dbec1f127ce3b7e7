"""A model whose matrices are cut trains like any other, and goes on when panels are lost."""

import pytest
from training import cell_in_parts, kill_each

PLAN = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
PLAN |= {"4": ColwiseParallel(), "6": RowwiseParallel()}
"""
CELL = cell_in_parts("TensorParallel(PLAN, copy_every=5)", PLAN)


def test_panels_that_are_lost_come_back(cluster, until):
    """Killed in the middle of a pass perhaps, where the others wait within torch; the curve is
    that of an undisturbed run."""
    kill_each(cluster(2), until, CELL, 2, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("seed", range(2))
def test_any_rank_of_four_may_be_lost(cluster, until, seed):
    """At any moment: in a sum forward or backward, in the vote, in the update."""
    kill_each(cluster(4), until, CELL, 8, seed)
