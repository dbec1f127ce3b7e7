"""A run as a whole in the tables of frames: from its series and its worlds, for a story. Pure.

Of buckets and spans the last steps are told and the worst before them, as far as they are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.tables import PHASES, STATES, TABLES, num_rows
from nbdist.supervisor.agreements import AgreementReader
from nbdist.supervisor.attempts import Reader
from nbdist.supervisor.details import DetailReader
from nbdist.supervisor.memories import DistanceReader, MemoryReader, SentReader
from nbdist.supervisor.planned import PlanReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.record import World
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.series import Series

MAX_DETAILS = 6_000
"""Rows of spans, and as many of buckets: 70 steps of 4 ranks, some of 64."""
_FOR_EVER = 1e9
"""Seconds of a monotonic clock that no host reaches."""


def run_tables(series: Series, worlds: Sequence[World]) -> dict[str, Table]:
    """Those that have rows."""
    tables = {
        "steps": _joined("steps", _attempts(series)),
        **DetailReader(0.0).read(series, _FOR_EVER, MAX_DETAILS, with_worst=True),
        "plans": PlanReader(0.0).read(series),
        "sent": _joined("sent", SentReader(0.0).read(series)),
        "memory": _joined("memory", MemoryReader(0.0).read(series)),
        "distance": _joined("distance", DistanceReader(0.0).read(series)),
        "agreement": AgreementReader(0.0).read(series.agreements),
        "seats": _table("seats", _seats(worlds)),
        "phases": _table("phases", _phases(worlds)),
    }
    return {name: table for name, table in tables.items() if num_rows(table)}


def _attempts(series: Series) -> list[Table]:
    reader, found = Reader(0.0), []
    # Each time up to the last attempt of whoever ended first.
    while parts := reader.read(series, _FOR_EVER):
        found += parts
    return found


def _seats(worlds: Sequence[World]) -> Iterable[tuple[float, ...]]:
    """A row whenever a slot comes to a group, or is in none any more."""
    known: dict[Slot, tuple[float, ...]] = {}
    for world in worlds:
        ranks = {slot: rank for rank, slot in enumerate(world.slots)}
        for slot in sorted({*known, *ranks}):
            is_member = slot in ranks
            state = STATES.index("member" if is_member else "empty")
            now = (ranks.get(slot, -1), state, world.generation if is_member else 0)
            if known.get(slot) != now:
                known[slot] = now
                yield (world.at, slot, *now)


def _phases(worlds: Sequence[World]) -> Iterable[tuple[float, ...]]:
    for world in worlds:
        if world.phase in PHASES:
            phase = PHASES.index(world.phase)
            yield (world.at, phase, world.generation, len(world.slots))


def _joined(name: str, parts: Iterable[Table]) -> Table:
    parts = list(parts)
    return {
        column: np.concatenate([np.empty(0), *(part[column] for part in parts)])
        for column in TABLES[name]
    }


def _table(name: str, rows: Iterable[tuple[float, ...]]) -> Table:
    columns = TABLES[name]
    values = np.array(list(rows), dtype=np.float64).reshape(-1, len(columns))
    return {column: values[:, place] for place, column in enumerate(columns)}
