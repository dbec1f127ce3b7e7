"""Two pipelines beside each other train on when a stage of one is lost: its twin has it."""

import pytest
from training import cell_in_parts, kill_each

CELL = cell_in_parts("Mesh(pipeline=Pipeline(2, '1f1b', 4, copy_every=5), data=2)")


def test_a_stage_that_is_lost_comes_from_its_twin(cluster, until):
    """Killed in the middle of a pass perhaps, or of a sum; the curve is that of an undisturbed
    run."""
    kill_each(cluster(4), until, CELL, 2, seed=9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_any_stage_of_either_may_be_lost(cluster, until, seed):
    """At any moment: in a send, a sum of gradients, the vote, the update."""
    kill_each(cluster(4), until, CELL, 4, seed)
