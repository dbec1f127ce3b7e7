"""Orders of the kernel and their answers, some of which have to wait until the world is as ordered."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.config import LOOPBACK
from nbdist.protocol import orders as od
from nbdist.protocol import wire
from nbdist.protocol.ids import CellId, Slot
from nbdist.supervisor.seats import SeatState
from nbdist.supervisor.state import Phase
from nbdist.supervisor.view import view_of

if TYPE_CHECKING:
    # The desk is the loop's own part for kernels; the two are one thread and know one another.
    from nbdist.supervisor.loop import Loop

SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP}


@dataclass
class Waiter:
    """A request whose answer has to wait."""

    identity: bytes
    number: int
    pids: set[int] = field(default_factory=set)
    """Exits to be recorded."""
    size: int | None = None
    """Seats that must all be members."""


class Desk:
    """Where kernels are served."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._kernels: set[bytes] = set()
        self._cells: dict[CellId, Waiter] = {}
        self._begun: dict[CellId, od.BeginCell] = {}
        self._waiters: list[Waiter] = []
        self._goodbyes: list[Waiter] = []
        self.store_host = LOOPBACK

    def take(self, identity: bytes, request: od.Request, now: float) -> None:
        """Carry out one order of a kernel."""
        machine, order, waiter = self._loop.machine, request.order, Waiter(identity, request.number)
        match order:
            case od.Attach():
                self._kernels.add(identity)
                for cell in machine.gate.open - set(order.open_cells):
                    machine.end_cell(cell, self._loop.journal.length, now)
                machine.gate.open |= set(order.open_cells)
                self._answer(waiter, view_of(machine))
            case od.Ping():
                self._answer(waiter, od.Done())
            case od.QueryView():
                self._answer(waiter, view_of(machine, with_beats=True))
            case od.BeginCell():
                self._cells[order.cell], self._begun[order.cell] = waiter, order
                machine.begin_cell(order.cell, order.ranks, now)
            case od.EndCell():
                self._loop.journal.end(order.cell, succeeded=order.succeeded, seconds=order.seconds)
                machine.end_cell(order.cell, self._loop.journal.length, now)
                self._answer(waiter, od.Done())
            case od.InterruptCell():
                machine.interrupt(order.cell, now)
                self._answer(waiter, od.Done())
            case od.SignalEngines():
                self._signal(waiter, order)
            case od.Scale():
                machine.scale(order.size, now)
                waiter.size = order.size
                self._waiters.append(waiter)
            case od.ReleaseSeats():
                machine.scale(machine.size, now)
                self._answer(waiter, od.Done())
            case od.Shutdown():
                self._goodbyes.append(waiter)
                self._loop.is_ending = True

    def admitted(self, cell: CellId, answer: od.CellAdmitted | od.Refused) -> None:
        """A `BeginCell` is answered."""
        waiter, order = self._cells.pop(cell), self._begun.pop(cell)
        if isinstance(answer, od.CellAdmitted) and not order.once:
            slots = tuple(answer.membership.slots[r] for r in answer.ranks)
            entry = od.Entry(cell=cell, code=order.code, values=order.values)
            self._loop.journal.begin(entry, None if order.ranks is None else slots)
        self._answer(waiter, answer)

    def exited(self, pid: int) -> None:
        """An exit is recorded."""
        for waiter in self._waiters:
            waiter.pids.discard(pid)

    def settle(self) -> None:
        """Answer what can be answered now."""
        machine = self._loop.machine
        for waiter in list(self._waiters):
            answer: od.Done | od.Refused | None = None
            if waiter.size is None:
                answer = None if waiter.pids else od.Done()
            elif machine.phase is Phase.FAILED:
                answer = od.Refused(kind="RecoveryFailed", message=machine.why_failed)
            elif machine.size != waiter.size:
                answer = od.Refused(
                    kind="WrongState", message=f"scaled to {machine.size} meanwhile"
                )
            elif machine.is_healthy:
                answer = od.Done()
            elif any(s.state is SeatState.GIVEN_UP for s in machine.seats.values()):
                answer = od.Refused(kind="RecoveryFailed", message=view_of(machine).reason)
            if answer is not None:
                self._waiters.remove(waiter)
                self._answer(waiter, answer)

    def tell_kernels(self, notice: Any) -> None:
        """Tell every kernel that is attached."""
        for identity in self._kernels:
            self._loop.router.send_multipart([identity, wire.encode(notice)])

    def say_goodbye(self) -> None:
        """Everything is gone: answer the shutdown."""
        for waiter in self._goodbyes:
            self._answer(waiter, od.Done())

    def _signal(self, waiter: Waiter, order: od.SignalEngines) -> None:
        machine = self._loop.machine
        found = [
            s for slot in order.slots if (s := machine.seats.get(Slot(slot))) and s.pid is not None
        ]
        for seat in found:
            if order.signal != "STOP":
                seat.killed_why = "ordered by the user"
                seat.ordered_at = time.monotonic()
            self._loop.signal(seat.pid or 0, SIGNALS[order.signal])
        if order.signal == "STOP":
            self._answer(waiter, od.Done())
        else:
            waiter.pids = {s.pid for s in found if s.pid is not None}
            self._waiters.append(waiter)

    def _answer(self, waiter: Waiter, body: Any) -> None:
        if waiter.number:
            answer = od.Answer(number=waiter.number, body=body)
            self._loop.router.send_multipart([waiter.identity, wire.encode(answer)])
