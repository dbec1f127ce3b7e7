"""What torch's reducer waits for natively ends with a cut, too."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.engine.native import PRESENT
from nbdist.engine.works import WORKS
from nbdist.train import DataParallel, Trainer


class Branched(nn.Module):
    """One of two layers is never used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def test_a_wait_that_gloo_does_not_end_ends_with_a_cut(together):
    """The other rank never comes; the sockets are whole."""

    def body(rank):
        if rank == 0:
            work = PRESENT.allreduce([torch.ones(1)])
            threading.Timer(0.1, WORKS.give_up).start()
            with pytest.raises(RuntimeError, match="cut"):
                work.wait()
            store = dist.distributed_c10d._get_default_store()
            store.set("done", "1")
        else:
            dist.distributed_c10d._get_default_store().wait(["done"])
        return True

    assert together(2, body) == [True, True]


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_reducer_waits_in_it(together, monkeypatch, find_unused):
    """Which parameters were unused, and the order of buckets, go through the group of ours."""
    asked = []
    for name in ("allreduce", "broadcast"):
        own = getattr(PRESENT, name)
        monkeypatch.setattr(
            PRESENT, name, lambda *a, own=own, name=name: asked.append(name) or own(*a)
        )

    def body(_rank):
        inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        Trainer(
            model=Branched if find_unused else lambda: nn.Linear(4, 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            loss=functional.mse_loss,
            data=TensorDataset(inputs, inputs[:, :1]),
            global_batch=12,
            strategy=DataParallel(find_unused=find_unused),
        ).fit(3)
        return set(asked)

    expected = {"allreduce"} if find_unused else {"broadcast"}
    assert together(2, body) == [expected, expected]
