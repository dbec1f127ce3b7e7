"""The committed steps of one run: rows as they come from the members, and what they say. Pure.

Every member reports every step that it has applied; the first report of a step counts. A step that
was applied only by members that are gone runs again: then its later row stands. A step that nobody
has reported though later ones were (the report went to a supervisor that is gone) stands as an
unknown row until it is: its number is right, its loss is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.story import ROWS, is_known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot

MAX_ROWS = 1_000_000
"""64 MB; older rows are dropped and counted."""
NUM_USUAL = 50
"""The usual duration of a step is the median of so many."""
_NAN = float("nan")


class Progress:
    """Committed steps from `first` on.

    Args:
        first: the first of them; None: that of the first row that comes.
    """

    def __init__(self, first: int | None) -> None:
        self.first = first or 0
        """Step of the oldest row that is kept."""
        self.num_dropped = 0
        self.num_replaced = 0
        """Rows that a later one replaced: their step was lost with all who had applied it."""
        self.num_samples = 0
        """Of all steps, also of those whose rows are dropped."""
        self.seconds = 0.0
        """What they took."""
        self._replaced: dict[int, range] = {}
        self._left_out: dict[int, float] = {}
        """Step -> how long the run was paused before it."""
        self._is_first_known = first is not None
        self._rows: NDArray[np.void] = np.zeros(1024, ROWS)
        self._size = 0
        self._acknowledged: dict[Slot, int] = {}

    @property
    def rows(self) -> NDArray[np.void]:
        """All rows that are kept; a view."""
        return self._rows[: self._size]

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.first + self._size

    @property
    def generation(self) -> int:
        """In which the newest step was committed; 0: none was."""
        return int(self._rows["generation"][self._size - 1]) if self._size else 0

    def replaced_in(self, generation: int) -> range:
        """Steps that had been committed before, and that a generation began to train anew."""
        return self._replaced.get(generation, range(0))

    def durable(self, members: Iterable[Slot]) -> int:
        """Steps that every member has acknowledged."""
        return min((self._acknowledged.get(slot, self.first) for slot in members), default=0)

    def leave_out(self, step: int, seconds: float) -> None:
        """The user had the run stand for so long before a step: that is no time of the step's."""
        self._left_out = {s: paused for s, paused in self._left_out.items() if s >= step}
        self._left_out[step] = self._left_out.get(step, 0.0) + seconds

    def acknowledge(self, slot: Slot, step: int) -> None:
        """A member has so many steps, its own or copied."""
        self._acknowledged[slot] = step

    def add(self, slot: Slot, data: bytes) -> NDArray[np.void]:
        """Take a member's report; returns the rows that are new.

        Raises ValueError where `data` is not whole rows.
        """
        rows = np.frombuffer(data, ROWS).copy()
        for step, paused in self._left_out.items():
            # Who came to the group after the pause has not measured it.
            rows["seconds"][(rows["step"] == step) & (rows["seconds"] >= paused)] -= paused
        fresh = [row for row in rows if self._take(row)]
        if len(rows) and self._counts(rows[-1]):
            reached = int(rows["step"][-1]) + 1
            self._acknowledged[slot] = max(reached, self._acknowledged.get(slot, reached))
        return np.array(fresh, ROWS)

    def usual_s(self) -> float:
        """Median duration of the last steps; 0 before there are any."""
        last = self.rows[-NUM_USUAL:]
        seconds = last["seconds"][is_known(last)]
        return float(np.median(seconds)) if len(seconds) else 0.0

    def _counts(self, row: np.void) -> bool:
        """Whether this is how the step was committed in the end."""
        place = int(row["step"]) - self.first
        is_kept = 0 <= place < self._size
        return is_kept and bool(self._rows[place]["generation"] == row["generation"])

    def _take(self, row: np.void) -> bool:
        step = int(row["step"])
        if not self._is_first_known:
            self.first, self._is_first_known = step, True
        place = step - self.first
        if place < 0 or place - self._size > MAX_ROWS:
            return False  # dropped long ago, or no step of this run
        while self.step < step:
            unknown = np.array([(self.step, _NAN, 0, _NAN, 0, 0, _NAN, _NAN)], ROWS)
            self._append(unknown[0])
        place = step - self.first
        if place == self._size:
            self._append(row)
            return True
        kept = int(self._rows[place]["generation"])
        if kept >= row["generation"]:
            return False
        if kept:
            for other in self._rows[place : self._size]:
                self._count(other, -1)
            self.num_replaced += self._size - place
            self._replaced[int(row["generation"])] = range(step, self.step)
            self._size = place + 1
            self._acknowledged = {s: min(n, step) for s, n in self._acknowledged.items()}
        self._rows[place] = row
        self._count(row)
        return True

    def _append(self, row: np.void) -> None:
        if self._size == MAX_ROWS:
            keep = MAX_ROWS - MAX_ROWS // 10
            dropped = self._size - keep
            self._rows[:keep] = self._rows[dropped : self._size].copy()
            self._size, self.first = keep, self.first + dropped
            self.num_dropped += dropped
        if self._size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(len(self._rows), ROWS)])
        self._rows[self._size] = row
        self._size += 1
        self._count(row)

    def _count(self, row: np.void, sign: int = 1) -> None:
        self.num_samples += sign * int(row["samples"])
        seconds = float(row["seconds"])
        self.seconds += sign * seconds if np.isfinite(seconds) else 0.0
