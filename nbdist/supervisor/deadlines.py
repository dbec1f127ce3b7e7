"""What time does to the world: deadlines, waits for nothing, members that hang. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import runs as rn
from nbdist.supervisor.gate import RELEASE_AFTER_S
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import Seat, SeatState
from nbdist.supervisor.world import World

if TYPE_CHECKING:
    from nbdist.protocol import events as ev
    from nbdist.protocol.ids import CellId, Slot

UNBLOCK_LIMIT_S = 6.0
"""A member that still stands in a native wait this long after its group was cut is killed."""
FORM_LIMIT_S = 15.0
"""Members that have not reported a group within this time are killed."""
RESTORE_LIMIT_S = 300.0
"""Members for which a hand-over has waited this long are killed."""
STAND_LIMIT_S = 1.0
"""A group in which some stand while all others wait in a step is broken after so long."""


class Deadlines(World):
    """The world with a clock."""

    def kill(self, seat: Seat, why: str) -> None:
        """SIGKILL to a seat's engine, once; its exit will be reported."""
        self.roster.kill(seat, why)

    def _vacate(self, seat: Seat, how: str, now: float) -> str:
        if self.phase is not Phase.FAILED:
            return self.roster.vacate(seat, how, now, was_started=self.was_running)
        seat.clear()
        seat.state, seat.last_end = SeatState.EMPTY, how
        return self.reason

    def _end_run(self, state: rn.RunState, fault: rn.RunFault, now: float) -> None:
        """It is over, and members that wait in a step are freed."""
        self.runs.end(state, self.membership, fault)
        if self.phase is Phase.RUNNING:
            where = "" if fault.rank is None else f" on rank {fault.rank}"
            self._break(f"the run is over{where}: {fault.kind}: {fault.message}", now)

    def beat(self, event: ev.Beat, now: float) -> None:
        """Where a main thread is."""
        if seat := self.roster.seat(event.slot, event.pid):
            seat.beat, seat.heard_at = event, now

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
            self._look_at_stand(now)
        if self.phase is Phase.FORMING and now - self.phase_since > FORM_LIMIT_S:
            for slot in self.awaited:
                self.kill(self.seats[slot], f"was not in the group within {FORM_LIMIT_S:g} s")
        if self.phase is Phase.RESTORING and now - self.phase_since > RESTORE_LIMIT_S:
            for slot in self.handover.silent if self.handover is not None else ():
                self.kill(self.seats[slot], f"the hand-over took longer than {RESTORE_LIMIT_S:g} s")

    def cannot_form(self, now: float) -> None:
        """Where the store is, nobody knows yet: members are not late before they are told."""
        if self.phase is Phase.FORMING:
            self.phase_since = now

    def _look_at_wait(self, seat: Seat, cell: CellId | None, where: ev.Where, now: float) -> None:
        if self.phase is Phase.RUNNING and self._waits_for_leaver(seat, where, now):
            left = ", ".join(str(self.membership.rank_of(s)) for s in self._leavers_of_run())
            text = f"rank {left} left the training loop while the others trained on"
            self._end_run("failed", rn.RunFault(kind="WrongState", message=text), now)
        elif self.phase is Phase.RUNNING:
            since = self.gate.stuck_since(cell, seat.slot)
            is_stuck = since is not None and now - max(since, where.since_s) > RELEASE_AFTER_S
            if is_stuck and seat.beat is not None and seat.beat.generation == self.generation:
                self._break(self._why_released(cell), now)
        elif self.phase is Phase.BREAKING and seat.slot in self.awaited:
            limit_s = 0.0 if seat.slot in self._uncuttable else UNBLOCK_LIMIT_S
            if now - self.phase_since > limit_s:
                place = f"{where.operation}, {where.line}" if where.line else where.operation
                self.kill(seat, f"stood in a wait that a cut of its group did not end: {place}")

    def _look_at_laggards(self, now: float) -> None:
        """In a run: kill whoever stays away from a collective in which all others wait too long.

        The beat of one that holds the interpreter in native code is old, and says the same.
        """
        limit_s, beats = self._config.hang_timeout_s, self._beats_of_now()
        waits = [beat.waiting.since_s for beat in beats.values() if beat.waiting is not None]
        if not waits or now - max(waits) < limit_s:
            return
        for seat in [self.seats[slot] for slot in self.membership.slots]:
            beat = beats.get(seat.slot)  # one that was never heard of since is away, too
            trains = beat is None or (beat.step is not None and not beat.is_patient)
            if trains and (beat is None or beat.waiting is None) and not seat.killed_why:
                seat.ordered_at = now - limit_s
                slow = 1.0 if beat is None else beat.slow_factor
                slowed = f"; it was made {slow:g} times as slow" if slow > 1 else ""
                why = f"hung: away from a collective that others wait in, {limit_s:g} s{slowed}"
                self.kill(seat, why)

    def _look_at_stand(self, now: float) -> None:
        """A member that stands while others wait for it in a step has missed an order."""
        run, beats = self.runs.present, self._beats_of_now()
        away = [beats.get(s) for s in self.membership.slots if run and s not in run.held]
        waits = [beat.waiting.since_s for beat in away if beat is not None and beat.waiting]
        if run is None or not run.held or not waits or len(waits) < len(away):
            return
        since = max(*waits, *(place.at for place in run.held.values()))
        if now - since > STAND_LIMIT_S:
            self._break("some members stand while the others wait for them in a step", now)

    def _beats_of_now(self) -> dict[Slot, ev.Beat]:
        """Members' last beats; those from before the present group say nothing about it."""
        seats = [self.seats[slot] for slot in self.membership.slots if slot in self.seats]
        beats = {seat.slot: seat.beat for seat in seats if seat.beat is not None}
        return {slot: beat for slot, beat in beats.items() if beat.generation == self.generation}

    def _leavers_of_run(self) -> list[Slot]:
        run = self.runs.present
        return run.leavers(self.membership) if run is not None else []

    def _waits_for_leaver(self, seat: Seat, where: ev.Where, now: float) -> bool:
        """Whether a member waits in a step for one that has left the loop."""
        run, left = self.runs.present, self._leavers_of_run()
        is_of_now = seat.slot in self._beats_of_now()
        if run is None or not left or seat.slot in left or not is_of_now:
            return False
        since = max(where.since_s, *(run.left[slot].at for slot in left))
        return now - since > RELEASE_AFTER_S

    def _why_released(self, cell: CellId | None) -> str:
        if cell in self.gate.ended:
            return "a rank still waited in a cell that is over"
        if cell in self.gate.interrupted:
            return "a cell was interrupted while ranks waited in a collective"
        slots = sorted(self.gate.failed_slots(cell) & set(self.membership.slots))
        failed = ", ".join(str(self.membership.rank_of(s)) for s in slots)
        return f"rank {failed} raised in a cell while others waited for it"
