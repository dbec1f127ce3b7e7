"""A parameter server whose workers rest instead of computing, one of them four times as long.

A rest takes no core, so the figures are those of the modes also on a machine with few cores. What a
mode can come to at best follows from the rests: together all are as quick as the slowest, 1 / max t
steps a second; each for itself they make Σ 1/t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.session.start import start

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

NUM_WORKERS = 5
REST_S, SLOWER = 0.8, 4
_AT_BEST = {
    "async": (NUM_WORKERS - 1) / REST_S + 1 / (REST_S * SLOWER),
    "sync": 1 / (REST_S * SLOWER),
}
"""Steps a second."""
_NUM_STEPS = {"async": 136, "sync": 6}
_NUM_AT_ENDS = {"async": 8, "sync": 1}
"""Steps that are not counted, at the beginning and at the end: workers come and go one by one."""
_LIMIT_S = 120.0
_CELL = f"""
import time
from torch.utils.data import TensorDataset
from nbdist.train import ParameterServer, Trainer

class Rests(torch.nn.Linear):
    def forward(self, x):
        time.sleep({REST_S} * ({SLOWER} if rank == world_size - 1 else 1))
        return super().forward(x)

def make(mode):
    return Trainer(
        model=lambda: Rests(8, 1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=TensorDataset(torch.ones(20, 8), torch.zeros(20, 1)),
        global_batch=10,
        strategy=ParameterServer(mode),
    )
"""


def measure(samples: Samples) -> None:
    """Each mode once: how many times as long a step takes as it would at best."""
    with start(NUM_WORKERS + 2, threads_per_engine=1) as cluster:
        cluster.run(_CELL)
        for mode, rate in _AT_BEST.items():
            samples.add(f"{mode} step", _step_s(cluster, mode) * rate)


def _step_s(cluster: Cluster, mode: str) -> float:
    """Seconds from one step to the next, on average."""
    name, num = f"trainer_{mode}", _NUM_AT_ENDS[mode]
    cluster.run(f"{name} = make({mode!r})", once=True)
    run = cluster.train(name, steps=_NUM_STEPS[mode]).wait(_LIMIT_S)
    return float(np.mean(run.history["seconds"][num:-num]))
