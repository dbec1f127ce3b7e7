"""Cells and membership changes exclude one another: which cells run, which wait. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.supervisor.instructions import AdmitCell, Instruction, RefuseCell

if TYPE_CHECKING:
    from nbdist.protocol.ids import CellId, Slot
    from nbdist.protocol.topology import Membership

RELEASE_AFTER_S = 0.2
"""A wait for a rank whose cell has failed is broken when it lasts this long.

One that others can still end does not last so long.
"""


ENDED_S = 0.5
"""So long after a cell's end what a beat says of it may merely be old."""
NUM_ENDED = 64


@dataclass
class WaitingCell:
    """A `BeginCell` that waits for a membership change to end."""

    cell: CellId
    ranks: tuple[int, ...] | None


@dataclass
class Gate:
    """The cells of one cluster."""

    open: set[CellId] = field(default_factory=set)
    ranks: dict[CellId, tuple[int, ...] | None] = field(default_factory=dict)
    """Open cell -> where it was sent; None: everywhere."""
    waiting: list[WaitingCell] = field(default_factory=list)
    failed: dict[CellId, dict[Slot, float]] = field(default_factory=dict)
    """Open cell -> slots on which it raised, and when."""
    interrupted: dict[CellId, float] = field(default_factory=dict)
    """Open cell -> when the user wanted it to end."""

    ended: dict[CellId, float] = field(default_factory=dict)
    """The last cells that are over for the kernel, and since when: a rank may still be in one."""

    def admit(
        self, membership: Membership, between: tuple[int, int] | None = None
    ) -> list[Instruction]:
        """Let everything run that waits; `between`: the steps of a run that stands meanwhile."""
        out: list[Instruction] = []
        for cell in self.waiting:
            size = membership.world_size
            ranks = tuple(range(size)) if cell.ranks is None else cell.ranks
            missing = [r for r in ranks if not 0 <= r < size]
            if missing:
                world = f"the present world has ranks 0-{size - 1}"
                out.append(RefuseCell(cell.cell, "TargetError", f"no rank {missing[0]}: {world}"))
                continue
            self.open.add(cell.cell)
            self.ranks[cell.cell] = cell.ranks
            out.append(AdmitCell(cell.cell, membership, ranks, between))
        self.waiting = []
        return out

    def refuse(self, kind: str, message: str) -> list[Instruction]:
        """Turn away everything that waits."""
        out: list[Instruction] = [RefuseCell(c.cell, kind, message) for c in self.waiting]
        self.waiting = []
        return out

    def end(self, cell: CellId, now: float) -> None:
        """A cell is over, or not wanted any more."""
        self.waiting = [waiting for waiting in self.waiting if waiting.cell != cell]
        self.open.discard(cell)
        self.ranks.pop(cell, None)
        self.failed.pop(cell, None)
        self.interrupted.pop(cell, None)
        self.ended[cell] = now
        while len(self.ended) > NUM_ENDED:
            del self.ended[next(iter(self.ended))]

    def failed_on(self, cell: CellId, slot: Slot, now: float) -> None:
        """A cell raised on one engine."""
        if cell in self.open:
            self.failed.setdefault(cell, {})[slot] = now

    def interrupt(self, cell: CellId, now: float) -> None:
        """The user wants a cell to end."""
        if cell in self.open:
            self.interrupted[cell] = now

    def stuck_since(self, cell: CellId | None, slot: Slot) -> float | None:
        """Since when a wait of `slot` in this cell is for nothing; None where it is not.

        It is when the cell is over for the kernel, when the user wants it to end, or when it has
        raised on another rank.
        """
        if cell is None:
            return None
        if cell in self.ended:
            return self.ended[cell] + ENDED_S
        if cell in self.interrupted:
            return self.interrupted[cell]
        failed = self.failed.get(cell, {})
        return None if slot in failed or not failed else min(failed.values())

    def failed_slots(self, cell: CellId | None) -> set[Slot]:
        """Where a cell raised."""
        return set(self.failed.get(cell, {})) if cell else set()
