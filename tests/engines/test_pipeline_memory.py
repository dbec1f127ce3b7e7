"""A model for which no engine has the memory trains as a pipeline."""

import pytest

import nbdist

CELL = """
import re, resource
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from nbdist.train import DataParallel, Pipeline, Trainer

WIDTH, BLOCKS = 512, 144
NEED_BYTES = 4 * 4 * BLOCKS * (WIDTH + 1) * WIDTH
'''Parameters, gradients, and two moments of Adam's.'''

def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

def limit():
    '''From now on a third of the need, beside what there is after the start.'''
    import torch.distributed.pipelining  # some 70 MB of code, whatever the model
    status = Path("/proc/self/status").read_text()
    size_bytes = 1024 * int(re.search(r"VmData:\\s+(\\d+)", status)[1])
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes + NEED_BYTES // 3, most))

def make(strategy):
    return Trainer(
        model=build, optimizer=lambda named: torch.optim.Adam(named, lr=1e-4),
        loss=nn.functional.mse_loss, data=TensorDataset(*torch.ones(2, 16, WIDTH)),
        global_batch=16, strategy=strategy,
    )
"""


def test_a_model_that_no_engine_can_hold_trains_as_a_pipeline(cluster):
    """One engine says that it cannot, and what could; four under the same limit train it."""
    one = cluster(1)
    one.run(CELL)
    one.run("limit()", once=True)

    def train():
        one.run("trainer = make(DataParallel())")
        one.train("trainer", steps=2).wait(60)

    with pytest.raises(nbdist.CellFailed, match=r"OutOfMemory.*strategy=Pipeline"):
        train()
    one.shutdown()
    four = cluster(4)
    four.run(CELL)
    four.run("limit()", once=True)
    four.run("trainer = make(Pipeline(4, '1f1b', 8, copy_every=0))")
    history = four.train("trainer", steps=3).wait(100).history
    assert history["loss"][-1] < history["loss"][0]
    held = four.run("sum(p.nbytes for p in trainer.model.parameters()) * 16 / NEED_BYTES").values
    assert set(held.values()) == {1.0}
