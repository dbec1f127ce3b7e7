"""A model whose matrices are cut trains like any other, and goes on when panels are lost."""

import pytest
from training import kill_each

CELL = """
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import TensorDataset
from nbdist.train import Evaluate, TensorParallel, Trainer, bench_model

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(240, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (240,), generator=generator))

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
PLAN |= {"4": ColwiseParallel(), "6": RowwiseParallel()}

def make(**more):
    usual = dict(model=bench_model, data=data(), loss=functional.cross_entropy, global_batch=47)
    usual |= dict(optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), clip_norm=1.0)
    usual |= dict(evaluate=Evaluate(data(), every=25))
    return Trainer(**(usual | dict(strategy=TensorParallel(PLAN, copy_every=5)) | more))

trainer = make()
"""


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
