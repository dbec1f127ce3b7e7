"""The lifecycle machine: an event and the time in, instructions out. Pure; `loop` feeds it.

What each event does to the `World`; how the world goes from phase to phase stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.supervisor import instructions as do
from nbdist.supervisor.gate import RELEASE_AFTER_S, WaitingCell
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import End, Seat, SeatState
from nbdist.supervisor.world import WAY_OUT, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.protocol.ids import CellId, Generation, RunId, Slot
    from nbdist.supervisor.handover import HandoverEvent

UNBLOCK_LIMIT_S = 6.0
"""A member that still stands in a native wait this long after its group was cut is killed."""
FORM_LIMIT_S = 15.0
"""Members that have not reported a group within this time are killed."""
RESTORE_LIMIT_S = 300.0
"""Members for which a hand-over has waited this long are killed."""
MAX_FORM_FAILURES = 5
"""So many formations in a row that fail though nobody died mean that something else is wrong."""


class Machine(World):
    """The world of one cluster, driven by events."""

    # ---- seats and engines

    def start(self, now: float) -> None:
        """Fill the seats for the first time."""
        self._enter(Phase.STARTING, self.reason, now)
        self.roster.fill(now)

    def scale(self, size: int, now: float) -> None:
        """Grow or shrink to `size` seats; done when `is_healthy` and no seat lies beyond."""
        if self.phase is not Phase.FAILED:
            self.roster.resize(size, now)
            self._go_on(now)

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
        elif self.phase is Phase.RUNNING and self.runs.is_going:
            self.runs.go(event.slot, self.membership)  # what it was told may have been lost

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
        reason = self._vacate(seat, end.how, now)
        if was_member and self.phase is not Phase.FAILED:
            rank = int(self.membership.rank_of(event.slot))
            self._out.append(do.Notify(end.notice(rank)))
            ranks, detect_s = {event.slot: rank}, now - end.at
            incident = self.story.begin(end.kind, self.generation, ranks, end.cause, now)
            incident.detect_s, incident.reason = detect_s, reason
            self._break(f"rank {rank} (slot {event.slot}) is gone: {end.how}", now)
        self._go_on(now)

    def start_failed(self, event: ev.EngineStartFailed, now: float) -> None:
        """No process came up for a seat."""
        seat = self.seats.get(event.slot)
        if seat is not None and seat.state is SeatState.STARTING and seat.pid is None:
            self._vacate(seat, event.reason, now)
            self._go_on(now)

    def kill(self, seat: Seat, why: str) -> None:
        """SIGKILL to a seat's engine, once; its exit will be reported."""
        self.roster.kill(seat, why)

    def _vacate(self, seat: Seat, how: str, now: float) -> str:
        if self.phase is not Phase.FAILED:
            return self.roster.vacate(seat, how, now, was_started=self.was_running)
        seat.clear()
        seat.state, seat.last_end = SeatState.EMPTY, how
        return self.reason

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
            self._break(f"a collective failed on rank {rank}: {event.error}", now)

    def handed_over(self, event: HandoverEvent, now: float) -> None:
        """A part of the hand-over is done."""
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
        self.runs.end_cell(cell, self.membership)
        self._go_on(now)

    def interrupt(self, cell: CellId, now: float) -> None:
        """The user wants a cell to end.

        KeyboardInterrupt where Python runs; where a collective waits, the group is broken (`tick`).
        """
        self.gate.interrupt(cell, now)
        for slot in self.membership.slots:
            self._tell(slot, od.InterruptMain(cell=cell))

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
        self._go_on(now)
        return refusal

    def run_says(self, event: rn.RunEvent, now: float) -> None:
        """A member reports of a run."""
        match event:
            case rn.StepsCommitted():
                self._committed(event)
                return
            case rn.RunEvaluated():
                self.runs.evaluated(event)
            case rn.StepBroken():
                self.runs.broken(event)
            case rn.RunBound():
                self.runs.bound(event)
            case rn.RunHeld() if self._is_of_now(event.generation):
                if trouble := self.runs.held(event, self.membership):
                    self._break(trouble, now)
            case rn.RunEntered() if self.roster.seat(event.slot, event.pid) is not None:
                ranks = self.gate.ranks.get(event.cell)
                self.runs.entered(event, self.membership, ranks)
            case rn.RunLeft():
                self._left(event, now)
            case rn.RunRaised():
                self._raised(event, now)
            case _:
                return
        self._go_on(now)

    def _is_of_now(self, generation: Generation) -> bool:
        return self.phase is Phase.RUNNING and generation == self.generation

    def _committed(self, event: rn.StepsCommitted) -> None:
        run = self.runs.find(event.run)
        if run is not None:
            self.story.resumed(run, run.progress.add(event.slot, event.rows))

    def _raised(self, event: rn.RunRaised, now: float) -> None:
        """The user's code raised on one rank: the run is over, and who waits for it is freed."""
        run = self.runs.present
        if run is None or run.spec.run != event.run:
            return
        self._fail_run(event.fault, now)

    def _left(self, event: rn.RunLeft, now: float) -> None:
        run = self.runs.present
        if run is None or run.spec.run != event.run:
            return
        run.left[event.slot] = now
        if set(self.membership.slots) <= set(run.left):
            run.step = event.step
            self.runs.end("stopped", self.membership)

    def _fail_run(self, fault: rn.RunFault, now: float) -> None:
        self.runs.end("failed", self.membership, fault)
        if self.phase is Phase.RUNNING:
            where = "" if fault.rank is None else f" on rank {fault.rank}"
            self._break(f"the run failed{where}: {fault.kind}: {fault.message}", now)

    # ---- time

    def beat(self, event: ev.Beat) -> None:
        """Where a main thread is."""
        if seat := self.roster.seat(event.slot, event.pid):
            seat.beat = event

    def tick(self, now: float) -> None:
        """Look at the deadlines; called many times a second."""
        for seat in self.roster.tick(now):
            self._vacate(seat, "no process could be made for it in time", now)
            self._go_on(now)
        for seat in list(self.seats.values()):
            if seat.beat is not None and seat.beat.waiting is not None:
                self._look_at_wait(seat, seat.beat.cell, seat.beat.waiting, now)
        if self.phase is Phase.RUNNING and self.runs.is_going:
            self._look_at_laggards(now)
        if self.phase is Phase.FORMING and now - self.phase_since > FORM_LIMIT_S:
            for slot in self.awaited:
                self.kill(self.seats[slot], f"was not in the group within {FORM_LIMIT_S:g} s")
        if self.phase is Phase.RESTORING and now - self.phase_since > RESTORE_LIMIT_S:
            for slot in self.handover.silent if self.handover is not None else ():
                self.kill(self.seats[slot], f"the hand-over took longer than {RESTORE_LIMIT_S:g} s")

    def _look_at_wait(self, seat: Seat, cell: CellId | None, where: ev.Where, now: float) -> None:
        if self.phase is Phase.RUNNING and self._waits_for_leaver(seat, where, now):
            left = ", ".join(str(self.membership.rank_of(s)) for s in sorted(self._run_left()))
            text = f"rank {left} left the training loop while the others trained on"
            self._fail_run(rn.RunFault(kind="WrongState", message=text), now)
        elif self.phase is Phase.RUNNING:
            since = self.gate.stuck_since(cell, seat.slot)
            is_stuck = since is not None and now - max(since, where.since_s) > RELEASE_AFTER_S
            if is_stuck and seat.beat is not None and seat.beat.generation == self.generation:
                self._break(self._why_released(cell), now)
        elif self.phase is Phase.BREAKING and seat.slot in self.awaited:
            limit_s = 0.0 if seat.slot in self._uncuttable else UNBLOCK_LIMIT_S
            if now - self.phase_since > limit_s:
                self.kill(seat, "stood in a native wait that a cut of its group did not end")

    def _look_at_laggards(self, now: float) -> None:
        """In a run: kill whoever stays away from a collective in which all others wait too long.

        The beat of one that holds the interpreter in native code is old, and says the same.
        """
        limit_s = self._config.hang_timeout_s
        seats = [self.seats[slot] for slot in self.membership.slots if slot in self.seats]
        beats = [seat.beat for seat in seats if seat.beat is not None]
        waits = [beat.waiting.since_s for beat in beats if beat.waiting is not None]
        if len(beats) < len(seats) or not waits or now - max(waits) < limit_s:
            return
        for seat, beat in zip(seats, beats, strict=True):
            if beat.waiting is None and not beat.is_patient and beat.step is not None:
                seat.ordered_at = now - limit_s
                self.kill(seat, f"hung: away from a collective that others wait in, {limit_s:g} s")

    def _run_left(self) -> dict[Slot, float]:
        run = self.runs.present
        return run.left if run is not None else {}

    def _waits_for_leaver(self, seat: Seat, where: ev.Where, now: float) -> bool:
        """Whether a member waits in a step for one that has left the loop."""
        left = self._run_left()
        is_stuck = bool(left) and now - max(*left.values(), where.since_s) > RELEASE_AFTER_S
        return is_stuck and seat.slot not in left

    def _why_released(self, cell: CellId | None) -> str:
        if cell in self.gate.ended:
            return "a rank still waited in a cell that is over"
        if cell in self.gate.interrupted:
            return "a cell was interrupted while ranks waited in a collective"
        slots = sorted(self.gate.failed_slots(cell) & set(self.membership.slots))
        failed = ", ".join(str(self.membership.rank_of(s)) for s in slots)
        return f"rank {failed} raised in a cell while others waited for it"

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
        self.runs.take_up(view.runs, rows)
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
