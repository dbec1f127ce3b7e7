"""What happened when within the last steps of one slot, and within the worst before them. Pure."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nbdist.protocol.telemetry import RECORD, TIMELINE, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.supervisor.history import Budget

NUM_LAST = 50
NUM_WORST = 20
MAX_RECORDS = 1_000
"""Of one step; more are counted and left out."""

_KINDS = np.array(sorted(TIMELINE), dtype=np.uint16)


class Key(NamedTuple):
    """Names one attempt at a step."""

    generation: int
    step: int
    attempt: int


class StepTimeline:
    """One attempt at a step on one slot."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.records: NDArray[np.void] = np.empty(0, RECORD)
        """Its spans and bucket events, of dtype `RECORD`, in the order of their numbers."""

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self.records.nbytes

    def is_begun_anew(self, records: NDArray[np.void]) -> bool:
        """Whether these are of another step of that number: of another run in the same group."""
        ended_ns = self.records["t1_ns"][self.records["kind"] == Kind.STEP]
        forward_ns = records["t0_ns"][records["kind"] == Kind.FORWARD]
        return bool(len(ended_ns) and len(forward_ns) and forward_ns[0] >= ended_ns[-1])

    def tail_ns(self) -> int:
        """From the moment at which the last bucket was ready to the end of the last reduction.

        So much communication at least was not hidden behind the backward; 0 without buckets.
        """
        records = self.records
        ready = records["t1_ns"][records["kind"] == Kind.BUCKET_READY]
        done = records["t1_ns"][records["kind"] == Kind.BUCKET_DONE]
        return max(0, int(done.max() - ready.max())) if len(ready) and len(done) else 0


class Timelines:
    """Those of one slot."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._last: deque[StepTimeline] = deque()
        self._by_key: dict[Key, StepTimeline] = {}
        """Those among the last."""
        self._worst: list[tuple[int, StepTimeline]] = []
        """By falling tail."""
        self.num_left_out = 0
        """Records that had no room."""

    @property
    def last(self) -> list[StepTimeline]:
        """The last steps, oldest first."""
        return list(self._last)

    @property
    def worst(self) -> list[StepTimeline]:
        """The steps before those with the longest tails, the longest first."""
        return [step for _, step in self._worst]

    def add(self, records: NDArray[np.void]) -> None:
        """Take records in, in the order in which they were written."""
        records = records[np.isin(records["kind"], _KINDS)]
        if not len(records):
            return
        is_other = np.zeros(len(records) - 1, dtype=np.bool_)
        for name in Key._fields:
            is_other |= np.diff(records[name]) != 0
        # Two threads may be in two steps for a moment: a step may come in several pieces.
        starts = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(records)]
        firsts = records[starts[:-1]]
        keys = zip(*(firsts[name].tolist() for name in Key._fields), strict=True)
        for key, (start, end) in zip(keys, pairwise(starts), strict=True):
            self._add(Key(*key), records[start:end])

    def _add(self, key: Key, records: NDArray[np.void]) -> None:
        step = self._by_key.get(key)
        if step is None or step.is_begun_anew(records):
            step = self._by_key[key] = StepTimeline(key)
            self._last.append(step)
            if len(self._last) > NUM_LAST:
                self._retire()
        kept = records[: MAX_RECORDS - len(step.records)]
        if not self._take(kept.nbytes, step):
            kept = kept[:0]
        step.records = np.concatenate([step.records, kept], dtype=RECORD)
        self.num_left_out += len(records) - len(kept)

    def _take(self, num_bytes: int, newest: StepTimeline) -> bool:
        """Room for the newest step, at the cost of older ones if need be."""
        while not self._budget.take(num_bytes):
            if self._last[0] is not newest:
                self._budget.give_back(self._pop_oldest().num_bytes)
            elif self._worst:
                self._budget.give_back(self._worst.pop()[1].num_bytes)
            else:
                return False
        return True

    def _pop_oldest(self) -> StepTimeline:
        step = self._last.popleft()
        if self._by_key[step.key] is step:
            del self._by_key[step.key]
        return step

    def _retire(self) -> None:
        """The oldest step goes, unless it is one of the worst."""
        step = self._pop_oldest()
        if tail_ns := step.tail_ns():
            place = sum(tail_ns <= other for other, _ in self._worst)
            self._worst.insert(place, (tail_ns, step))
        gone = self._worst[NUM_WORST:] if tail_ns else [(0, step)]
        self._worst = self._worst[:NUM_WORST]
        for _, step in gone:
            self._budget.give_back(step.num_bytes)
