"""A training run whose ranks are killed and stopped, and whose world grows and shrinks."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import NbdistError
from nbdist.session.start import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.bench.figures import Samples
    from nbdist.protocol.events import Incident
    from nbdist.session.cluster import Cluster
    from nbdist.session.run import Run

_CELL = """
from torch.utils.data import TensorDataset
from nbdist.bench.plain_ddp import GLOBAL_BATCH, tensors
from nbdist.train import DataParallel, Trainer, bench_model
trainer = Trainer(
    model=bench_model,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
    loss=torch.nn.CrossEntropyLoss(),
    data=TensorDataset(*tensors()),
    global_batch=GLOBAL_BATCH,
    strategy={strategy},
)
"""
_ENDLESS = 1_000_000
_HANG_TIMEOUT_S = 1.0
_LIMIT_S = 30.0
_POLL_S = 0.01
_SIZES = (4, 3, 4)


def kill(round_number: int, num_kills: int, samples: Samples) -> None:
    """SIGKILL at random moments, each when the world is whole again; then one SIGSTOP."""
    moment = random.Random(round_number)  # noqa: S311 - moments of kills, the same each time
    ranks = [(round_number + number) % 4 for number in range(num_kills)]
    refilled_s, incidents = disturb(4, ranks, moment)
    for seconds in refilled_s:
        samples.add("run refilled", seconds)
    for incident in incidents:
        _account(incident, samples)


def disturb(
    num_engines: int, ranks: Sequence[int], moment: random.Random, strategy: str = "DataParallel()"
) -> tuple[list[float], Sequence[Incident]]:
    """Kill these ranks of a run, one after the other, then stop the first of them.

    Returns:
        After how many seconds each newcomer trained, and the run's incidents.
    """
    with start(num_engines, hang_timeout_s=_HANG_TIMEOUT_S) as cluster:
        run = begin(cluster, _CELL.format(strategy=strategy))
        refilled_s = kill_some(cluster, run, ranks, moment)
        before = cluster.generation
        _wait_steps(run, 5)
        cluster.kill(ranks[0], signal="STOP")
        cluster.wait_healthy(_LIMIT_S, after=before + 1)
        _wait_steps(run, 5)
        _end_equal(cluster, run)
    return refilled_s, run.incidents


def scale(samples: Samples) -> None:
    """2 → 4 → 3 → 4 engines while it trains."""
    with start(2) as cluster:
        run = begin(cluster, _CELL.format(strategy="DataParallel()"))
        for size in _SIZES:
            _wait_steps(run, 5)
            cluster.scale(size)
        _wait_steps(run, 5)
        _end_equal(cluster, run)
    for incident in run.incidents:
        samples.add("run scaled", incident.stall_s)


def begin(cluster: Cluster, cell: str) -> Run:
    """Train without end what a cell has made."""
    cluster.run(cell)
    run = cluster.train("trainer", steps=_ENDLESS)
    _wait_steps(run, 20)
    return run


def kill_some(
    cluster: Cluster, run: Run, ranks: Sequence[int], moment: random.Random
) -> list[float]:
    """One after the other, anywhere in a step, each when the world is whole again.

    Returns:
        After how many seconds each newcomer trained.
    """
    refilled_s = []
    for rank in ranks:
        _wait_steps(run, moment.randrange(2, 12))
        time.sleep(moment.random() * 0.02)
        refilled_s.append(_kill_one(cluster, run, rank))
    return refilled_s


def end(run: Run) -> None:
    """A run that lost anything has no figures."""
    run.stop()
    steps = run.history["step"]
    if not np.array_equal(steps, np.arange(len(steps))):
        raise NbdistError("a step is missing, or was committed twice")
    if any(i.samples_lost or i.samples_repeated for i in run.incidents):
        raise NbdistError("samples were lost or repeated")


def _kill_one(cluster: Cluster, run: Run, rank: int) -> float:
    before, killed_at = cluster.generation, time.monotonic()
    cluster.kill(rank)
    cluster.wait_healthy(_LIMIT_S, after=before + 1)
    _wait_for(lambda: run.history["generation"][-1] > before + 1, "the newcomer does not train")
    rows = run.story().rows
    trains_at = rows["at"][rows["generation"] > before + 1][0]
    return float(trains_at) - killed_at


def _account(incident: Incident, samples: Samples) -> None:
    if incident.kind == "hung":
        samples.add("run hung", (incident.stall_s or 0.0) - _HANG_TIMEOUT_S)
        return
    samples.add(f"run {incident.kind}", incident.stall_s)
    samples.add(f"run {incident.kind} regroup", incident.regroup_s)
    if incident.kind == "lost":
        samples.add("run lost detect", incident.detect_s)
    else:
        samples.add("run joined restore", incident.restore_s)


def _end_equal(cluster: Cluster, run: Run) -> None:
    end(run)
    digests = set(cluster.parameter_digest("trainer").values())
    if len(digests) > 1:
        raise NbdistError(f"the replicas differ: {digests}")


def _wait_steps(run: Run, num_steps: int) -> None:
    mark = len(run.history["step"]) + num_steps
    _wait_for(lambda: len(run.history["step"]) >= mark, "the run does not go on")


def _wait_for(condition: Callable[[], bool], trouble: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise NbdistError(f"{trouble} for {_LIMIT_S:g} s")
        time.sleep(_POLL_S)
