"""Which worker of a parameter server trains which step, and whose update may be applied. Pure.

A step's number is a ticket: it says which samples are trained on. Tickets are dealt in order, and
each is applied once, whoever had it; a ticket of a worker that is gone is dealt again.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple


class Dealt(NamedTuple):
    """What a worker has."""

    ticket: int
    version: int
    """Of the parameters that it computes with: how many updates they have had."""


class Dealer:
    """Deals tickets.

    Args:
        step: so many are applied.
        staleness: no update may be applied after more others than that which its worker had not
            seen; None: after any number.
    """

    def __init__(self, step: int = 0, *, staleness: int | None = None) -> None:
        self._staleness = staleness
        self._low = self._next = step
        self._done: set[int] = set()
        """Applied ones, of those that are not lower than `low`."""
        self._again: list[int] = []
        """Dealt to workers that are gone; a heap."""
        self._out: dict[int, Dealt] = {}

    @property
    def low(self) -> int:
        """All tickets below are applied."""
        return self._low

    @property
    def version(self) -> int:
        """How many are."""
        return self._low + len(self._done)

    @property
    def is_even(self) -> bool:
        """Every ticket that was dealt is applied."""
        return not self._out and not self._again

    def has(self, worker: int) -> int | None:
        """The ticket that a worker has."""
        dealt = self._out.get(worker)
        return None if dealt is None else dealt.ticket

    def deal(self, worker: int, limit: int) -> Dealt | None:
        """The next ticket, lower than `limit` unless it was dealt before; None: not now."""
        if self._staleness is not None and len(self._out) > self._staleness:
            return None
        if not self._again and self._next >= limit:
            return None
        if self._again:
            ticket = heapq.heappop(self._again)
        else:
            ticket, self._next = self._next, self._next + 1
        self._out[worker] = Dealt(ticket, self.version)
        return self._out[worker]

    def may_apply(self, worker: int) -> bool:
        """Whether nobody else's update will be too old if this one is applied now.

        The others are then applied in the order of their age, the oldest first.
        """
        if self._staleness is None:
            return True
        others = sorted(dealt.version for who, dealt in self._out.items() if who != worker)
        ends = (self.version + 1 + place - its for place, its in enumerate(others))
        return all(end <= self._staleness for end in ends)

    def apply(self, worker: int) -> int:
        """A worker's update is applied: after how many others that it had not seen."""
        dealt = self._out.pop(worker)
        staleness = self.version - dealt.version
        self._note(dealt.ticket)
        return staleness

    def note(self, ticket: int) -> None:
        """It was applied elsewhere, too; whoever had it."""
        self._reach(ticket)
        self._out = {who: dealt for who, dealt in self._out.items() if dealt.ticket != ticket}
        self._again = sorted(its for its in self._again if its != ticket)
        self._note(ticket)

    def begin(self) -> None:
        """Workers of an earlier group are gone, until they say otherwise."""
        self._again = sorted([*self._again, *(dealt.ticket for dealt in self._out.values())])
        self._out = {}

    def keep(self, worker: int, dealt: Dealt) -> None:
        """A worker has this from an earlier group, and goes on with it, unless it is applied."""
        self._reach(dealt.ticket)
        if dealt.ticket in self._again:
            self._again.remove(dealt.ticket)
            heapq.heapify(self._again)
            self._out[worker] = dealt

    def packed(self) -> dict[str, Any]:
        """What another one needs to go on; workers have to say what they have."""
        again = sorted([*self._again, *(dealt.ticket for dealt in self._out.values())])
        return {"low": self._low, "next": self._next, "done": sorted(self._done), "again": again}

    def load(self, packed: dict[str, Any]) -> None:
        """Go on from what another one packed."""
        self._low, self._next = packed["low"], packed["next"]
        self._done, self._again, self._out = set(packed["done"]), list(packed["again"]), {}

    def _reach(self, ticket: int) -> None:
        """One that deals elsewhere has come as far as this."""
        for missing in range(self._next, ticket + 1):
            heapq.heappush(self._again, missing)
        self._next = max(self._next, ticket + 1)

    def _note(self, ticket: int) -> None:
        self._done.add(ticket)
        while self._low in self._done:
            self._done.remove(self._low)
            self._low += 1
