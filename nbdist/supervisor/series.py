"""Telemetry as the supervisor keeps it: bounded series per slot and kind, timelines of steps. Pure.

It holds no more bytes than it is given, whatever comes in. What it had to leave out is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import RECORD, SERIES, SPANS, Kind
from nbdist.supervisor.agreements import Agreements
from nbdist.supervisor.history import POINT, Budget, History
from nbdist.supervisor.plans import Plans
from nbdist.supervisor.timeline import Timelines

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot
    from nbdist.supervisor.timeline import StepTimeline

MEGABYTE = 1_000_000
MAX_WAITING = 512
"""Records of a slot that may wait to be taken into its series, unless somebody looks before."""


class Series:
    """Those of one cluster or of one record.

    Args:
        max_mb: megabytes that they may take.
    """

    def __init__(self, max_mb: float) -> None:
        self._budget = Budget(int(max_mb * MEGABYTE))
        self._histories: dict[tuple[Slot, Kind], History] = {}
        self._timelines: dict[Slot, Timelines] = {}
        self._plans: dict[Slot, Plans] = {}
        self.agreements = Agreements(self._budget)
        """What looks at replicas found."""
        self._waiting: dict[Slot, list[NDArray[np.void]]] = {}
        """What came since the series were last brought up to date: many records cost little more
        than few."""
        self._waiting_room: dict[Slot, int] = {}
        self.num_refused = 0
        """Values of series for which there was no room at all."""

    @property
    def num_bytes(self) -> int:
        """What is taken now."""
        return self._budget.num_bytes

    @property
    def num_left_out(self) -> int:
        """Records of timelines, plans and looks that had no room."""
        timelines, plans = self._timelines.values(), self._plans.values()
        num = sum(t.num_left_out for t in timelines) + sum(p.num_left_out for p in plans)
        return num + self.agreements.num_left_out

    @property
    def slots(self) -> list[Slot]:
        """The slots of which something came."""
        return sorted(self._timelines)

    def add(self, slot: Slot, records: NDArray[np.void]) -> None:
        """Take in records of one engine, of dtype `RECORD`, checked, in their order."""
        if slot not in self._timelines:
            self._timelines[slot] = Timelines(self._budget)
            self._plans[slot] = Plans(self._budget)
            room = MAX_WAITING * RECORD.itemsize
            self._waiting_room[slot] = MAX_WAITING if self._budget.take(room) else 0
        self.agreements.add(slot, records)  # at once: all slots' are put together
        waiting = self._waiting.setdefault(slot, [])
        waiting.append(records)
        if sum(map(len, waiting)) > self._waiting_room[slot]:
            self._settle(slot)

    def kinds(self, slot: Slot) -> list[Kind]:
        """The kinds of which a slot has a series."""
        self._settle(slot)
        return sorted(kind for other, kind in self._histories if other == slot)

    def history(self, slot: Slot, kind: Kind) -> History | None:
        """The series of one kind; None where nothing came."""
        self._settle(slot)
        return self._histories.get((slot, kind))

    def curves(self, slot: Slot) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """All series of a slot as name -> (at, value)."""
        return {SERIES[kind]: self._histories[slot, kind].curve() for kind in self.kinds(slot)}

    def last_steps(self, slot: Slot) -> list[StepTimeline]:
        """Timelines of the last steps, oldest first."""
        self._settle(slot)
        return self._timelines[slot].last if slot in self._timelines else []

    def worst_steps(self, slot: Slot) -> list[StepTimeline]:
        """Timelines of the steps before those with most communication left in the open."""
        self._settle(slot)
        return self._timelines[slot].worst if slot in self._timelines else []

    def plans(self, slot: Slot) -> list[NDArray[np.void]]:
        """What it is to do as a rank of a pipeline: each order as its records, the newest last."""
        self._settle(slot)
        return self._plans[slot].told if slot in self._plans else []

    def _settle(self, slot: Slot) -> None:
        """Take what waits into the series."""
        waiting = self._waiting.pop(slot, None)
        if not waiting:
            return
        records = np.concatenate(waiting, dtype=RECORD)
        self._timelines[slot].add(records)
        self._plans[slot].add(records)
        records = records[np.argsort(records["kind"], kind="stable")]
        numbers, starts = np.unique(records["kind"], return_index=True)
        for number, piece in zip(numbers, np.split(records, starts[1:]), strict=True):
            kind = Kind(int(number))
            if kind in SERIES:
                self._add_values(slot, kind, piece)

    def _add_values(self, slot: Slot, kind: Kind, records: NDArray[np.void]) -> None:
        points = np.empty(len(records), POINT)
        points["at"] = records["t1_ns"] * 1e-9
        if kind in SPANS:
            points["value"] = (records["t1_ns"] - records["t0_ns"]) * 1e-9
        else:
            points["value"] = records["value"]
        for name in ("step", "generation", "attempt"):
            points[name] = records[name]
        history = self._histories.get((slot, kind)) or History(self._budget)
        num_refused = history.add(points)
        self.num_refused += num_refused
        if num_refused < len(points):
            self._histories[slot, kind] = history
