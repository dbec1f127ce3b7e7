"""Training steps of a run on two engines, between as many of a plain script of the same model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.session.start import start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

_NUM_RANKS = 2
NUM_STEPS = 100
"""Measured together."""
_LIMIT_S = 60.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""The first as torchrun has it, the second as engines do."""
TRAINER = """
from torch.utils.data import TensorDataset
from nbdist.bench.plain_ddp import GLOBAL_BATCH, LEARNING_RATE, tensors
from nbdist.train import Trainer, bench_model
trainer = Trainer(
    model=bench_model,
    optimizer=lambda named: torch.optim.AdamW(named, lr=LEARNING_RATE),
    loss=torch.nn.CrossEntropyLoss(),
    data=TensorDataset(*tensors()),
    global_batch=GLOBAL_BATCH,
)
"""


def measure(num_blocks: int, samples: Samples) -> None:
    """Seconds a step, each block of a run between two of the script."""
    with start(_NUM_RANKS, threads_per_engine=1) as cluster, _plain() as train_plain:
        cluster.run(TRAINER)
        train_plain()  # once unmeasured, as the run
        train(cluster)
        for number in range(num_blocks):
            before, ours, after = train_plain(), train(cluster), train_plain()
            samples.add_reference("plain step", before, after, number=number)
            samples.add("run step", ours)


def train(cluster: Cluster, num_steps: int = NUM_STEPS, trainer: str = "trainer") -> float:
    """Seconds a step, as the run's history has them; its first also waits for the run to begin."""
    run = cluster.train(trainer, steps=num_steps + 1)
    return float(run.wait(_LIMIT_S).history["seconds"][1:].mean())


@contextmanager
def _plain() -> Iterator[Callable[[], float]]:
    """The script in processes of its own, which stand still until they are to train."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [_start(rank, meeting) for rank in range(_NUM_RANKS)]

        def train() -> float:
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write(f"{NUM_STEPS}\n")
                rank.stdin.flush()
            return float(max(_answer(rank) for rank in ranks))

        try:
            yield train
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def _start(rank: int, meeting: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "nbdist.bench.plain_ddp", str(rank), str(_NUM_RANKS), meeting]
    return subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
        words,
        env=os.environ | _ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(rank: subprocess.Popen[str]) -> float:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise subprocess.SubprocessError(f"the plain script ended with {rank.wait()}")
    return float(line)
