"""Whether replicas are identical: digests that ranks told, put together look by look. Pure.

The newest looks are kept with all their digests, since slots tell them one after the other; of the
older ones those in which replicas began to differ, and of these only who differed in what.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.looks import MAX_BLOCKS, Of, unpacked
from nbdist.protocol.tables import TABLES
from nbdist.protocol.telemetry import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.history import Budget

NUM_OPEN = 8
"""Looks that are kept with their digests: no slot is so far behind another."""
NUM_KEPT = 16
"""Looks in which replicas began to differ."""
_COLUMNS = tuple(TABLES["agreement"])
_DIGESTS_BYTES = 8 * MAX_BLOCKS

Row = tuple[float, ...]
"""Of the table, its columns in their order."""


class _Look:
    """What all slots told at one boundary."""

    def __init__(self, step: int, generation: int) -> None:
        self.key = step, generation
        self._digests: dict[Slot, NDArray[np.float64]] = {}
        self._at = np.inf
        self._of = Of(0)

    @property
    def num_bytes(self) -> int:
        """That its digests take."""
        return _DIGESTS_BYTES * len(self._digests)

    def lacks(self, slot: Slot, block: int) -> bool:
        """Whether the slot has not told of this block."""
        return slot not in self._digests or bool(np.isnan(self._digests[slot][block]))

    def take(self, slot: Slot, record: np.void, budget: Budget) -> bool:
        """One digest; False where there is no room for it."""
        self._of = unpacked(int(record["ident"]))
        if slot not in self._digests:
            if not budget.take(_DIGESTS_BYTES):
                return False
            self._digests[slot] = np.full(MAX_BLOCKS, np.nan)
        self._digests[slot][self._of.block] = record["value"]
        self._at = min(self._at, float(record["t1_ns"]) * 1e-9)
        return True

    def rows(self) -> list[Row]:
        """A row for each slot that has told of all blocks, where there are two at least."""
        nums = {slot: int((~np.isnan(own)).sum()) for slot, own in self._digests.items()}
        num_blocks = max(nums.values(), default=0)
        slots = sorted(slot for slot, num in nums.items() if num == num_blocks)
        if len(slots) < 2:
            return []
        differs = dict.fromkeys(slots, 0)
        for block in range(num_blocks):
            values = [float(self._digests[slot][block]) for slot in slots]
            usual = Counter(values).most_common(1)[0][0]  # of equally many the first
            for slot, value in zip(slots, values, strict=True):
                differs[slot] |= (value != usual) << block
        (step, generation), at = self.key, self._at
        _, stride, is_anchor = self._of
        return [
            (at, step, float(mask), num_blocks, stride, is_anchor, slot, generation)
            for slot, mask in differs.items()
        ]


class Agreements:
    """Those of one cluster or of one record.

    Args:
        budget: from which the digests take their room.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._open: deque[_Look] = deque()
        self._kept: deque[list[Row]] = deque(maxlen=NUM_KEPT)
        self._last: tuple[int, bool] | None = None
        """Step of the last look that is closed, and whether it differed."""
        self.num_told = 0
        """Digests that were ever taken in."""
        self.num_left_out = 0
        """Those for which there was no room."""

    def add(self, slot: Slot, records: NDArray[np.void]) -> None:
        """Take in records of one engine, in their order."""
        for record in records[records["kind"] == Kind.DIGEST]:
            block = unpacked(int(record["ident"])).block
            key = int(record["step"]), int(record["generation"])
            look = next((o for o in self._open if o.key == key and o.lacks(slot, block)), None)
            if look is None:
                look = _Look(*key)
                self._open.append(look)
            if look.take(slot, record, self._budget):
                self.num_told += 1
            else:
                self.num_left_out += 1
        while len(self._open) > NUM_OPEN:
            self._close(self._open.popleft())

    def looks(self) -> list[list[Row]]:
        """Those in which replicas began to differ, then the newest ones; oldest first."""
        recent = [rows for look in self._open if (rows := look.rows())]
        return [*self._kept, *recent]

    def _close(self, look: _Look) -> None:
        rows = look.rows()
        self._budget.give_back(look.num_bytes)
        if not rows:
            return
        step, does_differ = look.key[0], differ(rows)
        is_new = self._last is None or not self._last[1] or step <= self._last[0]
        if does_differ and is_new:
            self._kept.append(rows)
        self._last = step, does_differ


def differ(rows: list[Row]) -> bool:
    """Whether any slot of a look differs in any block."""
    return any(row[_COLUMNS.index("differs")] for row in rows)


class AgreementReader:
    """How far somebody has read.

    Args:
        since: what was found before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._num_told = 0

    def read(self, agreements: Agreements) -> Table:
        """The first look that found a difference, and the newest; nothing where nothing is new."""
        rows: list[Row] = []
        if agreements.num_told > self._num_told:
            self._num_told = agreements.num_told
            at = _COLUMNS.index("at")
            looks = [look for look in agreements.looks() if look[0][at] >= self._since]
            first = next((look for look in looks if differ(look)), None)
            rows += first or []
            rows += looks[-1] if looks and looks[-1] is not first else []
        values = np.array(rows, dtype=np.float64).reshape(-1, len(_COLUMNS))
        return {column: values[:, place] for place, column in enumerate(_COLUMNS)}
