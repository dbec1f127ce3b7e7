"""A run as a whole, as a report or a replay shows it: its committed steps, incidents and series.

Loaded by any process; plain values and numpy arrays. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from nbdist.protocol.ids import Slot
from nbdist.protocol.telemetry import SERIES, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from nbdist.protocol.events import Incident
    from nbdist.protocol.tables import Table

    Curves = dict[Slot, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]

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
all ranks. seconds: from the committed step before to this one, stalls included, but not the time
for which the user had the run paused. generation, world_size: of the group that committed it. lr:
the rate that the optimizer used, of its first parameter group. at: when it was committed, in
seconds of the host's monotonic clock.
"""


def is_known(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of these rows an engine has reported; of the others the number alone is right."""
    known: NDArray[np.bool_] = np.isfinite(rows["at"])
    return known


def unknown_in_words(num: int) -> str:
    """What a reader should know of so many rows."""
    return f"steps that were committed, and that no engine has reported: {num}"


OVER = ("finished", "stopped", "failed")
"""States in which a run stays."""


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
    """Committed steps that are known, in the order in which they were committed, of `ROWS`."""
    incidents: list[Incident] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    series: Curves = field(default_factory=dict)
    """Slot -> name -> (x, y): x in seconds of the host's monotonic clock, y in the unit that the
    name ends with (`compute_s`, `memory_rss_bytes`)."""
    state: str = ""
    """running, paused, recovering, finished, stopped or failed; empty: not known."""
    fault: str = ""
    """Why it failed."""
    first: int | None = None
    """Steps that the trainer had committed before it; None: the first row tells."""
    target: int | None = None
    """It was to end when so many were committed; None: not known."""
    started: str = ""
    """When, by the wall clock, as a label; empty: not known."""
    tables: dict[str, Table] = field(default_factory=dict)
    """What slots did and were, as frames tell it: those of `protocol.tables.TABLES` that are known,
    but for `rows`. Of buckets and spans the last steps and the worst before them."""
    notes: list[str] = field(default_factory=list)
    """What the reader should know: gaps, drops, a record that was cut short."""


_COLUMNS = ("step_s", "compute_s", "exposed_s", "wait_s", "data_s", "optimizer_s")


def curves_of(tables: Mapping[str, Table]) -> Curves:
    """`RunStory.series` as far as tables of a frame tell them."""
    curves: Curves = {}
    for slot, table in _by("slot", tables.get("steps", {})):
        for column in _COLUMNS:
            _add(curves, slot, column, table["ended_at"], table[column])
    for slot, table in _by("slot", tables.get("memory", {})):
        for kind, its in _by("kind", table):
            _add(curves, slot, SERIES[Kind(kind)], its["at"], its["bytes"])
    return curves


def _by(column: str, table: Table) -> Iterator[tuple[int, Table]]:
    """Its rows for each value of a column."""
    values = table[column].astype(np.int64) if table else np.empty(0, np.int64)
    for value in np.unique(values).tolist():
        yield value, {name: column[values == value] for name, column in table.items()}


def _add(
    curves: Curves, slot: int, name: str, x: NDArray[np.generic], y: NDArray[np.generic]
) -> None:
    known = np.isfinite(y.astype(np.float64))
    if known.any():
        curve = x[known].astype(np.float64), y[known].astype(np.float64)
        curves.setdefault(Slot(slot), {})[name] = curve
