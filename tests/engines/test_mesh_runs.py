"""Two pipelines beside each other train on when a stage of one is lost: its twin has it."""

import pytest
from training import kill_each

CELL = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from nbdist.train import Evaluate, Mesh, Pipeline, Trainer, bench_model

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(240, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (240,), generator=generator))

MESH = Mesh(pipeline=Pipeline(2, "1f1b", 4, copy_every=5), data=2)

def make(**more):
    usual = dict(model=bench_model, data=data(), loss=functional.cross_entropy, global_batch=47)
    usual |= dict(optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), clip_norm=1.0)
    usual |= dict(evaluate=Evaluate(data(), every=25))
    return Trainer(**(usual | dict(strategy=MESH) | more))

trainer = make()
"""


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
