"""The lifecycle machine: an event and the time in, instructions out. Pure; one thread (`loop`) feeds it.

Phases of the world, one at a time:

    starting -> forming -> restoring -> running -> breaking -> forming -> …      and from any of them: failed

*starting*: the first engines come up. *breaking*: every member leaves the group of `generation` (cut, destroy, report).
*forming*: the same order to every member. *restoring*: newcomers are given what survivors hold and the journal did not
bring back. *failed*: nothing is left to go on with; only a shutdown leads out.

Cells and planned changes exclude one another: a newcomer, or a seat that is given back, is dealt with when no cell runs,
and cells that begin meanwhile wait until the new world is formed. A loss breaks the group at once.
"""

from __future__ import annotations

from enum import Enum

from nbdist.config import ClusterConfig
from nbdist.errors import guess_cause
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol.ids import CellId, Generation, Slot
from nbdist.protocol.topology import EMPTY, Membership
from nbdist.supervisor import instructions as do
from nbdist.supervisor import policy
from nbdist.supervisor.gate import RELEASE_AFTER_S, Gate, WaitingCell
from nbdist.supervisor.handover import Handover
from nbdist.supervisor.instructions import Instruction
from nbdist.supervisor.seats import Seat, SeatState
from nbdist.supervisor.story import Story

UNBLOCK_LIMIT_S = 3.0
"""A member that still stands in a native wait this long after its group was cut cannot be freed, and is killed."""
FORM_LIMIT_S = 15.0
"""Members that have not reported a group within this time are killed."""
MAX_FORM_FAILURES = 5
"""So many formations in a row that fail though nobody died mean that something else is wrong."""


class Phase(Enum):
    """Phase of the world."""

    STARTING = "starting"
    FORMING = "forming"
    RESTORING = "restoring"
    RUNNING = "running"
    BREAKING = "breaking"
    FAILED = "failed"


class Machine:
    """The world of one cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.size = config.num_engines
        self.seats: dict[Slot, Seat] = {Slot(i): Seat(Slot(i)) for i in range(self.size)}
        self.phase = Phase.STARTING
        self.phase_since = 0.0
        self.membership: Membership = EMPTY
        self.reason = "the first engines are being started"
        self.awaited: set[Slot] = set()
        self.was_running = False
        """Whether a group has ever been whole: from then on, newcomers are given what members hold."""
        self.handover: Handover | None = None
        self.form_failures = 0
        self.uncuttable: set[Slot] = set()
        self.gate = Gate()
        self.journal_length = 0
        self.story = Story()
        self._out: list[Instruction] = []

    # ---- what is asked of it

    @property
    def generation(self) -> Generation:
        """Number of the group that is formed, forming, or was broken last."""
        return self.membership.generation

    @property
    def is_healthy(self) -> bool:
        """All wanted seats are members of a formed group."""
        return self.phase is Phase.RUNNING and all(
            s.state is SeatState.MEMBER for s in self.seats.values()
        )

    def take(self) -> list[Instruction]:
        """Instructions since the last call."""
        out, self._out = self._out, []
        return out

    # ---- start and scale

    def start(self, now: float) -> None:
        """Fill the seats for the first time."""
        self._enter(Phase.STARTING, self.reason, now)
        for seat in self.seats.values():
            self._start_engine(seat, now)

    def scale(self, size: int, now: float) -> None:
        """Grow or shrink to `size` seats; done when `is_healthy` and no seat lies beyond."""
        self.size = size
        for i in range(size):
            seat = self.seats.setdefault(Slot(i), Seat(Slot(i)))
            if seat.state in (SeatState.EMPTY, SeatState.GIVEN_UP):
                seat.restarts = 0
                self._start_engine(seat, now)
            elif seat.state is SeatState.LEAVING:
                seat.state = SeatState.MEMBER
        for slot in [s for s in self.seats if s >= size]:
            self._give_back(self.seats[slot])
        self._change_if_due(now)

    def _give_back(self, seat: Seat) -> None:
        if seat.state is SeatState.MEMBER:
            seat.state = SeatState.LEAVING
        elif seat.state is not SeatState.LEAVING:
            if seat.pid is not None:
                self._out.append(do.KillEngine(seat.slot, seat.pid, "scaled down"))
            del self.seats[seat.slot]

    def _start_engine(self, seat: Seat, now: float) -> None:
        seat.state, seat.started_at = SeatState.STARTING, now
        self._out.append(do.StartEngine(seat.slot))

    # ---- engines

    def forked(self, event: ev.EngineForked) -> None:
        """The zygote made a process."""
        if seat := self.seats.get(event.slot):
            seat.pid = event.pid
        else:
            self._out.append(do.KillEngine(event.slot, event.pid, "scaled down"))

    def hello(self, event: ev.EngineHello, now: float) -> None:
        """An engine is up, or its agent has found a replaced supervisor."""
        seat = self.seats.get(event.slot)
        if seat is None or seat.pid not in (None, event.pid):
            self._out.append(do.KillEngine(event.slot, event.pid, "it sits on no seat of ours"))
            return
        seat.pid, seat.engine_id, seat.host = event.pid, event.engine_id, event.host
        seat.device = event.device
        if seat.state is SeatState.STARTING:
            seat.replayed = event.replayed
            self._replay(seat)
        elif event.slot in self.awaited and self.phase is Phase.BREAKING:
            self._tell(event.slot, od.BreakGroup(generation=self.generation, reason=self.reason))

    def _replay(self, seat: Seat) -> None:
        seat.is_late = seat.state is SeatState.READY
        seat.state = SeatState.REPLAYING
        # The rank that it has once every seat that is being filled is filled: its old one.
        empty = (SeatState.EMPTY, SeatState.GIVEN_UP)
        seated = [s.slot for s in self.seats.values() if s.state not in empty]
        rank = sorted(seated).index(seat.slot)
        since, until = seat.replayed, self.journal_length
        self._out.append(do.Replay(seat.slot, since, until, rank, len(seated)))
        seat.replayed = self.journal_length

    def replayed(self, event: ev.JournalReplayed, now: float) -> None:
        """A newcomer ran the journal."""
        seat = self._seat(event.slot, event.pid)
        if seat is None or seat.state is not SeatState.REPLAYING:
            return
        seat.state = SeatState.READY
        seat.not_restored |= dict.fromkeys(event.failed, "its cell failed in the replay")
        self._change_if_due(now)
        self._go_on(now)

    def exited(self, event: ev.EngineExited, now: float) -> None:
        """An engine's process is gone; only the first report counts."""
        seat = self._seat(event.slot, event.pid)
        if seat is None:
            return
        state, hung = seat.state, event.detector == "beat"
        seat.last_end = event.signal or f"exit code {event.exit_code}"
        guess = seat.killed_why or guess_cause(event.signal)
        was_member = event.slot in self.membership and state in (
            SeatState.MEMBER,
            SeatState.LEAVING,
        )
        rank = self.membership.rank_of(event.slot) if was_member else None
        notice = od.EngineLost(
            slot=event.slot, rank=rank, pid=event.pid, signal=event.signal, exit_code=event.exit_code,
            guess=guess, last_lines=(),
        )  # fmt: skip
        ordered_at = seat.ordered_at
        cause = "user" if seat.killed_why == "ordered by the user" else seat.last_end
        seat.clear()
        if state is SeatState.LEAVING or event.slot >= self.size:
            del self.seats[event.slot]
        else:
            self._refill(seat, now)
        if was_member and self.phase is not Phase.FAILED:
            self._out.append(do.Notify(notice))
            ranks = () if rank is None else (int(rank),)
            kind: ev.IncidentKind = "hung" if hung else "lost"
            self.story.begin(
                kind,
                (event.slot,),
                ranks,
                cause,
                generation=self.generation,
                now=now,
                detect_s=now - (ordered_at or event.at),
            )
            self._break(f"rank {rank} (slot {event.slot}) is gone: {seat.last_end}", now)
        self._go_on(now)

    def start_failed(self, event: ev.EngineStartFailed, now: float) -> None:
        """No process came up for a seat."""
        if seat := self.seats.get(event.slot):
            seat.last_end = event.reason
            seat.clear()
            self._refill(seat, now)
            self._go_on(now)

    def _refill(self, seat: Seat, now: float) -> None:
        seat.state = SeatState.EMPTY
        seat.restarts += 1
        decision = policy.decide_seat(
            self.config, restarts=seat.restarts, was_started=self.generation > 0, last=seat.last_end
        )
        if self.phase is Phase.FAILED or decision.action == "leave empty":
            return
        if decision.action == "give up":
            seat.state = SeatState.GIVEN_UP
            seat.not_restored = {"(the seat)": decision.reason}
        else:
            self._start_engine(seat, now)

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
            self.uncuttable.add(event.slot)
        self.awaited.discard(event.slot)
        self._go_on(now)

    def form_failed(self, event: ev.GroupFormFailed, now: float) -> None:
        """A member could not form the group: everybody leaves it, and the next one is tried."""
        if self.phase is not Phase.FORMING or event.generation != self.generation:
            return
        self.form_failures += 1
        if self.form_failures > MAX_FORM_FAILURES:
            self.fail(
                f"{self.form_failures} groups in a row could not be formed, last: {event.error}",
                now,
            )
        else:
            self._break(f"slot {event.slot} could not form the group: {event.error}", now)

    def fingerprinted(self, event: ev.NamesFingerprinted, now: float) -> None:
        """A member's digests came."""
        hand = self.handover
        if hand is None or self.phase is not Phase.RESTORING or event.generation != self.generation:
            return
        if hand.add(event.slot, event.digests) and hand.plan is not None:
            for slot, unsettled in hand.plan.unsettled.items():
                self.seats[slot].not_restored |= unsettled
            if hand.plan.all_names:
                receivers = tuple(int(self.membership.rank_of(s)) for s in sorted(hand.awaited))
                self._tell(
                    hand.survivors[0],
                    od.OfferNames(
                        generation=self.generation, names=hand.plan.all_names, receivers=receivers
                    ),
                )
        self._go_on(now)

    def offered(self, event: ev.NamesOffered) -> None:
        """The donor has packed: the receivers are told the digest."""
        hand = self.handover
        if hand is None or hand.plan is None or event.generation != self.generation:
            return
        for slot in sorted(hand.awaited):
            names = hand.plan.names[slot]
            self.seats[slot].not_restored |= {n: w for n, w in event.failed.items() if n in names}
            order = od.ReceiveNames(
                generation=self.generation, donor=self.membership.rank_of(event.slot), sha256=event.sha256,
                num_bytes=event.num_bytes, names=tuple(n for n in names if n not in event.failed),
            )  # fmt: skip
            self._tell(slot, order)

    def received(self, event: ev.NamesReceived, now: float) -> None:
        """A newcomer has what it was sent."""
        if self.handover is None or event.generation != self.generation:
            return
        self.seats[event.slot].not_restored |= event.failed
        self.handover.awaited.discard(event.slot)
        self._go_on(now)

    def collective_failed(self, event: ev.CollectiveFailed, now: float) -> None:
        """A group in which a collective failed is of no use: everybody leaves it, and the next one is formed."""
        if self.phase is Phase.RUNNING and event.generation == self.generation:
            rank = self.membership.rank_of(event.slot)
            self._break(f"a collective failed on rank {rank}: {event.error}", now)

    def _break(self, reason: str, now: float) -> None:
        if self.phase is Phase.FAILED:
            return
        members = [
            s for s in self.membership.slots if s in self.seats and self.seats[s].is_in_group
        ]
        if self.phase is Phase.BREAKING:
            self.awaited &= set(members)
            return
        waiting = {
            int(self.membership.rank_of(s)): f"{b.waiting.operation}, {b.waiting.line}"
            for s in members
            if (b := self.seats[s].beat) and b.waiting
        }
        self._out.append(
            do.Notify(od.RanksReleased(generation=self.generation, waiting=waiting, reason=reason))
        )
        self._enter(Phase.BREAKING, reason, now)
        self.handover = None
        self.awaited = set(members)
        for slot in members:
            self._tell(slot, od.BreakGroup(generation=self.generation, reason=reason))

    def _go_on(self, now: float) -> None:
        """Take the step that became possible."""
        if self.phase is Phase.STARTING:
            self._start_if_ready(now)
        elif self.awaited:
            return
        elif self.phase is Phase.BREAKING:
            self._form(now)
        elif self.phase is Phase.FORMING:
            self._restore(now)
        elif self.phase is Phase.RESTORING and (self.handover is None or self._is_handed_over()):
            self._run(now)

    def _is_handed_over(self) -> bool:
        return (
            self.handover is not None
            and self.handover.plan is not None
            and not self.handover.awaited
        )

    def _start_if_ready(self, now: float) -> None:
        given_up = [s for s in self.seats.values() if s.state is SeatState.GIVEN_UP]
        if given_up:
            self.fail(f"slot {given_up[0].slot}: {given_up[0].not_restored['(the seat)']}", now)
        elif all(s.state is SeatState.READY for s in self.seats.values()):
            self._form(now)

    def _form(self, now: float) -> None:
        by_state = {
            state: [s for s in self.seats.values() if s.state is state] for state in SeatState
        }
        ready, stay = by_state[SeatState.READY], by_state[SeatState.MEMBER]
        starting = by_state[SeatState.STARTING] + by_state[SeatState.REPLAYING]
        holders = [s for s in stay if s.is_holder] if self.was_running else ready + stay
        decision = policy.decide_world(
            self.config,
            num_survivors=len(holders),
            num_ready=len(ready) + len(stay) - len(holders),
            num_starting=len(starting),
        )
        if decision.action == "fail":
            self.fail(decision.reason, now)
            return
        if decision.action == "wait":
            self.reason = decision.reason
            return
        for seat in by_state[SeatState.LEAVING]:
            self._tell(seat.slot, od.EndEngine())
        if ready and self.was_running:
            slots = tuple(s.slot for s in ready)
            self.story.begin("joined", slots, (), "refill", generation=self.generation, now=now)
        seats = sorted([*ready, *stay], key=lambda s: s.slot)
        for seat in seats:
            seat.state = SeatState.MEMBER
        self.membership = Membership(
            generation=Generation(self.generation + 1), members=tuple(s.as_member() for s in seats)
        )
        self._enter(Phase.FORMING, f"forming a group of {len(seats)}", now)
        self.awaited = {s.slot for s in seats}
        self.uncuttable = set()
        self._out.append(do.Form(self.membership))

    def _restore(self, now: float) -> None:
        self.form_failures = 0
        self.story.regrouped(now)
        self._enter(Phase.RESTORING, "newcomers are given what the others hold", now)
        slots = self.membership.slots
        newcomers = tuple(s for s in slots if not self.seats[s].is_holder)
        self.handover = None
        if self.was_running and newcomers:
            self.handover = Handover(tuple(s for s in slots if s not in newcomers), newcomers)
            for slot in slots:
                self._tell(slot, od.FingerprintNames(generation=self.generation))
        self._go_on(now)

    def _run(self, now: float) -> None:
        for incident in self.story.end(self.generation, now - self.phase_since, now):
            if incident.kind == "joined":
                present = [s for s in incident.slots if s in self.membership]
                incident.ranks = tuple(int(self.membership.rank_of(s)) for s in present)
                incident.not_restored = {
                    n: w for s in present for n, w in self.seats[s].not_restored.items()
                }
        for slot in self.membership.slots:
            self.seats[slot].is_holder, self.seats[slot].restarts = True, 0
        self.was_running, self.handover = True, None
        self._enter(Phase.RUNNING, "", now)
        self._change_if_due(now)

    def fail(self, reason: str, now: float) -> None:
        """Nothing is left to go on with."""
        self._enter(Phase.FAILED, reason, now)
        self.awaited, self.handover = set(), None
        self._out += self.gate.refuse("RecoveryFailed", self.why_failed)

    @property
    def why_failed(self) -> str:
        """What is wrong for good, and what to do."""
        return f"{self.reason}. End it with %dist_reset and start anew with %dist_init."

    def _change_if_due(self, now: float) -> None:
        """Deal with newcomers and leavers when no cell runs; else let waiting cells run."""
        if self.phase is not Phase.RUNNING:
            return
        ready = [s for s in self.seats.values() if s.state is SeatState.READY]
        leaving = [s for s in self.seats.values() if s.state is SeatState.LEAVING]
        if not ready and not leaving and not self._is_catching_up:
            self._out += self.gate.admit(self.membership)
        elif not self.gate.open:
            behind = [s for s in ready if s.replayed < self.journal_length]
            for seat in behind:
                self._replay(seat)
            if not behind and not self._is_catching_up:
                self._break(
                    "the world changes: "
                    + ("a seat is filled" if ready else "a seat is given back"),
                    now,
                )

    @property
    def _is_catching_up(self) -> bool:
        """A newcomer replays what was run while it came up; cells wait for it."""
        return any(s.state is SeatState.REPLAYING and s.is_late for s in self.seats.values())

    # ---- cells

    def begin_cell(self, cell: CellId, ranks: tuple[int, ...] | None, now: float) -> None:
        """A cell is about to be sent."""
        if self.phase is Phase.FAILED:
            self._out.append(do.RefuseCell(cell, "RecoveryFailed", self.why_failed))
            return
        self.gate.waiting.append(WaitingCell(cell, ranks))
        self._change_if_due(now)

    def end_cell(self, cell: CellId, journal_length: int, now: float) -> None:
        """A cell is over, and the journal is this long now."""
        self.gate.end(cell)
        self.journal_length = journal_length
        self._change_if_due(now)

    def interrupt(self, cell: CellId, now: float) -> None:
        """The user wants a cell to end: KeyboardInterrupt where Python runs, a broken group where a collective waits."""
        waits = False
        for slot in self.membership.slots:
            seat = self.seats.get(slot)
            if seat is None or seat.beat is None or seat.beat.cell != cell:
                continue
            waits = waits or seat.beat.waiting is not None
            self._tell(slot, od.InterruptMain(cell=cell))
        if waits and self.phase is Phase.RUNNING:
            self._break("a cell was interrupted while ranks waited in a collective", now)

    # ---- time

    def beat(self, event: ev.Beat) -> None:
        """Where a main thread is."""
        if seat := self._seat(event.slot, event.pid):
            seat.beat = event

    def tick(self, now: float) -> None:
        """Look at the deadlines; called many times a second."""
        for seat in self.seats.values():
            if (
                seat.state is SeatState.STARTING
                and now - seat.started_at > self.config.start_timeout_s
            ):
                seat.started_at = now
                self.kill(seat, f"was not ready within {self.config.start_timeout_s:g} s")
            elif seat.beat is not None:
                self._look_at_wait(seat, seat.beat, now)
        if self.phase is Phase.FORMING and now - self.phase_since > FORM_LIMIT_S:
            for slot in self.awaited:
                self.kill(self.seats[slot], f"was not in the group within {FORM_LIMIT_S:g} s")

    def _look_at_wait(self, seat: Seat, beat: ev.Beat, now: float) -> None:
        if beat.waiting is None:
            return
        if self.phase is Phase.RUNNING:
            since = self.gate.stuck_since(beat.cell, seat.slot)
            if since is not None and now - max(since, beat.waiting.since_s) > RELEASE_AFTER_S:
                failed = ", ".join(
                    str(self.membership.rank_of(s))
                    for s in sorted(self.gate.failed_slots(beat.cell))
                )
                self._break(f"rank {failed} raised in a cell while others waited for it", now)
        elif self.phase is Phase.BREAKING and seat.slot in self.awaited:
            if now - self.phase_since > UNBLOCK_LIMIT_S:
                self.kill(seat, "stood in a native wait that a cut of its group did not end")

    def kill(self, seat: Seat, why: str) -> None:
        """SIGKILL to a seat's engine, once; its exit will be reported."""
        if seat.pid is not None and not seat.killed_why:
            seat.killed_why = why
            self._out.append(do.KillEngine(seat.slot, seat.pid, why))

    # ---- taking up what another supervisor left

    def adopt(self, children: dict[int, Slot]) -> None:
        """A zygote says who lives: engines whose start the predecessor ordered and did not write down."""
        for pid, slot in children.items():
            if (
                slot in self.seats
                and self.seats[slot].pid is None
                and self.seats[slot].engine_id is None
            ):
                self.seats[slot].pid = pid

    def take_up(self, view: od.WorldView, now: float) -> None:
        """Begin where the ledger ends: a formed group goes on unnoticed, anything else is broken and formed anew."""
        self.size, self.membership = view.size, view.membership
        self.was_running = view.membership.generation > 0
        self.story.incidents.extend(view.incidents)
        self.seats = {}
        for seen in view.seats:
            seat = Seat(
                seen.slot, SeatState(seen.state), seen.pid, seen.engine_id, seen.host, seen.device
            )
            seat.not_restored, seat.started_at = dict(seen.not_restored), now
            seat.is_holder = seat.state is SeatState.MEMBER and view.phase == "running"
            self.seats[seen.slot] = seat
            if seat.state in (SeatState.STARTING, SeatState.REPLAYING, SeatState.READY):
                seat.state = SeatState.STARTING  # its hello says how far it had come
                if seat.pid is None:
                    self._start_engine(seat, now)
        if view.phase == "running":
            self._enter(Phase.RUNNING, "", now)
        elif view.phase == "failed":
            self.fail(view.reason, now)
        elif self.was_running:
            for slot in self.membership.slots:
                self.seats[slot].is_holder = slot in self.seats
            self._enter(Phase.RUNNING, "", now)
            self._break("the supervisor was replaced while the group was formed", now)

    # ---- helpers

    def _seat(self, slot: Slot, pid: int) -> Seat | None:
        """The seat, if this very engine sits on it."""
        seat = self.seats.get(slot)
        return seat if seat is not None and seat.pid == pid else None

    def _tell(self, slot: Slot, order: od.AgentOrder) -> None:
        self._out.append(do.Tell(slot, order))

    def _enter(self, phase: Phase, reason: str, now: float) -> None:
        self.phase, self.reason, self.phase_since = phase, reason, now
