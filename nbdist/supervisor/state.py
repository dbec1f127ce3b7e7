"""The lifecycle machine: an event and the time in, instructions out. Pure; one thread (`loop`) feeds it.

Phases of the world, one at a time:

    starting -> forming -> restoring -> running -> breaking -> forming -> …      and from any of
    them: failed

*starting*: the first engines come up. *breaking*: every member leaves the group of `generation`
(cut, destroy, report).
*forming*: the same order to every member. *restoring*: newcomers are given what survivors hold and
the journal did not bring back. *failed*: nothing is left to go on with; only a shutdown leads out.

Cells and planned changes exclude one another: a newcomer, or a seat that is given back, is dealt
with when no cell runs, and cells that begin meanwhile wait until the new world is formed. A loss
breaks the group at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol.ids import CellId, Generation, Slot
from nbdist.protocol.topology import EMPTY, Membership
from nbdist.supervisor import instructions as do
from nbdist.supervisor import policy
from nbdist.supervisor.gate import RELEASE_AFTER_S, Gate, WaitingCell
from nbdist.supervisor.handover import Handover, HandoverEvent
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.roster import Roster
from nbdist.supervisor.seats import THE_SEAT, End, Seat, SeatState
from nbdist.supervisor.story import Story

if TYPE_CHECKING:
    from nbdist.config import ClusterConfig

UNBLOCK_LIMIT_S = 3.0
"""A member that still stands in a native wait this long after its group was cut cannot be freed, and is killed."""
FORM_LIMIT_S = 15.0
"""Members that have not reported a group within this time are killed."""
MAX_FORM_FAILURES = 5
"""So many formations in a row that fail though nobody died mean that something else is wrong."""


class Machine:
    """The world of one cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._out: list[do.Instruction] = []
        self.roster = Roster(config, self._out)
        self.gate = Gate()
        self.story = Story()
        self.phase = Phase.STARTING
        self.phase_since = 0.0
        self.reason = "the first engines are being started"
        self.membership: Membership = EMPTY
        self.awaited: set[Slot] = set()
        """Members whose report is waited for."""
        self.was_running = False
        """Whether a group has ever been whole: from then on newcomers are given what members hold."""
        self.handover: Handover | None = None
        self._form_failures = 0
        self._uncuttable: set[Slot] = set()
        self.notes: tuple[str, ...] = ()
        """What the user should know about how engines are started."""

    # ---- what is asked of it

    @property
    def seats(self) -> dict[Slot, Seat]:
        """Every seat by slot."""
        return self.roster.seats

    @property
    def size(self) -> int:
        """Seats that are wanted."""
        return self.roster.size

    @property
    def generation(self) -> Generation:
        """Number of the group that is formed, forming, or was broken last."""
        return self.membership.generation

    @property
    def is_healthy(self) -> bool:
        """All wanted seats are members of a formed group."""
        members = self.roster.in_state(SeatState.MEMBER)
        return self.phase is Phase.RUNNING and len(members) == len(self.seats)

    @property
    def why_failed(self) -> str:
        """What is wrong for good, and what to do."""
        return f"{self.reason}. End it with %dist_reset and start anew with %dist_init."

    def take(self) -> list[do.Instruction]:
        """Instructions since the last call."""
        out = list(self._out)
        self._out.clear()
        return out

    # ---- seats and engines

    def start(self, now: float) -> None:
        """Fill the seats for the first time."""
        self._enter(Phase.STARTING, self.reason, now)
        self.roster.fill(now)

    def scale(self, size: int, now: float) -> None:
        """Grow or shrink to `size` seats; done when `is_healthy` and no seat lies beyond."""
        self.roster.resize(size, now)
        self._go_on(now)

    def forked(self, event: ev.EngineForked) -> None:
        """The zygote made a process."""
        self.roster.forked(event)

    def hello(self, event: ev.EngineHello, now: float) -> None:
        """An engine is up, or its agent has found a supervisor that took over."""
        seat = self.roster.hello(event)
        if seat is None or not seat.is_in_group or event.slot not in self.membership:
            return
        if self.phase is Phase.BREAKING and event.slot in self.awaited:
            self._tell(event.slot, od.BreakGroup(generation=self.generation, reason=self.reason))
        elif self.phase is Phase.RUNNING and event.generation != self.generation:
            self._break(f"slot {event.slot} is not in the group of this generation", now)

    def replayed(self, event: ev.JournalReplayed, now: float) -> None:
        """A newcomer ran the journal."""
        self.roster.replayed(event)
        self._go_on(now)

    def exited(self, event: ev.EngineExited, now: float) -> None:
        """An engine's process is gone; only the first report counts."""
        seat = self.roster.seat(event.slot, event.pid)
        if seat is None:
            return
        was_member = seat.is_in_group and event.slot in self.membership
        end = End.of(seat, event)
        self._vacate(seat, end.how, now)
        if was_member and self.phase is not Phase.FAILED:
            rank = int(self.membership.rank_of(event.slot))
            self._out.append(do.Notify(end.notice(rank)))
            ranks, detect_s = {event.slot: rank}, now - end.at
            self.story.begin(end.kind, self.generation, ranks, end.cause, now, detect_s)
            self._break(f"rank {rank} (slot {event.slot}) is gone: {end.how}", now)
        self._go_on(now)

    def start_failed(self, event: ev.EngineStartFailed, now: float) -> None:
        """No process came up for a seat."""
        if seat := self.seats.get(event.slot):
            self._vacate(seat, event.reason, now)
            self._go_on(now)

    def kill(self, seat: Seat, why: str) -> None:
        """SIGKILL to a seat's engine, once; its exit will be reported."""
        self.roster.kill(seat, why)

    def _vacate(self, seat: Seat, how: str, now: float) -> None:
        if self.phase is Phase.FAILED:
            seat.clear()
            seat.state, seat.last_end = SeatState.EMPTY, how
        else:
            self.roster.vacate(seat, how, now, was_started=self.generation > 0)

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
        if self.phase is Phase.RUNNING and event.generation == self.generation:
            rank = self.membership.rank_of(event.slot)
            self._break(f"a collective failed on rank {rank}: {event.error}", now)

    def handed_over(self, event: HandoverEvent, now: float) -> None:
        """A part of the hand-over is done."""
        if self.handover is not None and event.generation == self.generation:
            self._out += self.handover.take(event)
            self._go_on(now)

    def fail(self, reason: str, now: float) -> None:
        """Nothing is left to go on with."""
        self._enter(Phase.FAILED, reason, now)
        self.awaited, self.handover = set(), None
        self._out += self.gate.refuse("RecoveryFailed", self.why_failed)

    def _break(self, reason: str, now: float) -> None:
        members = {
            s for s in self.membership.slots if s in self.seats and self.seats[s].is_in_group
        }
        if self.phase is Phase.BREAKING:
            self.awaited &= members
        if self.phase in (Phase.FAILED, Phase.BREAKING):
            return
        words = {int(self.membership.rank_of(s)): self.seats[s].waits_in for s in members}
        waiting = {rank: where for rank, where in words.items() if where}
        released = od.RanksReleased(generation=self.generation, waiting=waiting, reason=reason)
        self._out.append(do.Notify(released))
        self._enter(Phase.BREAKING, reason, now)
        self.awaited, self.handover = members, None
        for slot in sorted(members):
            self._tell(slot, od.BreakGroup(generation=self.generation, reason=reason))

    # ---- one phase after the other

    def _go_on(self, now: float) -> None:
        """Take the step that became possible."""
        if self.phase is Phase.STARTING:
            self._start_if_ready(now)
        elif self.phase is Phase.RUNNING:
            self._change_if_due(now)
        elif self.awaited:
            return
        elif self.phase is Phase.BREAKING:
            self._form(now)
        elif self.phase is Phase.FORMING:
            self._restore(now)
        elif self.phase is Phase.RESTORING and (self.handover is None or self.handover.is_done):
            self._run(now)

    def _start_if_ready(self, now: float) -> None:
        given_up = self.roster.in_state(SeatState.GIVEN_UP)
        if given_up:
            self.fail(f"slot {given_up[0].slot}: {given_up[0].not_restored[THE_SEAT]}", now)
        elif len(self.roster.in_state(SeatState.READY)) == len(self.seats):
            self._form(now)

    def _form(self, now: float) -> None:
        ready = self.roster.in_state(SeatState.READY)
        stay = self.roster.in_state(SeatState.MEMBER)
        holders = [s for s in stay if s.is_holder] if self.was_running else ready + stay
        decision = policy.decide_world(
            self._config,
            num_survivors=len(holders),
            num_ready=len(ready) + len(stay) - len(holders),
            num_starting=len(self.roster.in_state(SeatState.STARTING, SeatState.REPLAYING)),
        )
        if decision.action == "fail":
            self.fail(decision.reason, now)
            return
        if decision.action == "wait":
            self.reason = decision.reason
            return
        for seat in self.roster.in_state(SeatState.LEAVING):
            self._tell(seat.slot, od.EndEngine())
        if ready and self.was_running:
            ranks = dict.fromkeys(s.slot for s in ready)
            self.story.begin("joined", self.generation, ranks, "refill", now)
        for seat in ready:
            seat.state = SeatState.MEMBER
        members = tuple(s.as_member() for s in self.roster.in_state(SeatState.MEMBER))
        following = Generation(self.generation + 1)
        self.membership = Membership(generation=following, members=members)
        self._enter(Phase.FORMING, f"forming a group of {len(members)}", now)
        self.awaited, self._uncuttable = {m.slot for m in members}, set()
        self._out.append(do.Form(self.membership))

    def _restore(self, now: float) -> None:
        self._form_failures = 0
        self.story.regrouped(now)
        self._enter(Phase.RESTORING, "newcomers are given what the others hold", now)
        slots = self.membership.slots
        newcomers = tuple(s for s in slots if not self.seats[s].is_holder)
        self.handover = None
        if self.was_running and newcomers:
            self.handover = Handover(self.membership, newcomers)
            self._out += self.handover.begin()
        self._go_on(now)

    def _run(self, now: float) -> None:
        if self.handover is not None:
            for slot, unsettled in self.handover.unsettled.items():
                self.seats[slot].not_restored |= unsettled
        not_restored = {s: self.seats[s].not_restored for s in self.membership.slots}
        self.story.end(self.membership, not_restored, restoring_since=self.phase_since, now=now)
        for slot in self.membership.slots:
            self.seats[slot].is_holder, self.seats[slot].restarts = True, 0
        self.was_running, self.handover = True, None
        self._enter(Phase.RUNNING, "", now)
        self._change_if_due(now)

    def _change_if_due(self, now: float) -> None:
        """Deal with newcomers and leavers when no cell runs; else let waiting cells run."""
        ready = self.roster.in_state(SeatState.READY)
        leaving = self.roster.in_state(SeatState.LEAVING)
        if not ready and not leaving and not self.roster.is_catching_up:
            self._out += self.gate.admit(self.membership)
        elif not self.gate.open:
            behind = [s for s in ready if s.replayed < self.roster.journal_length]
            for seat in behind:
                self.roster.replay(seat)
            if not behind and not self.roster.is_catching_up:
                what = "a seat is filled" if ready else "a seat is given back"
                self._break(f"the world changes: {what}", now)
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
        self.gate.end(cell)
        self.roster.journal_length = journal_length
        self._go_on(now)

    def interrupt(self, cell: CellId, now: float) -> None:
        """The user wants a cell to end.

        KeyboardInterrupt where Python runs, a broken group where a collective waits.
        """
        running = [s for s in self.seats.values() if s.beat is not None and s.beat.cell == cell]
        for seat in running:
            self._tell(seat.slot, od.InterruptMain(cell=cell))
        if self.phase is Phase.RUNNING and any(s.beat and s.beat.waiting for s in running):
            self._break("a cell was interrupted while ranks waited in a collective", now)

    # ---- time

    def beat(self, event: ev.Beat) -> None:
        """Where a main thread is."""
        if seat := self.roster.seat(event.slot, event.pid):
            seat.beat = event

    def tick(self, now: float) -> None:
        """Look at the deadlines; called many times a second."""
        self.roster.tick(now)
        for seat in list(self.seats.values()):
            if seat.beat is not None and seat.beat.waiting is not None:
                self._look_at_wait(seat, seat.beat.cell, seat.beat.waiting, now)
        if self.phase is Phase.FORMING and now - self.phase_since > FORM_LIMIT_S:
            for slot in self.awaited:
                self.kill(self.seats[slot], f"was not in the group within {FORM_LIMIT_S:g} s")

    def _look_at_wait(self, seat: Seat, cell: CellId | None, where: ev.Where, now: float) -> None:
        if self.phase is Phase.RUNNING:
            since = self.gate.stuck_since(cell, seat.slot)
            if since is not None and now - max(since, where.since_s) > RELEASE_AFTER_S:
                slots = sorted(self.gate.failed_slots(cell) & set(self.membership.slots))
                failed = ", ".join(str(self.membership.rank_of(s)) for s in slots)
                self._break(f"rank {failed} raised in a cell while others waited for it", now)
        elif self.phase is Phase.BREAKING and seat.slot in self.awaited:
            limit_s = 0.0 if seat.slot in self._uncuttable else UNBLOCK_LIMIT_S
            if now - self.phase_since > limit_s:
                self.kill(seat, "stood in a native wait that a cut of its group did not end")

    # ---- taking up what another supervisor left

    def adopt(self, children: dict[int, Slot]) -> None:
        """A zygote says who lives."""
        self.roster.adopt(children)

    def take_up(self, view: od.WorldView, journal_length: int, now: float) -> None:
        """Begin where the ledger ends: a formed group goes on unnoticed, any other is made anew."""
        self.membership = view.membership
        self.roster.journal_length = journal_length
        self.roster.take_up(view, now)
        self.story.incidents.extend(view.incidents)
        self.was_running = any(seat.is_holder for seat in self.seats.values())
        if view.phase == Phase.FAILED.value:
            self.fail(view.reason, now)
        elif self.generation > 0:
            self._enter(Phase.RUNNING, "", now)
            if view.phase != Phase.RUNNING.value:
                self._break("the supervisor was replaced while a group was being formed", now)

    # ---- helpers

    def _tell(self, slot: Slot, order: od.AgentOrder) -> None:
        self._out.append(do.Tell(slot, order))

    def _enter(self, phase: Phase, reason: str, now: float) -> None:
        self.phase, self.reason, self.phase_since = phase, reason, now
