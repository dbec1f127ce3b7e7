"""The lifecycle machine: an event and the time in, instructions out. Pure; `loop` feeds it.

What each event does to the `World`; how the world goes from phase to phase stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.supervisor import instructions as do
from nbdist.supervisor.deadlines import Deadlines
from nbdist.supervisor.gate import WaitingCell
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import End, SeatState
from nbdist.supervisor.world import WAY_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.protocol.ids import CellId, Generation, RunId, Slot
    from nbdist.supervisor.handover import HandoverEvent

RAISED_ELSEWHERE = "the cell raised on another rank, which will not come to this training loop"
MAX_FORM_FAILURES = 5
"""So many formations in a row that fail though nobody died mean that something else is wrong."""


class Machine(Deadlines):
    """The world of one cluster, driven by events."""

    # ---- seats and engines

    def start(self, now: float) -> None:
        """Fill the seats for the first time."""
        self._enter(Phase.STARTING, self.reason, now)
        self.roster.fill(now)

    def scale(self, size: int, now: float) -> str:
        """Grow or shrink to `size` seats; done when `is_healthy` and no seat lies beyond.

        Returns why it cannot be, in words, or nothing: the first seats stay, and one of them must
        hold what the others hold.
        """
        if self.phase is Phase.FAILED:
            return ""
        holders = [seat.slot for seat in self.roster.in_state(SeatState.MEMBER) if seat.is_holder]
        if holders and min(holders) >= size:
            return (
                f"size={size} keeps seats whose engines hold nothing yet, and ends all that do; "
                f"first scale to {min(holders) + 1} at least, which fills the seats before it"
            )
        self.roster.resize(size, now)
        self._go_on(now)
        return ""

    def slow(self, slots: tuple[Slot, ...], factor: float) -> None:
        """Make engines so many times as slow."""
        if (run := self.runs.present) is not None and slots:
            run.remark_slow(slots, factor)
        for slot in slots:
            self._tell(slot, od.SlowDown(factor=factor))

    def forked(self, event: ev.EngineForked) -> None:
        """The zygote made a process."""
        self.roster.forked(event)

    def hello(self, event: ev.EngineHello, now: float) -> None:
        """An engine is up, or its agent has found a supervisor that took over."""
        seat = self.roster.hello(event, now)
        if seat is not None and seat.is_told_to_end:
            self._tell(event.slot, od.EndEngine())
        if seat is None or not seat.is_in_group or event.slot not in self.membership:
            return
        if self.phase is Phase.BREAKING and event.slot in self.awaited:
            self._tell(event.slot, od.BreakGroup(generation=self.generation, reason=self.reason))
        elif self.phase is Phase.RUNNING and event.generation != self.generation:
            self._break(f"slot {event.slot} is not in the group of this generation", now)
        elif self.phase is Phase.RUNNING:
            self.runs.tell_again(event.slot, self.membership)
            self._go_on(now)

    def replay_begins(self, event: ev.ReplayBegins) -> None:
        """A newcomer comes to a cell of the journal."""
        self.roster.replay_begins(event)

    def replayed(self, event: ev.JournalReplayed, now: float) -> None:
        """A newcomer ran the journal."""
        self.roster.replayed(event)
        self._go_on(now)

    def exited(self, event: ev.EngineExited, now: float) -> None:
        """An engine's process is gone; only the first report counts."""
        self.roster.has_ended(event.pid)
        self._asked_in.discard(event.pid)
        seat = self.roster.seat(event.slot, event.pid)
        if seat is None:
            return
        self.runs.lost(event.slot)
        was_member = seat.is_in_group and event.slot in self.membership
        end = End.of(seat, event)
        reason = self._vacate(seat, end.words, now)
        if was_member and self.phase is not Phase.FAILED:
            rank = int(self.membership.rank_of(event.slot))
            self._out.append(do.Notify(end.notice(rank)))
            ranks, detect_s = {event.slot: rank}, now - end.at
            incident = self.story.begin(end.kind, self.generation, ranks, end.cause, now)
            incident.detect_s, incident.reason = detect_s, reason
            gone = f"rank {rank} (slot {event.slot}) is gone: {end.words}"
            if self.phase is Phase.BREAKING:  # one that was lost together with another
                self.reason = f"{self.reason}; {gone}"
            self._break(gone, now)
        self._go_on(now)

    def start_failed(self, event: ev.EngineStartFailed, now: float) -> None:
        """No process came up for a seat."""
        seat = self.seats.get(event.slot)
        if seat is not None and seat.state is SeatState.STARTING and seat.pid is None:
            self._vacate(seat, event.reason, now)
            self._go_on(now)

    # ---- groups

    def broken(self, event: ev.GroupBroken, now: float) -> None:
        """A member has left its group."""
        if self.phase is Phase.BREAKING and event.generation == self.generation:
            self.awaited.discard(event.slot)
            self._go_on(now)

    def formed(self, event: ev.GroupFormed, now: float) -> None:
        """A member is in the new group."""
        if self.phase is not Phase.FORMING or event.generation != self.generation:
            return
        if not event.cuttable:
            self._uncuttable.add(event.slot)
        self._steps[event.slot] = event.step
        self.awaited.discard(event.slot)
        self._go_on(now)

    def form_failed(self, event: ev.GroupFormFailed, now: float) -> None:
        """A member could not form the group: everybody leaves it, and the next one is tried."""
        if self.phase is not Phase.FORMING or event.generation != self.generation:
            return
        self._form_failures += 1
        if self._form_failures > MAX_FORM_FAILURES:
            times = f"{self._form_failures} groups in a row could not be formed"
            self.fail(f"{times}, last: {event.error}", now)
        else:
            self._break(f"slot {event.slot} could not form the group: {event.error}", now)

    def collective_failed(self, event: ev.CollectiveFailed, now: float) -> None:
        """A group in which a collective failed is of no use any more: the next one is formed."""
        is_formed = self.phase in (Phase.RESTORING, Phase.RUNNING)
        if is_formed and event.generation == self.generation:
            rank = self.membership.rank_of(event.slot)
            self._break(f"a collective failed on rank {rank}", now)

    def handed_over(self, event: HandoverEvent, now: float) -> None:
        """A part of the hand-over is done."""
        self._drop_run_if_over()
        if self.handover is not None and event.generation == self.generation:
            self._out += self.handover.take(event)
            self._go_on(now)

    # ---- cells

    def begin_cell(self, cell: CellId, ranks: tuple[int, ...] | None, now: float) -> None:
        """A cell is about to be sent."""
        if self.phase is Phase.FAILED:
            self._out.append(do.RefuseCell(cell, "RecoveryFailed", self.why_failed))
            return
        self.gate.waiting.append(WaitingCell(cell, ranks))
        self._go_on(now)

    def end_cell(self, cell: CellId, journal_length: int, now: float) -> None:
        """A cell is over, and the journal is this long now."""
        self.gate.end(cell, now)
        self.roster.journal_length = journal_length
        was_going = self.runs.is_going and self.runs.cell == cell
        self.runs.end_cell(cell, self.membership)
        if was_going and self.phase is Phase.RUNNING:
            self._break("a cell is over for the notebook while it trained", now)
        self._go_on(now)

    def interrupt(self, cell: CellId, now: float) -> None:
        """The user wants a cell to end.

        KeyboardInterrupt where Python runs; where a collective waits, the group is broken (`tick`).
        """
        self.gate.interrupt(cell, now)
        for slot in self.membership.slots:
            self._tell(slot, od.InterruptMain(cell=cell))

    def attach(self, open_cells: Iterable[CellId], journal_length: int, now: float) -> None:
        """A kernel says which of its cells run; a supervisor that took over may know others."""
        self._knows_cells = True
        self.gate.open |= set(open_cells)
        gone = (self.gate.open | self.runs.entering.cells) - set(open_cells)
        for cell in gone:
            self.end_cell(cell, journal_length, now)

    def cell_failed(self, event: ev.CellFailedOnRank, now: float) -> None:
        """A cell raised on one engine: nobody waits for it at a training loop any more."""
        self.gate.failed_on(event.cell, event.slot, now)
        if self.runs.cell != event.cell:
            self.runs.entering.refuse("WrongState", RAISED_ELSEWHERE, event.cell)

    # ---- runs

    def begin_run(self, run: RunId, order: rn.BeginRun, now: float) -> str:
        """Train; why that cannot be, in words, or nothing: then the answer follows."""
        if self.phase is Phase.FAILED:
            return self.why_failed
        refusal = self.runs.begin(run, order)
        if not refusal and self.phase is Phase.RUNNING:
            self.runs.bind(self.membership)
            self._go_on(now)
        return refusal

    def steer_run(self, order: rn.SteerRun | rn.SetRun, now: float) -> str:
        """Carry out the user's order; why that cannot be, in words, or nothing."""
        steer = self.runs.set if isinstance(order, rn.SetRun) else self.runs.steer
        refusal = steer(order)  # type: ignore[arg-type]
        if self.runs.present is not None:
            self.runs.present.note_pause(now)
        self._go_on(now)
        return refusal

    def run_says(self, event: rn.RunEvent, now: float) -> None:
        """A member reports of a run."""
        match event:
            case rn.StepsCommitted():
                self.committed(event, now)
                return
            case rn.RunEvaluated():
                self.runs.evaluated(event)
            case rn.StepBroken():
                self.runs.broken(event)
            case rn.RunRaised():
                self._raised(event, now)
            case _ if self.roster.seat(event.slot, event.pid) is None:
                return  # of an engine that is gone
            case rn.RunBound():
                self.runs.bound(event)
            case rn.RunHeld() if self._is_of_now(event.generation):
                self._break_if(self.runs.held(event, self.membership, now), now)
            case rn.RunEntered():
                refusal = self._why_not_train(event)
                self._break_if(self.runs.entered(event, self.membership, now, refusal), now)
            case rn.RunLeft():
                self._break_if(self.runs.left(event, self.membership, now), now)
            case _:
                return
        self._go_on(now)

    def committed(self, event: rn.StepsCommitted, now: float) -> bytes:
        """A member has applied steps; the rows that nobody had reported before."""
        found = self.runs.committed(event)
        if found is None:
            return b""
        self.story.resumed(*found)
        if self.roster.surplus:
            self._go_on(now)
        return found[1].tobytes()

    def _is_of_now(self, generation: Generation) -> bool:
        return self.phase is Phase.RUNNING and generation == self.generation

    def _break_if(self, trouble: str, now: float) -> None:
        if trouble:
            self._break(trouble, now)

    def _why_not_train(self, event: rn.RunEntered) -> str:
        """Why a cell that has come to a training loop cannot train, in words, or nothing."""
        ranks = self.gate.ranks.get(event.cell)
        if self.phase is Phase.FAILED:
            return self.why_failed
        if self._knows_cells and event.cell not in self.gate.open:
            return "the cell is over for the notebook"
        if self.gate.failed_slots(event.cell) - {event.slot}:
            return RAISED_ELSEWHERE
        if ranks is not None and len(set(ranks)) < self.membership.world_size:
            some = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
            return (
                f"trainer.steps() trains on all ranks, and this cell was sent to {some} only; a "
                "loop over it belongs in a %%distributed cell without -r"
            )
        return ""

    def _raised(self, event: rn.RunRaised, now: float) -> None:
        """The user's code raised on one rank: the run is over, and who waits for it is freed."""
        run = self.runs.present
        if run is None or run.spec.run != event.run:
            self.runs.let_go(event.slot, event.run)
            return
        is_wanted = run.spec.cell is not None and run.spec.cell in self.gate.interrupted
        self._end_run("stopped" if is_wanted else "failed", event.fault, now)

    # ---- taking up what another supervisor left

    def adopt(self, children: dict[int, Slot]) -> None:
        """A zygote says who lives."""
        self.roster.adopt(children)

    def take_up(
        self,
        view: od.WorldView,
        journal_length: int,
        now: float,
        rows: Callable[[RunId], bytes] = lambda _run: b"",
    ) -> None:
        """Begin where the ledger ends: a formed group goes on unnoticed, any other is made anew.

        Args:
            view: the world as it was written down last.
            journal_length: entries of the journal.
            now: the time.
            rows: the committed steps of a run, as they were written down.
        """
        self._knows_cells = False
        self.runs.take_up(view.runs, rows)
        self.gate.open |= {cell for run in view.runs for cell in run.cells}
        self.membership = view.membership
        self.roster.journal_length = journal_length
        self.roster.take_up(view, now)
        self.story.take_up(view.incidents, now)
        self.was_running = view.was_running
        if view.phase == Phase.FAILED.value:
            self.fail(view.reason.removesuffix(WAY_OUT), now)
        elif self.generation > 0:
            self._enter(Phase.RUNNING, "", now)
            if view.phase != Phase.RUNNING.value:
                self._break("the supervisor was replaced while a group was being formed", now)
