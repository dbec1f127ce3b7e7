"""What each slot did in each step, put together from its series: a row for an attempt. Pure.

Batches of the slots come at different moments. Rows are given only up to the last attempt that all
slots have told of, so that who waited for whom can be said once and for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import Kind
from nbdist.supervisor.history import POINT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.series import Series

SETTLED_S = 0.3
"""Telemetry is sent ten times a second: what is older has come, as a rule."""
LATE_S = 1.0
"""So long a slot that tells nothing holds back what the others tell."""
GONE_S = 3.0
"""A slot that has told nothing for so long is not waited for."""

PARTS = {
    "compute_s": Kind.COMPUTE,
    "exposed_s": Kind.VOTE,
    "data_s": Kind.DATA,
    "optimizer_s": Kind.OPTIMIZER,
    "samples": Kind.SAMPLES,
}
"""Column of `tables.TABLES["steps"]` -> the kind that it is the sum of."""


def key_of(points: NDArray[np.void]) -> NDArray[np.int64]:
    """Names an attempt by one number, which rises in a run."""
    generation, step = points["generation"].astype(np.int64), points["step"].astype(np.int64)
    keys: NDArray[np.int64] = (generation << 44) | (step << 8) | (points["attempt"] & 0xFF)
    return keys


class Reader:
    """How far somebody has read; a run has readers of its own.

    Args:
        since: what ended before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._marks: dict[tuple[Slot, Kind], int] = {}
        """Points that were read already, of those that were ever taken in."""
        self._heard: dict[Slot, float] = {}
        """When a slot last told of an attempt."""
        self._last = -1
        """The last attempt that was read."""

    def read(self, series: Series, now: float) -> list[Table]:
        """For each slot that has any the attempts that are new, whole and settled."""
        fresh = {slot: self._new(series, slot, Kind.STEP) for slot in series.slots}
        fresh = {slot: points for slot, points in fresh.items() if len(points)}
        if not fresh:
            return []
        self._heard |= dict.fromkeys(fresh, now)
        is_one_silent = any(
            now - at < GONE_S for slot, at in self._heard.items() if slot not in fresh
        )
        settled = now - (LATE_S if is_one_silent else SETTLED_S)
        last = min(_bound(points, settled) for points in fresh.values())
        chosen = {slot: points[key_of(points) <= last] for slot, points in fresh.items()}
        tables = [self._table(series, slot, steps) for slot, steps in chosen.items() if len(steps)]
        _add_waits(tables, self._last)
        self._last = max(self._last, last)
        return tables

    def _new(self, series: Series, slot: Slot, kind: Kind) -> NDArray[np.void]:
        """What was not read yet."""
        history = series.history(slot, kind)
        if history is None:
            return _NO_POINTS
        points = history.since(self._marks.get((slot, kind), 0))
        return points[points["at"] >= self._since]

    def _table(self, series: Series, slot: Slot, steps: NDArray[np.void]) -> Table:
        keys, until = key_of(steps), float(steps["at"][-1])
        table: Table = {name: steps[name] for name in ("step", "generation", "attempt")}
        table["slot"] = np.full(len(steps), slot)
        table["ended_at"], table["step_s"] = steps["at"], steps["value"]
        table["ready_at"] = np.full(len(steps), np.nan)
        for column, kind in PARTS.items():
            points = self._new(series, slot, kind)
            places, is_ours = _match(keys, key_of(points))
            sums = np.full(len(steps), np.nan)
            sums[places] = 0.0
            np.add.at(sums, places, points["value"][is_ours])
            table[column] = sums
            if kind is Kind.COMPUTE:
                table["ready_at"][places] = points["at"][is_ours]
            self._advance(series, slot, kind, until)
        self._advance(series, slot, Kind.STEP, until)
        return table

    def _advance(self, series: Series, slot: Slot, kind: Kind, until: float) -> None:
        """What ended by then was read."""
        history = series.history(slot, kind)
        if history is not None:
            unread = history.since(self._marks.get((slot, kind), 0))["at"] > until
            self._marks[slot, kind] = history.num_added - int(np.count_nonzero(unread))


_NO_POINTS = np.empty(0, POINT)


def _bound(points: NDArray[np.void], settled: float) -> int:
    """The last attempt of which nothing more will come from this slot."""
    keys, unsettled = key_of(points), np.flatnonzero(points["at"] > settled)
    return int(keys[unsettled[0]]) - 1 if len(unsettled) else int(keys[-1])


def _match(
    keys: NDArray[np.int64], others: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """For those of `others` that are among `keys` their places there, and which they are."""
    order = np.argsort(keys, kind="stable")
    found = order[np.minimum(np.searchsorted(keys, others, sorter=order), len(keys) - 1)]
    is_there = keys[found] == others
    return found[is_there], is_there


def _add_waits(tables: Sequence[Table], told: int) -> None:
    """How long each slot waited for the one that came last to the same attempt.

    Of attempts up to `told` others have been told before.
    """
    if not tables:
        return
    keys = np.concatenate([_key_of_table(table) for table in tables])
    ready = np.concatenate([table["ready_at"] for table in tables]).astype(np.float64)
    _, whose = np.unique(keys, return_inverse=True)
    latest = np.full(len(keys), -np.inf)
    np.fmax.at(latest, whose, ready)
    waits = np.where(keys > told, latest[whose] - ready, np.nan)
    ends = np.cumsum([len(table["step"]) for table in tables])
    for table, part in zip(tables, np.split(waits, ends[:-1]), strict=True):
        table["wait_s"] = part


def _key_of_table(table: Table) -> NDArray[np.int64]:
    points = np.empty(len(table["step"]), POINT)
    for name in ("step", "generation", "attempt"):
        points[name] = table[name]
    return key_of(points)
