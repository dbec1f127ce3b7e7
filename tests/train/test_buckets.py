"""What is told of gradients on their way."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import DataParallel, Trainer

NUM_STEPS = 3
NUM_VOTE_BYTES = 3 * 2 * 4
"""Three numbers, as two of float32 each, travel with the gradients."""


def body(_):
    trainer = Trainer(
        model=lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        loss=functional.mse_loss,
        data=TensorDataset(torch.randn(64, 32), torch.randn(64, 32)),
        global_batch=16,
        accumulate=2,
        strategy=DataParallel(bucket_mb=0.005),
    )
    trainer.fit(NUM_STEPS)
    num_bytes = sum(p.nbytes for p in trainer.model.parameters())
    return RING.drain(4096).records, num_bytes


def test_each_bucket_tells_its_way(together):
    """Ready, launched and done, once a step for each, and all bytes of the gradient are in them."""
    for data, num_bytes in together(2, body):
        records = np.frombuffer(data, RECORD)
        for step in range(NUM_STEPS):
            mine = records[records["step"] == step]
            ready, launched, done = (
                mine[mine["kind"] == kind]
                for kind in (Kind.BUCKET_READY, Kind.BUCKET_LAUNCH, Kind.BUCKET_DONE)
            )
            assert len(ready) > (step > 0)  # torch lays buckets out after the first step
            for each in (ready, launched, done):
                assert sorted(each["ident"]) == list(range(len(ready)))
            assert done["value"].sum() == num_bytes + NUM_VOTE_BYTES
            assert (launched["t0_ns"] >= ready["t0_ns"]).all()
            order = np.argsort(done["ident"])
            assert (done["t0_ns"][order] == launched["t0_ns"]).all()
            backward = mine[mine["kind"] == Kind.BACKWARD]
            assert backward["ident"].tolist() == [0, 1]
            assert backward["t1_ns"][1] == ready["t0_ns"].max()
            (vote,) = mine[mine["kind"] == Kind.VOTE]
            assert vote["t0_ns"] == backward["t1_ns"][1]
            assert vote["t1_ns"] >= done["t1_ns"].max()
