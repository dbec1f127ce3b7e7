"""After a run for which memory was too small, an engine has what it had before."""

from __future__ import annotations

import pytest

import nbdist

CELL = """
import weakref
from torch.utils.data import TensorDataset
from nbdist.train import DataParallel, Trainer

class Large(torch.nn.Linear):
    def forward(self, x):
        if self.training and dist.get_rank() == 1:
            raise MemoryError  # as an allocation does in the midst of a step
        return super().forward(x)

def make():
    return Trainer(
        model=lambda: Large(8, 8), optimizer=lambda named: torch.optim.Adam(named),
        loss=torch.nn.functional.mse_loss, data=TensorDataset(torch.ones(16, 8), torch.ones(16, 8)),
        global_batch=4, strategy=DataParallel(),
    )
"""


def test_a_model_that_was_too_large_is_let_go(cluster, until):
    """Neither the error nor the run keeps it, on the rank that failed and on those that waited."""
    engines = cluster(2)
    engines.run(CELL)
    engines.run("trainer = make(); large = weakref.ref(trainer.model)")
    with pytest.raises(nbdist.CellFailed, match="OutOfMemory"):
        engines.train("trainer", steps=2).wait(60)
    engines.run("trainer = None")

    def is_gone():  # making another one makes room
        return set(engines.run("other = make(); large() is None").values.values()) == {True}

    until(is_gone, 60, "the model is let go")
