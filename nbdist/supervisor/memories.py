"""What engines held in memory, from their series, as parts of a table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import Kind
from nbdist.supervisor.history import POINT

if TYPE_CHECKING:
    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.series import Series

_STEADY = (Kind.MEMORY_PEAK, Kind.MEMORY_LIMIT, Kind.MEMORY_DEVICE_LIMIT)
"""What seldom changes: a value that was told is not told again."""
_KINDS = (Kind.MEMORY_RSS, Kind.MEMORY_DEVICE, Kind.MEMORY_DEVICE_USED, *_STEADY)
_NO_POINTS = np.empty(0, POINT)


class MemoryReader:
    """How far somebody has read.

    Args:
        since: what was told before is not looked at, but for what has not changed since.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._marks: dict[tuple[Slot, Kind], int] = {}
        """Points that were read already, of those that were ever taken in."""
        self._told: dict[tuple[Slot, Kind], float] = {}
        """The last value of what seldom changes."""

    def read(self, series: Series) -> list[Table]:
        """What is new: a part for each slot and each of what it held."""
        parts = [self._part(series, slot, kind) for slot in series.slots for kind in _KINDS]
        return [part for part in parts if len(part["at"])]

    def _part(self, series: Series, slot: Slot, kind: Kind) -> Table:
        points, history = _NO_POINTS, series.history(slot, kind)
        if history is not None:
            points = history.since(self._marks.get((slot, kind), 0))
            points = points[points["at"] >= self._since]
            self._marks[slot, kind] = history.num_added
        if kind in _STEADY and len(points):
            before = self._told.get((slot, kind), np.nan)
            self._told[slot, kind] = float(points["value"][-1])
            points = points[np.diff(points["value"], prepend=before) != 0]
        num = len(points)
        who: Table = {"slot": np.full(num, slot), "kind": np.full(num, kind)}
        return {"at": points["at"], "bytes": points["value"], **who}
