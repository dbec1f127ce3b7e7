"""What has changed in the world, and when: phases and the states of seats, the last ones. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.tables import PHASES, STATES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.orders import WorldView
    from nbdist.protocol.tables import Table

MAX_CHANGES = 2_000
"""Of either kind; older ones are forgotten."""


class Log:
    """The last rows of a table of numbers, counted from the first that there ever was."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[float, ...]] = []
        self._num_forgotten = 0

    @property
    def num(self) -> int:
        """Rows that there ever were."""
        return self._num_forgotten + len(self._rows)

    def append(self, *row: float) -> None:
        """One more."""
        self._rows.append(row)
        if len(self._rows) > MAX_CHANGES:
            gone = len(self._rows) - MAX_CHANGES * 3 // 4
            self._rows, self._num_forgotten = self._rows[gone:], self._num_forgotten + gone

    def since(self, num: int, max_rows: int) -> Table:
        """Those after the first `num`: the last so many of them, as columns."""
        start = max(0, num - self._num_forgotten, len(self._rows) - max_rows)
        rows: NDArray[np.float64] = np.array(self._rows[start:], dtype=np.float64)
        rows = rows.reshape(-1, len(self._columns))
        return {name: rows[:, place] for place, name in enumerate(self._columns)}


class Changes:
    """Of one cluster."""

    def __init__(self) -> None:
        self.seats = Log("at", "slot", "rank", "state", "generation")
        self.phases = Log("at", "phase", "generation", "world_size")
        self._phase: tuple[float, ...] | None = None
        self._seats: dict[int, tuple[float, ...]] = {}

    def note(self, view: WorldView, now: float) -> None:
        """The world as it is now."""
        generation, size = view.membership.generation, view.membership.world_size
        phase = (float(PHASES.index(view.phase)), float(generation), float(size))
        if phase != self._phase:
            self._phase = phase
            self.phases.append(now, *phase)
        seats: dict[int, tuple[float, ...]] = {}
        for seat in view.seats:
            rank = -1.0 if seat.rank is None else float(seat.rank)
            state = STATES.index(seat.state)
            seats[int(seat.slot)] = (rank, float(state), float(seat.generation))
        gone = dict.fromkeys(self._seats.keys() - seats.keys(), (-1.0, 0.0, 0.0))
        for slot, told in sorted({**seats, **gone}.items()):
            if self._seats.get(slot) != told:
                self.seats.append(now, slot, *told)
        self._seats = seats
