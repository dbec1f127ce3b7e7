"""In which order one slot is to compute, as a rank of a pipeline, in the last groups. Pure.

An engine tells its order with the first batch in a group, and anew with each run. `planned` puts
the orders of all slots together.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import RECORD, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.supervisor.history import Budget

NUM_KEPT = 8
"""Orders of a slot, each of another group or run."""


class Plans:
    """Those of one slot."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._told: deque[NDArray[np.void]] = deque()
        self.num_left_out = 0
        """Records that had no room."""

    @property
    def told(self) -> list[NDArray[np.void]]:
        """Each order as its records, of dtype `RECORD`; the newest last, maybe not yet whole."""
        return list(self._told)

    def add(self, records: NDArray[np.void]) -> None:
        """Take records in, in the order in which they were written."""
        records = records[records["kind"] == Kind.PLANNED]
        if not len(records):
            return
        for piece in np.split(records, np.flatnonzero(records["ident"] == 0)):
            if not len(piece):
                continue
            if not self._budget.take(piece.nbytes):
                self.num_left_out += len(piece)
                continue
            if piece["ident"][0] == 0 or not self._told:
                self._told.append(np.empty(0, RECORD))
            self._told[-1] = np.concatenate([self._told[-1], piece], dtype=RECORD)
        while len(self._told) > NUM_KEPT:
            self._budget.give_back(self._told.popleft().nbytes)
