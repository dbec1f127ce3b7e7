"""How far a training run is, as one line of text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.cli.table import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

RECENT_S = 3.0
"""Throughput is that of the last steps, so far back."""

_NUM_PACE = 20
"""The time left is told from the median of so many last steps: a stall does not move it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run at one moment."""

    num_committed: int
    num_steps: int
    """Steps that it is to commit."""
    loss: float
    """Of the last step; nan before the first."""
    tokens_per_second: float
    """Of one rank, stalls included; nan before the first step."""
    world_size: int
    generation: int
    left_s: float
    """How long it will still take at the pace of the last steps; nan before the first."""
    state: str

    def __str__(self) -> str:
        parts = [
            f"step {self.num_committed:{len(str(self.num_steps))}}/{self.num_steps}",
            f"loss {_number(self.loss, '.3f')}",
            f"{_number(self.tokens_per_second, ',.0f')} tokens/s per rank",
            f"world {self.world_size}",
            f"generation {self.generation}",
            f"ETA {_number(self.left_s, '')}",
        ]
        if self.state != "running":
            parts.append(self.state)
        return "  ".join(parts)


def progress(
    history: Mapping[str, NDArray[Any]],
    *,
    num_steps: int,
    tokens_per_sample: int,
    world_size: int,
    generation: int,
    state: str,
) -> Progress:
    """How far a run is.

    Args:
        history: columns of its committed steps, as `run.history` has them.
        num_steps: steps that it is to commit.
        tokens_per_sample: tokens of each sample.
        world_size: ranks now.
        generation: the present one.
        state: the run's.
    """
    seconds = history["seconds"]
    num = len(seconds)
    back = np.cumsum(seconds[::-1])
    recent = slice(num - min(num, int(np.searchsorted(back, RECENT_S)) + 1), num)
    spent = float((seconds * history["world_size"])[recent].sum())
    tokens = float(history["samples"][recent].sum()) * tokens_per_sample
    pace_s = float(np.median(seconds[-_NUM_PACE:])) if num else float("nan")
    return Progress(
        num_committed=num,
        num_steps=num_steps,
        loss=float(history["loss"][-1]) if num else float("nan"),
        tokens_per_second=tokens / spent if spent else float("nan"),
        world_size=world_size,
        generation=generation,
        left_s=max(0, num_steps - num) * pace_s,
        state=state,
    )


def _number(value: float, form: str) -> str:
    if not np.isfinite(value):
        return "–"
    return format(value, form) if form else duration(value)
