"""Pipelines of stages that rest instead of computing: how long ranks wait, beside the formula.

A rest takes no core, so the figures are those of the schedules also on a machine with few cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.bench.figures import PIPELINES, idle_name
from nbdist.session.start import start

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

FORWARD_S, BACKWARD_S = 0.04, 0.08
"""Of one micro-batch, on all stages of a rank together."""
_NUM_STEPS = 3
"""Measured together, after one that also finds out shapes."""
_PER_RANK = 2
"""Stages on each rank where they are interleaved."""
_LIMIT_S = 60.0
_CELL = f"""
import time
from torch.utils.data import TensorDataset
from nbdist.train import Pipeline, Trainer

class Rest(torch.autograd.Function):
    @staticmethod
    def forward(context, x, share):
        context.share = share
        time.sleep(share * {FORWARD_S})
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.share * {BACKWARD_S})
        return gradient.clone(), None

class Rests(torch.nn.Module):
    def __init__(self, share):
        super().__init__()
        self.scale, self.share = torch.nn.Parameter(torch.ones(8)), share

    def forward(self, x):
        return Rest.apply(x * self.scale, self.share)

def make(stages, schedule, microbatches):
    share = world_size / stages
    return Trainer(
        model=lambda: torch.nn.Sequential(*[Rests(share) for _ in range(stages)]),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=TensorDataset(torch.ones(16, 8), torch.zeros(16, 8)),
        global_batch=16,
        strategy=Pipeline(stages, schedule, microbatches),
    )
"""


def measure(samples: Samples) -> None:
    """Each size once; interleaved stages between two measurements of those that are not."""
    for num_ranks in sorted({ranks for ranks, _ in PIPELINES}):
        with start(num_ranks, threads_per_engine=1) as cluster:
            cluster.run(_CELL)
            for ranks, microbatches in PIPELINES:
                if ranks == num_ranks:
                    step_s = _train(cluster, ranks, "1f1b", microbatches)
                    name = idle_name(ranks, microbatches)
                    samples.add(name, abs(idle_beyond(step_s, ranks, microbatches)))
            if num_ranks == PIPELINES[-1][0]:
                _interleave(cluster, samples)


def idle_beyond(step_s: float, num_ranks: int, num_microbatches: int) -> float:
    """The share of a step in which a rank waits, beyond what the schedule leaves idle."""
    idle = 1 - num_microbatches * (FORWARD_S + BACKWARD_S) / step_s
    return idle - (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def _interleave(cluster: Cluster, samples: Samples) -> None:
    ranks, microbatches = PIPELINES[-1]
    steps_s = []
    for stages, schedule in (
        (ranks, "1f1b"),
        (_PER_RANK * ranks, "interleaved"),
        (ranks, "1f1b"),
    ):
        steps_s.append(_train(cluster, stages, schedule, microbatches))
    before, interleaved, after = steps_s
    number = len(samples.of("interleaved step"))
    samples.add_reference("1f1b step", before, after, number=number)
    samples.add("interleaved step", interleaved)


def _train(cluster: Cluster, stages: int, schedule: str, microbatches: int) -> float:
    """Seconds of a usual step."""
    name = f"trainer_{len(cluster.runs)}"
    cluster.run(f"{name} = make({stages}, {schedule!r}, {microbatches})", once=True)
    run = cluster.train(name, steps=_NUM_STEPS + 1).wait(_LIMIT_S)
    return float(np.median(run.history["seconds"][1:]))
