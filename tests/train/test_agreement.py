"""What ranks tell of their replicas, for others to compare."""

import numpy as np
import pytest
import torch
from regression import make

from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import DataParallel, LocalSGD, Sharded


@pytest.mark.parametrize(
    ("strategy", "steps"), [(DataParallel(), [1, 6]), (LocalSGD(3), [1, 6]), (Sharded(), [])]
)
def test_digests_that_ranks_tell(together, strategy, steps):
    """Of replicas the same, until one is changed; of ranks that train apart, what they agreed on;
    of those that hold something of their own, nothing."""

    def body(rank):
        trainer = make(strategy=strategy)
        trainer.fit(6)
        equal = told()
        if rank == 1:
            with torch.no_grad():
                next(iter(trainer.model.parameters())).view(-1)[0] += 1
        trainer.fit(1)
        return trainer.blocks, equal, told()

    def told():
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        own = records[records["kind"] == Kind.DIGEST]
        return [(int(r["step"]), int(r["ident"]), float(r["value"])) for r in own]

    one, other = together(2, body)
    assert one[:2] == other[:2]
    names, equal, _ = one
    assert sorted({step for step, _, _ in equal}) == steps
    assert len(equal) == len(names) * len(steps)
    changed = [a[1] for a, b in zip(one[2], other[2], strict=True) if a != b]
    assert changed == ([0] if isinstance(strategy, DataParallel) else [])
