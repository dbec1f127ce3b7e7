"""A language model cut over four engines: what copies of its parts cost, what a loss takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nbdist.bench.recovery import begin, end, kill_some
from nbdist.bench.steps import train
from nbdist.session.start import start

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples

_NUM_RANKS = 4
_NUM_STEPS = 20
"""Measured together: copies are made in every tenth."""
_CELL = """
from torch.nn import functional
from torch.utils.data import TensorDataset
from nbdist.train import GPT, Pipeline, Sharded, Trainer

def loss(logits, tokens):
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

def make(strategy):
    tokens = torch.randint(256, (256, 128), generator=torch.Generator().manual_seed(1))
    return Trainer(
        model=GPT,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
        loss=loss,
        data=TensorDataset(tokens, tokens),
        global_batch=16,
        strategy=strategy,
    )
"""
_STRATEGIES = {"pipeline": "Pipeline(4, '1f1b', 8, {})", "sharded": "Sharded({})"}
"""By the names of their figures, with a place for how often copies are made."""


def copy(num_blocks: int, samples: Samples) -> None:
    """Seconds a step, each block of a trainer that makes copies between two of one without."""
    with start(_NUM_RANKS, threads_per_engine=1) as cluster:
        cluster.run(_CELL)
        for name, strategy in _STRATEGIES.items():
            cluster.run(f"plain = make({strategy.format('copy_every=0')})")
            cluster.run(f"copied = make({strategy.format('')})")
            train(cluster, _NUM_STEPS, "copied")  # once unmeasured
            before = train(cluster, _NUM_STEPS, "plain")
            for number in range(num_blocks):
                samples.add(f"{name} copied", train(cluster, _NUM_STEPS, "copied"))
                after = train(cluster, _NUM_STEPS, "plain")
                samples.add_reference(f"{name} plain", before, after, number=number)
                before = after


def kill(round_number: int, num_kills: int, samples: Samples) -> None:
    """SIGKILL at random moments: what a rank held comes from its neighbour's copy."""
    moment = random.Random(round_number)  # noqa: S311 - moments of kills, the same each time
    for name, strategy in _STRATEGIES.items():
        with start(_NUM_RANKS, threads_per_engine=1) as cluster:
            run = begin(cluster, f"{_CELL}\ntrainer = make({strategy.format('')})")
            ranks = [(round_number + number) % _NUM_RANKS for number in range(num_kills)]
            for seconds in kill_some(cluster, run, ranks, moment):
                samples.add(f"{name} refilled", seconds)
            end(run)
        for incident in run.incidents:
            if incident.kind == "lost":
                samples.add(f"{name} lost", incident.stall_s)
