"""Who has come to a cell's own training loop and waits for the others there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import runs as rn
from nbdist.supervisor import instructions as do

if TYPE_CHECKING:
    from nbdist.protocol.ids import CellId, RunId, Slot
    from nbdist.protocol.topology import Membership


class Entering:
    """Engines at the door of a loop that has not begun.

    Args:
        out: where instructions go.
    """

    def __init__(self, out: list[do.Instruction]) -> None:
        self._out = out
        self._waiting: dict[Slot, rn.RunEntered] = {}
        self._begun: dict[CellId, int] = {}
        """Cell -> its newest loop that has begun."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def cells(self) -> set[CellId]:
        """Cells that have come to such a loop somewhere."""
        return {event.cell for event in self._waiting.values()}

    def has_begun(self, cell: CellId, loop: int) -> bool:
        """Whether this loop of the cell, or a later one, has begun at some time."""
        return loop <= self._begun.get(cell, -1)

    def has_trained(self, cell: CellId) -> bool:
        """Whether a loop of the cell has begun."""
        return cell in self._begun

    def wait(self, event: rn.RunEntered) -> None:
        """One more is there."""
        self._waiting[event.slot] = event

    def begin(self, membership: Membership) -> rn.RunEntered | None:
        """The loop that all members have come to; None while some are missing.

        Ranks that want different things are refused: they would train apart.
        """
        members = [self._waiting[slot] for slot in membership.slots if slot in self._waiting]
        if not members or len(members) < membership.world_size:
            return None
        if len({(e.cell, e.loop, e.step, e.steps) for e in members}) > 1:
            asked = {
                int(membership.rank_of(e.slot)): f"{e.steps} from step {e.step}" for e in members
            }
            text = f"ranks want different steps, rank by rank: {asked}"
            for cell in {e.cell for e in members}:
                self.refuse("WrongState", text, cell)
            return None
        for event in members:
            del self._waiting[event.slot]
        self.note(members[0].cell, members[0].loop)
        return members[0]

    def note(self, cell: CellId, loop: int) -> None:
        """A loop has begun."""
        self._begun[cell] = max(loop, self._begun.get(cell, -1))

    def follow(self, cell: CellId, loop: int) -> set[Slot]:
        """Newcomers that wait at a loop that has begun; they wait for their admission now."""
        slots = {s for s, e in self._waiting.items() if (e.cell, e.loop) == (cell, loop)}
        for slot in slots:
            del self._waiting[slot]
        return slots

    def turn_back(self, slot: Slot, run: RunId) -> None:
        """One that waited has raised or left at the door: the others would wait for ever."""
        event = self._waiting.get(slot)
        if event is not None and rn.cell_run(event.cell, event.loop) == run:
            del self._waiting[slot]
            text = "another rank has left the cell's training loop before it began"
            self.refuse("WrongState", text, event.cell)

    def refuse(self, kind: str, message: str, cell: CellId | None = None) -> None:
        """Send those who wait away, with an error; `cell`: only those of this cell."""
        fault = rn.RunFault(kind=kind, message=message)
        for slot, event in list(self._waiting.items()):
            if cell in (None, event.cell):
                del self._waiting[slot]
                self.send_away(event, fault)

    def send_away(self, event: rn.RunEntered, fault: rn.RunFault | None) -> None:
        """Have a loop end at once on one engine, with an error if there is a fault."""
        name = rn.cell_run(event.cell, event.loop)
        self._out.append(do.Tell(event.slot, rn.EndRun(run=name, fault=fault)))

    def end_cell(self, cell: CellId) -> None:
        """A cell is over for the kernel."""
        self._begun.pop(cell, None)
        self.refuse("RunEnded", "the cell is over for the notebook", cell)

    def lost(self, slot: Slot) -> None:
        """An engine is gone."""
        self._waiting.pop(slot, None)
