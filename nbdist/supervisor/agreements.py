"""Whether replicas are identical: digests that ranks told, put together look by look. Pure.

The newest looks are kept with all their digests, since slots tell them one after the other; of the
older ones those in which replicas began to differ, and of these only who differed in what.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.looks import EVERY, MAX_BLOCKS, Of, unpacked
from nbdist.protocol.tables import TABLES
from nbdist.protocol.telemetry import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.history import Budget

    Rows = NDArray[np.float64]
    """Of the table, its columns in their order."""

NUM_OPEN = 8
"""Looks that are kept with their digests: no slot is so far behind another."""
NUM_KEPT = 32
"""Looks in which replicas began to differ, or a run or a group with replicas that did."""
_COLUMNS = tuple(TABLES["agreement"])
_AT, _DIFFERS = _COLUMNS.index("at"), _COLUMNS.index("differs")
_DIGESTS_BYTES = 8 * MAX_BLOCKS


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

    def rows(self) -> Rows:
        """A row for each slot that has told of all blocks, where there are two at least."""
        nums = {slot: int((~np.isnan(own)).sum()) for slot, own in self._digests.items()}
        num_blocks = max(nums.values(), default=0)
        slots = sorted(slot for slot, num in nums.items() if num == num_blocks)
        if len(slots) < 2:
            return np.empty((0, len(_COLUMNS)))
        differs = dict.fromkeys(slots, 0)
        for block in range(num_blocks):
            values = [float(self._digests[slot][block]) for slot in slots]
            usual = Counter(values).most_common(1)[0][0]  # of equally many the first
            for slot, value in zip(slots, values, strict=True):
                differs[slot] |= (value != usual) << block
        (step, generation), at = self.key, self._at
        _, stride, is_anchor = self._of
        rows = [
            (at, step, float(mask), num_blocks, stride, is_anchor, slot, generation)
            for slot, mask in differs.items()
        ]
        return np.array(rows, dtype=np.float64)


class Agreements:
    """Those of one cluster or of one record.

    Args:
        budget: from which the digests take their room.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._open: deque[_Look] = deque()
        self._kept: deque[Rows] = deque(maxlen=NUM_KEPT)
        self._expected: tuple[int, int] | None = None
        """Step and generation of a look that tells nothing new where it differs: those of the one
        before it, `EVERY` steps on, where that one differed."""
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

    def looks(self) -> list[Rows]:
        """Those in which replicas began to differ, then the newest ones; oldest first."""
        recent = [look.rows() for look in self._open]
        return [*self._kept, *(rows for rows in recent if len(rows))]

    def _close(self, look: _Look) -> None:
        rows = look.rows()
        self._budget.give_back(look.num_bytes)
        if not len(rows):
            return
        step, generation = look.key
        if differ(rows) and look.key != self._expected:
            self._kept.append(rows)
        self._expected = (step + EVERY, generation) if differ(rows) else None


def differ(rows: Rows) -> bool:
    """Whether any slot of a look differs in any block."""
    return bool(rows[:, _DIFFERS].any())


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
        parts: list[Rows] = []
        if agreements.num_told > self._num_told:
            self._num_told = agreements.num_told
            looks = [look for look in agreements.looks() if look[0, _AT] >= self._since]
            first = next((look for look in looks if differ(look)), None)
            parts += [] if first is None else [first]
            parts += looks[-1:] if looks and looks[-1] is not first else []
        values = np.concatenate([np.empty((0, len(_COLUMNS))), *parts])
        return {column: values[:, place] for place, column in enumerate(_COLUMNS)}
