"""A run as a whole, as a report or a replay shows it: its committed steps, incidents and series.

Loaded by any process; plain values and numpy arrays. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.events import Incident
    from nbdist.protocol.ids import Slot

ROWS = np.dtype(
    [
        ("step", "i8"),
        ("loss", "f8"),
        ("samples", "i8"),
        ("seconds", "f8"),
        ("generation", "i8"),
        ("world_size", "i8"),
        ("lr", "f8"),
        ("at", "f8"),
    ]
)
"""One committed step.

step: its number, from 0. loss: mean over the global batch. samples: how many it trained on, over
all ranks. seconds: from the committed step before to this one, stalls included. generation,
world_size: of the group that committed it. lr: the rate that the optimizer used, of its first
parameter group. at: when it was committed, in seconds of the host's monotonic clock.
"""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation at a step boundary gave."""

    step: int
    """Steps committed before it."""
    at: float
    """When it ended, in seconds of the host's monotonic clock."""
    metrics: dict[str, float]
    """Name -> value over the whole evaluation set."""


@dataclass(frozen=True, kw_only=True)
class RunStory:
    """Everything that a report of a run needs."""

    title: str
    rows: NDArray[np.void]
    """Committed steps in the order in which they were committed, of dtype `ROWS`."""
    incidents: list[Incident] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    series: dict[Slot, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]] = field(
        default_factory=dict
    )
    """Slot -> name -> (x, y): x in seconds of the host's monotonic clock, y in the unit that the
    name ends with (`compute_s`, `memory_rss_bytes`)."""
    notes: list[str] = field(default_factory=list)
    """What the reader should know: gaps, drops, a record that was cut short."""
