"""Orders of kernels and their answers, some of which wait until the world is as ordered."""

from __future__ import annotations

import secrets
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.protocol import feed as fd
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import saves as sv
from nbdist.protocol.ids import RunId
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.saves import Saves
from nbdist.supervisor.seats import BY_USER, SeatState
from nbdist.supervisor.view import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from nbdist.protocol.ids import CellId
    from nbdist.supervisor.feeds import Feeds
    from nbdist.supervisor.journal import Journal
    from nbdist.supervisor.state import Machine

NUM_AGAIN = 64
"""So many of the rows that a kernel has are sent again: a step may have run once more."""
_OF_FEEDS = (fd.Subscribe, fd.Acknowledge, fd.Unsubscribe, fd.QuerySnapshot)
_OF_RUNS = (rn.BeginRun, rn.SteerRun, rn.SetRun, rn.QueryRun)
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
    steer: rn.SteerRun | None = None
    """A run that must have come to what was ordered."""
    slow: od.SlowEngines | None = None
    """Engines that must have taken their pace."""


class Desk:
    """Where kernels are served.

    Args:
        machine, journal, feeds: the cluster's.
        send: sends a message to a kernel (identity, message).
        signal_engine: sends a signal to an engine (pid, number).
    """

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        feeds: Feeds,
        *,
        send: Callable[[bytes, msgspec.Struct], None],
        signal_engine: Callable[[int, int], None],
    ) -> None:
        self._machine, self._journal, self._feeds = machine, journal, feeds
        self._send, self._signal_engine = send, signal_engine
        self._kernels: set[bytes] = set()
        self._cells: dict[CellId, tuple[Waiter, od.BeginCell]] = {}
        self._begun: dict[RunId, Waiter] = {}
        self._waiters: list[Waiter] = []
        self._goodbyes: list[Waiter] = []
        self._losses: deque[od.EngineLost] = deque(maxlen=64)
        self.saves: Saves[Waiter] = Saves()
        """Checkpoints that are being written."""

    @property
    def is_shutdown_ordered(self) -> bool:
        """Whether a kernel wants everything to end."""
        return bool(self._goodbyes)

    def take(self, identity: bytes, request: od.Request, now: float) -> None:
        """Carry out one order of a kernel."""
        waiter = Waiter(identity, request.number)
        if isinstance(request.order, _OF_RUNS):
            self._take_run(waiter, request.order, now)
        elif isinstance(request.order, _OF_FEEDS):
            self._take_feed(waiter, request.order, now)
        elif isinstance(request.order, sv.CommitSave):
            self.saves.take(waiter, request.order)
        else:
            self._take(waiter, request.order, now)

    def _take(self, waiter: Waiter, its: od.KernelOrder, now: float) -> None:
        machine = self._machine
        match its:
            case od.Attach() as order:
                self._attach(waiter, order, now)
            case od.Ping():
                self._answer(waiter, od.Done())
            case od.QueryView():
                self._answer(waiter, view_of(machine, with_beats=True))
            case od.BeginCell() as order:
                self._cells[order.cell] = waiter, order
                machine.begin_cell(order.cell, order.ranks, now)
            case od.EndCell(cell=cell, succeeded=succeeded, seconds=seconds):
                self._cells.pop(cell, None)
                # A loop that trained is over; a replay of what surrounds it would find no steps.
                can_replay = succeeded and not machine.runs.entering.has_trained(cell)
                self._journal.end(cell, succeeded=can_replay, seconds=seconds)
                machine.end_cell(cell, self._journal.length, now)
                self._answer(waiter, od.Done())
            case od.InterruptCell(cell=cell):
                machine.interrupt(cell, now)
                self._answer(waiter, od.Done())
            case od.SignalEngines() | od.SlowEngines() | od.Scale():
                self._take_engines(waiter, its, now)
            case od.Shutdown():
                self._goodbyes.append(waiter)

    def _take_engines(
        self, waiter: Waiter, order: od.SignalEngines | od.SlowEngines | od.Scale, now: float
    ) -> None:
        """Something is to become of engines; answered when it is so."""
        if isinstance(order, od.SignalEngines):
            self._signal(waiter, order)
        elif isinstance(order, od.SlowEngines):
            self._machine.slow(order.slots, order.factor)
            waiter.slow = order
        elif refusal := self._machine.scale(order.size, now):
            self._answer(waiter, od.Refused(kind="WrongState", message=refusal))
            return
        else:
            waiter.size = order.size
        self._waiters.append(waiter)

    def _take_run(
        self,
        waiter: Waiter,
        order: rn.BeginRun | rn.SteerRun | rn.SetRun | rn.QueryRun,
        now: float,
    ) -> None:
        if isinstance(order, rn.QueryRun):
            self._answer(waiter, self._report(order))
        elif isinstance(order, rn.BeginRun):
            run = RunId(secrets.token_hex(6))
            self._begun[run] = waiter
            if refusal := self._machine.begin_run(run, order, now):
                has_failed = self._machine.phase is Phase.FAILED
                kind = "RecoveryFailed" if has_failed else "WrongState"
                self.begun(run, od.Refused(kind=kind, message=refusal))
        elif refusal := self._machine.steer_run(order, now):
            self._answer(waiter, od.Refused(kind="WrongState", message=refusal))
        elif isinstance(order, rn.SetRun):
            self._answer(waiter, od.Done())
        else:
            waiter.steer = order
            self._waiters.append(waiter)

    def _take_feed(self, waiter: Waiter, order: fd.FeedOrder, now: float) -> None:
        answer = self._feeds.take(waiter.identity, order, now)
        if isinstance(answer, od.Refused) and isinstance(order, fd.Subscribe) and not waiter.number:
            ended = fd.SubscriptionEnded(name=order.name, reason=answer.message)
            self._send(waiter.identity, ended)
        elif answer is not None:
            self._answer(waiter, answer)

    def begun(self, run: RunId, answer: rn.RunBegun | od.Refused) -> None:
        """A `BeginRun` is answered."""
        if waiter := self._begun.pop(run, None):
            self._answer(waiter, answer)

    def _report(self, order: rn.QueryRun) -> rn.RunReport | od.Refused:
        machine = self._machine
        run = machine.runs.find(order.run)
        if run is None:
            text = "this run is not known here; the last ones are, and those of this cluster only"
            return od.Refused(kind="WrongState", message=text)
        progress = run.progress
        num_all = progress.num_dropped + len(progress.rows)
        first = max(0, min(order.num_known, num_all) - NUM_AGAIN, progress.num_dropped)
        return rn.RunReport(
            view=run.view(is_whole=machine.phase is Phase.RUNNING),
            first=first,
            rows=progress.rows[first - progress.num_dropped :].tobytes(),
            durable=progress.durable(machine.membership.slots),
            evaluations=tuple(run.evaluations),
            remarks=tuple(run.remarks),
            num_dropped=progress.num_dropped,
        )

    def _steered(self, order: rn.SteerRun) -> od.Done | od.Refused | None:
        """Whether it has come to what was ordered, or was ordered to do something else since."""
        run = self._machine.runs.find(order.run)
        if run is None or run.is_over:
            return od.Done()
        if order.action in ("pause", "step"):
            if not run.is_paused and run.until is None:
                return od.Refused(kind="WrongState", message="the run was resumed meanwhile")
            return od.Done() if run.is_paused and run.state == "paused" else None
        if order.action == "resume":
            if run.is_paused:
                return od.Refused(kind="WrongState", message="the run was paused meanwhile")
            return od.Done() if run.is_going else None
        return None

    def admitted(self, cell: CellId, answer: od.CellAdmitted | od.Refused) -> None:
        """A `BeginCell` is answered."""
        if cell not in self._cells:  # given up by the kernel meanwhile
            self._machine.end_cell(cell, self._journal.length, time.monotonic())
            return
        waiter, order = self._cells.pop(cell)
        if isinstance(answer, od.CellAdmitted) and not order.once:
            slots = tuple(answer.membership.slots[r] for r in answer.ranks)
            entry = od.Entry(cell=cell, code=order.code, values=order.values)
            self._journal.begin(entry, None if order.ranks is None else slots)
        self._answer(waiter, answer)

    def exited(self, pid: int) -> None:
        """An exit is recorded."""
        for waiter in self._waiters:
            waiter.pids.discard(pid)

    def settle(self) -> None:
        """Answer what can be answered now."""
        for waiter, done in self.saves.answered():
            self._answer(waiter, done)
        for waiter in list(self._waiters):
            answer: od.Done | od.Refused | None = None
            if waiter.size is not None:
                answer = self._scaled(waiter.size)
            elif waiter.steer is not None:
                answer = self._steered(waiter.steer)
            elif waiter.slow is not None:
                answer = self._slowed(waiter.slow)
            elif not waiter.pids:
                answer = od.Done()
            if answer is not None:
                self._waiters.remove(waiter)
                self._answer(waiter, answer)

    def tell_kernels(self, notice: msgspec.Struct) -> None:
        """Tell every kernel that is attached; losses are told again to one that attaches later."""
        if isinstance(notice, od.EngineLost):
            self._losses.append(notice)
        for identity in self._kernels:
            self._send(identity, notice)

    def say_goodbye(self) -> None:
        """Everything is gone: answer the shutdown."""
        self.saves.close()
        for waiter in self._goodbyes:
            self._answer(waiter, od.Done())

    def _attach(self, waiter: Waiter, order: od.Attach, now: float) -> None:
        machine = self._machine
        self._kernels.add(waiter.identity)
        machine.attach(order.open_cells, self._journal.length, now)
        self._answer(waiter, view_of(machine))
        for subscription in order.subscriptions:
            self._take_feed(Waiter(waiter.identity, 0), subscription, now)
        for loss in self._losses:  # before it was there; what it knows already it passes over
            self._send(waiter.identity, loss)

    def _scaled(self, size: int) -> od.Done | od.Refused | None:
        machine = self._machine
        if machine.phase is Phase.FAILED:
            return od.Refused(kind="RecoveryFailed", message=machine.why_failed)
        if machine.size != size:
            return od.Refused(kind="WrongState", message=f"scaled to {machine.size} meanwhile")
        if machine.roster.in_state(SeatState.GIVEN_UP):
            return od.Refused(kind="RecoveryFailed", message=view_of(machine).reason)
        return od.Done() if machine.is_healthy else None

    def _slowed(self, order: od.SlowEngines) -> od.Done | None:
        """Whether their beats say so; an engine that is gone is slow no more."""
        beats = [s.beat for s in self._machine.seats.values() if s.slot in order.slots]
        has_taken = all(beat is None or beat.slow_factor == order.factor for beat in beats)
        return od.Done() if has_taken else None

    def _signal(self, waiter: Waiter, order: od.SignalEngines) -> None:
        seats = [s for s in self._machine.seats.values() if s.slot in order.slots and s.pid]
        for seat in seats:
            if order.signal != "STOP":
                seat.killed_why, seat.ordered_at = BY_USER, time.monotonic()
                waiter.pids.add(seat.pid or 0)
            self._signal_engine(seat.pid or 0, SIGNALS[order.signal])

    def _answer(self, waiter: Waiter, body: od.AnswerBody) -> None:
        if waiter.number:
            self._send(waiter.identity, od.Answer(number=waiter.number, body=body))
