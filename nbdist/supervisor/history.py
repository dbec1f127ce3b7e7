"""Bounded history of one value, and the bytes that all histories may take together. Pure.

A history grows as values come, up to its capacity; then the newest take the place of the oldest.
Where the budget is spent it stops growing earlier: it forgets sooner, and takes no more memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

POINT = np.dtype(
    [("at", "f8"), ("value", "f8"), ("step", "i8"), ("generation", "i4"), ("attempt", "i4")]
)
"""One value. at: seconds of the host's monotonic clock; the others: in what it was measured."""

SUMMARY = np.dtype([("at", "f8"), ("mean", "f8"), ("low", "f8"), ("high", "f8"), ("step", "i8")])
"""Several values on end: their mean, smallest and largest; `at` and `step` of the last."""

CAPACITY = 2_000
"""Points that a history holds, and summaries of either kind."""
SUMMED_UP = 10
"""Points in a summary of the first kind, and of those in one of the second."""
FIRST_POINTS = 64
"""A history begins with room for so many."""
RESERVE = 0.125
"""This share of the budget is for those that begin."""


class Budget:
    """Bytes that may be taken."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Taken now."""

    def take(self, num_bytes: int, *, is_first: bool = False) -> bool:
        """Whether they are there, and taken; `is_first`: for something that has none yet."""
        limit = self.max_bytes if is_first else self.max_bytes * (1 - RESERVE)
        if self.num_bytes + num_bytes > limit:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """They are free again."""
        self.num_bytes -= num_bytes


class Window:
    """The last values of one dtype."""

    def __init__(self, dtype: np.dtype[np.void], budget: Budget, capacity: int = CAPACITY) -> None:
        self._capacity, self._budget = capacity, budget
        self._kept = np.empty(0, dtype)
        self._end = 0
        """Where the next value goes."""
        self._num = 0
        self.num_added = 0
        """Values that were ever taken in."""

    def add(self, values: NDArray[np.void]) -> int:
        """Take these in; returns how many found no room because not even the first bytes did."""
        if self._num + len(values) > len(self._kept):
            self._grow(self._num + len(values))
        size = len(self._kept)
        if not size:
            return len(values)
        last = values[-size:]
        places = (self._end + np.arange(len(last))) % size
        self._kept[places] = last
        self._end = int(self._end + len(last)) % size
        self._num = min(size, self._num + len(last))
        self.num_added += len(values)
        return 0

    def values(self, num_last: int | None = None) -> NDArray[np.void]:
        """A copy, oldest first; of the last so many."""
        start = self._end - (self._num if num_last is None else min(num_last, self._num))
        places = np.arange(start, self._end) % max(1, len(self._kept))
        return self._kept[places]

    def _grow(self, wanted: int) -> None:
        old = len(self._kept)
        new = min(self._capacity, max(FIRST_POINTS, 2 * old, wanted))
        more = (new - old) * self._kept.itemsize
        if old == 0 and not self._budget.take(more):
            new = min(new, FIRST_POINTS)
            if not self._budget.take(new * self._kept.itemsize, is_first=True):
                return
        elif old and (new == old or not self._budget.take(more)):
            return
        values = self.values()
        self._kept = np.empty(new, self._kept.dtype)
        self._kept[: self._num] = values
        self._end = self._num % new


class History:
    """The last values as they were, those before them by tens, those before them by hundreds."""

    def __init__(self, budget: Budget) -> None:
        self._points = Window(POINT, budget)
        self._num_waiting = 0
        """The last points, which are in no summary yet: many cost little more than few."""
        self._by_ten, self._by_hundred = Window(SUMMARY, budget), Window(SUMMARY, budget)
        self._rest = np.empty(0, SUMMARY)
        self._rest_of_tens = np.empty(0, SUMMARY)

    def add(self, points: NDArray[np.void]) -> int:
        """Take points in; returns how many were refused because there was no room at all."""
        # A history that has begun holds as many: none is overwritten before it is summed up.
        is_much = self._num_waiting + len(points) > FIRST_POINTS
        waiting = self._points.values(self._num_waiting) if is_much else None
        num_refused = self._points.add(points)
        if num_refused:
            return num_refused
        self._num_waiting += len(points)
        if waiting is not None:
            self._sum_up(np.concatenate([waiting, points], dtype=POINT))
        return 0

    def _sum_up(self, points: NDArray[np.void]) -> None:
        self._num_waiting = 0
        summaries = np.empty(len(points), SUMMARY)
        summaries["at"], summaries["step"] = points["at"], points["step"]
        for name in ("mean", "low", "high"):
            summaries[name] = points["value"]
        tens, self._rest = _sum_up(np.concatenate([self._rest, summaries], dtype=SUMMARY))
        self._by_ten.add(tens)
        rest = np.concatenate([self._rest_of_tens, tens], dtype=SUMMARY)
        hundreds, self._rest_of_tens = _sum_up(rest)
        self._by_hundred.add(hundreds)

    def points(self) -> NDArray[np.void]:
        """The last values as they were, of dtype `POINT`, oldest first."""
        return self._points.values()

    @property
    def num_added(self) -> int:
        """Points that were ever taken in."""
        return self._points.num_added

    def since(self, num: int) -> NDArray[np.void]:
        """Those points that came after the first `num`, as far as they are kept."""
        return self._points.values(max(0, self.num_added - num))

    def summaries(self) -> NDArray[np.void]:
        """What came before the points, of dtype `SUMMARY`, oldest first."""
        if self._num_waiting:
            self._sum_up(self._points.values(self._num_waiting))
        points, tens = self._points.values(), self._by_ten.values()
        hundreds = self._by_hundred.values()
        if len(points):
            tens = tens[tens["at"] < points["at"][0]]
        if len(tens):
            hundreds = hundreds[hundreds["at"] < tens["at"][0]]
        elif len(points):
            hundreds = hundreds[hundreds["at"] < points["at"][0]]
        return np.concatenate([hundreds, tens], dtype=SUMMARY)

    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """All of it as (at, value), with means where only summaries are left."""
        points, summaries = self.points(), self.summaries()
        x = np.concatenate([summaries["at"], points["at"]])
        return x, np.concatenate([summaries["mean"], points["value"]])


def _sum_up(values: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Summaries of so many each, and the values that are left over."""
    num = len(values) // SUMMED_UP
    groups = values[: num * SUMMED_UP].reshape(num, SUMMED_UP)
    out = np.empty(num, SUMMARY)
    out["at"], out["step"] = groups["at"][:, -1], groups["step"][:, -1]
    with np.errstate(invalid="ignore", over="ignore"):  # a loss may be anything
        out["mean"] = groups["mean"].mean(axis=1)
        out["low"], out["high"] = groups["low"].min(axis=1), groups["high"].max(axis=1)
    return out, values[num * SUMMED_UP :].copy()
