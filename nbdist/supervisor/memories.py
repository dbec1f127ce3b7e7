"""What engines held, sent, and how far they were apart, from their series, as tables. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import Kind
from nbdist.supervisor.history import POINT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.history import History
    from nbdist.supervisor.series import Series

_STEADY = (Kind.MEMORY_PEAK, Kind.MEMORY_LIMIT, Kind.MEMORY_DEVICE_LIMIT)
"""What seldom changes: a value that was told is not told again."""
_KINDS = (Kind.MEMORY_RSS, Kind.MEMORY_DEVICE, Kind.MEMORY_DEVICE_USED, *_STEADY)
_NO_POINTS = np.empty(0, POINT)


class PointReader:
    """How far somebody has read points of some kinds.

    Args:
        since: what was told before is not looked at, but for what has not changed since.
        kinds: which.
        column: of the table, for their values.
        steady: of these only changes are told.
    """

    def __init__(
        self, since: float, kinds: tuple[Kind, ...], column: str, steady: tuple[Kind, ...] = ()
    ) -> None:
        self._since = since
        self._kinds, self._column, self._steady = kinds, column, steady
        self._marks: dict[tuple[Slot, Kind], int] = {}
        """Points that were read already, of those that were ever taken in."""
        self._told: dict[tuple[Slot, Kind], float] = {}
        """The last value of what seldom changes."""

    def read(self, series: Series) -> list[Table]:
        """What is new: a part for each slot and each kind."""
        parts = [self._part(series, slot, kind) for slot in series.slots for kind in self._kinds]
        return [part for part in parts if len(part["at"])]

    def _part(self, series: Series, slot: Slot, kind: Kind) -> Table:
        points, history = _NO_POINTS, series.history(slot, kind)
        if history is not None:
            points = history.since(self._marks.get((slot, kind), 0))
            points = points[points["at"] >= self._since]
            self._marks[slot, kind] = history.num_added
        if kind in self._steady and len(points):
            before = self._told.get((slot, kind), np.nan)
            self._told[slot, kind] = float(points["value"][-1])
            points = points[np.diff(points["value"], prepend=before) != 0]
        num = len(points)
        who: Table = {"slot": np.full(num, slot), "kind": np.full(num, kind)}
        return {"at": points["at"], self._column: points["value"], **who}


class MemoryReader(PointReader):
    """Of what engines held."""

    def __init__(self, since: float) -> None:
        super().__init__(since, _KINDS, "bytes", _STEADY)


class DistanceReader(PointReader):
    """Of how far ranks were apart."""

    def __init__(self, since: float) -> None:
        super().__init__(since, (Kind.STALENESS, Kind.DRIFT), "value")


class SentReader:
    """How far somebody has read what slots have sent.

    An engine tells what it has sent since it began with the run; another one in its place begins
    again. Here they are added up.

    Args:
        since: what was told before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._marks: dict[Slot, int] = {}
        """Points that were read already, of those that were ever taken in."""
        self._known: dict[Slot, tuple[float, float]] = {}
        """What a slot's engine told last, and what that makes with those before it."""

    def read(self, series: Series) -> list[Table]:
        """What is new: a part for each slot."""
        parts = [self._part(series, slot) for slot in series.slots]
        return [part for part in parts if len(part["at"])]

    def _part(self, series: Series, slot: Slot) -> Table:
        told = _NO_POINTS
        history = series.history(slot, Kind.SENT)
        if history is not None:
            told = history.since(self._marks.get(slot, 0))
            if slot not in self._marks:
                told = np.concatenate([_ends(history), told], dtype=POINT)
            told = told[told["at"] >= self._since]
            self._marks[slot] = history.num_added
        last, total = self._known.get(slot, (0.0, 0.0))
        values = told["value"]
        rises = np.diff(values, prepend=last)
        totals = total + np.cumsum(np.where(rises < 0, values, rises))
        if len(told):
            self._known[slot] = float(values[-1]), float(totals[-1])
        # That somebody begins is no news of a step.
        told, totals = told[values > 0], totals[values > 0]
        slots = np.full(len(told), slot)
        return {"step": told["step"], "at": told["at"], "sent_bytes": totals, "slot": slots}


def _ends(history: History) -> NDArray[np.void]:
    """What was told before those points that are kept whole: of each ten or more the most."""
    summaries = history.summaries()
    points = np.zeros(len(summaries), POINT)
    points["value"] = summaries["high"]
    for name in ("at", "step"):
        points[name] = summaries[name]
    return points
