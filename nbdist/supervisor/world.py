"""The world of one cluster: its phases, and how one leads to the other. Pure.

    starting -> forming -> restoring -> running -> breaking -> forming -> …
    and from any of them: failed

*starting*: the first engines come up. *breaking*: every member leaves the group of `generation`
(cut, destroy, report). *forming*: the same order to every member. *restoring*: newcomers are given
what survivors hold and the journal did not bring back. *failed*: nothing is left to go on with;
only a shutdown leads out.

Cells and planned changes exclude one another: a newcomer, or a seat that is given back, is dealt
with when no cell runs, and cells that begin meanwhile wait until the new world is formed. Both wait
until a run has come to a stand at a step boundary that all members share. A loss breaks the group
at once. What each event does stands in `state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.protocol import orders as od
from nbdist.protocol.ids import Generation, Slot
from nbdist.protocol.runs import RunFault, RunSpec, SendCellTo
from nbdist.protocol.topology import EMPTY, Membership
from nbdist.supervisor import instructions as do
from nbdist.supervisor import policy
from nbdist.supervisor.gate import Gate
from nbdist.supervisor.handover import Handover
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.roster import Roster
from nbdist.supervisor.runs import Runs
from nbdist.supervisor.seats import THE_SEAT, Seat, SeatState
from nbdist.supervisor.story import Story

if TYPE_CHECKING:
    from nbdist.config import ClusterConfig
    from nbdist.supervisor.run import Run

WAY_OUT = ". End it with %dist_reset and start anew with %dist_init."


class World:
    """Seats, the group, the cells that run on it, and what has happened."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._out: list[do.Instruction] = []
        self.roster = Roster(config, self._out)
        self.gate = Gate()
        self.story = Story()
        self.runs = Runs(self._out)
        self.phase = Phase.STARTING
        self.phase_since = 0.0
        self.reason = "the first engines are being started"
        self.membership: Membership = EMPTY
        self.awaited: set[Slot] = set()
        """Members whose report is waited for."""
        self.was_running = False
        """Whether a group was ever whole: from then on newcomers are given what members hold."""
        self.handover: Handover | None = None
        self._formed_under: RunSpec | None = None
        """The run of which a new group's members were asked."""
        self._steps: dict[Slot, int | None] = {}
        """Members of a new group -> steps that the trainer of a run has committed there."""
        self._asked_in: set[int] = set()
        """Newcomers that the kernel was asked to send the cell that trains."""
        self._form_failures = 0
        self._uncuttable: set[Slot] = set()
        self._knows_cells = True
        """Whether a kernel has said which cells run, since this supervisor took over."""
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
        is_full = len(members) == len(self.seats) and not self.roster.surplus
        return self.phase is Phase.RUNNING and is_full

    @property
    def why_failed(self) -> str:
        """What is wrong for good, and what to do."""
        return self.reason + WAY_OUT

    def take(self) -> list[do.Instruction]:
        """Instructions since the last call."""
        out = list(self._out)
        self._out.clear()
        return out

    def fail(self, reason: str, now: float) -> None:
        """Nothing is left to go on with."""
        self._enter(Phase.FAILED, reason, now)
        self.awaited, self.handover = set(), None
        fault = RunFault(kind="RecoveryFailed", message=self.why_failed)
        self.runs.end("failed", self.membership, fault)
        self.runs.entering.refuse(fault.kind, fault.message)
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
        self.runs.stand()
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
        elif self.phase is Phase.BREAKING and not self.was_running:
            self._start_again(now)
        elif self.phase is Phase.BREAKING:
            self._form(now)
        elif self.phase is Phase.FORMING:
            self._restore(now)
        elif self.phase is Phase.RESTORING:
            self._drop_run_if_over()
            for slot, why in self.handover.unfit.items() if self.handover is not None else ():
                self.roster.kill(self.seats[slot], why)
            if self.handover is None or self.handover.is_done:
                self._run(now)

    def _start_if_ready(self, now: float) -> None:
        given_up = self.roster.in_state(SeatState.GIVEN_UP)
        if given_up:
            self.fail(f"slot {given_up[0].slot}: {given_up[0].not_restored[THE_SEAT]}", now)
        elif len(self.roster.in_state(SeatState.READY)) == len(self.seats):
            self._form(now)

    def _start_again(self, now: float) -> None:
        """The first group broke before it was whole: nobody holds anything yet."""
        self.roster.drop_leavers()
        for seat in self.roster.in_state(SeatState.MEMBER):
            seat.state = SeatState.READY
        self._enter(Phase.STARTING, self.reason, now)
        self._start_if_ready(now)

    def _form(self, now: float) -> None:
        self._dismiss()
        ready = self._ready_and_complete(now)
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
        self._tell_story(ready, now)
        for seat in self._leavers():
            seat.is_told_to_end = True
            self._tell(seat.slot, od.EndEngine())
        for seat in ready:
            seat.state, seat.is_added = SeatState.MEMBER, False
        members = tuple(s.as_member() for s in self.roster.in_state(SeatState.MEMBER))
        following = Generation(self.generation + 1)
        self.membership = Membership(generation=following, members=members)
        self._enter(Phase.FORMING, f"forming a group of {len(members)}", now)
        self.awaited, self._uncuttable = {m.slot for m in members}, set()
        self._steps, self._formed_under = {}, self._spec
        coming = self.roster.in_state(SeatState.STARTING, SeatState.REPLAYING, SeatState.READY)
        self._out.append(do.Form(self.membership, self._spec, others_come=bool(coming)))

    def _restore(self, now: float) -> None:
        self._form_failures = 0
        self.story.regrouped(now)
        self._enter(Phase.RESTORING, "newcomers are given what the others hold", now)
        slots = self.membership.slots
        newcomers = tuple(s for s in slots if not self.seats[s].is_holder)
        self.handover = None
        if self.was_running:
            run = self._held_run if self._spec == self._formed_under else None
            spec = self._formed_under if run is not None else None
            handover = Handover(self.membership, newcomers, spec, self._steps)
            if run is not None and handover.run is not None:
                run.step = handover.step  # what nobody has any more is no longer committed
            if handover.is_needed:
                self.handover = handover
                self._out += handover.begin()
        self._go_on(now)

    def _drop_run_if_over(self) -> None:
        if self.handover is not None and self.handover.run != self._spec:
            self.handover.drop_run()

    def _run(self, now: float) -> None:
        if self.handover is not None:
            for slot, unsettled in self.handover.unsettled.items():
                self.seats[slot].not_restored |= unsettled
        not_restored = {s: self.seats[s].not_restored for s in self.membership.slots}
        present, run = self.runs.present, self._held_run
        self.story.end(
            self.membership,
            not_restored,
            restoring_since=self.phase_since,
            run=present if present is not None and present.will_go else None,
            now=now,
        )
        for slot in self.membership.slots:
            self.seats[slot].is_holder, self.seats[slot].restarts = True, 0
            if run is not None and run.spec == self._formed_under:
                run.progress.acknowledge(slot, run.step)  # its own, or copied
        if self._spec == self._formed_under:
            self.runs.evened(self.membership)
        self.was_running, self.handover = True, None
        self._enter(Phase.RUNNING, "", now)
        self.runs.bind(self.membership)
        self._change_if_due(now)

    def _change_if_due(self, now: float) -> None:
        """One thing after the other: a change of the world, waiting cells, the run.

        A run that goes is brought to a stand first. A cell's own loop leaves no room for other
        cells: those that were admitted before it began wait behind it on the engines, and the world
        they were admitted for is not changed meanwhile.
        """
        self._dismiss()
        runs, others = self.runs, self.gate.open - {self.runs.cell}
        is_due = bool(self._ready_and_complete(now) or self._leavers()) and not others
        is_due = is_due and not self.roster.is_catching_up
        if runs.is_going and runs.present is not None:
            waits = bool(self.gate.waiting) and runs.cell is None
            can_admit = waits and not self.roster.is_catching_up
            if is_due or can_admit or runs.present.wants_stand:
                runs.hold(self.membership)
        elif is_due:
            what = "a seat is filled" if self._newcomers() else "a seat is given back"
            self._break(f"the world changes: {what}", now)
            self._go_on(now)
        else:
            runs.settle(self.membership)
            if runs.present is not None:
                runs.present.note_pause(now)
            self._admit_cells()
            if runs.cell is not None or not self.gate.open:
                runs.go_on(self.membership)

    def _admit_cells(self) -> None:
        """Let cells begin, unless a change of the world waits for those that run to end."""
        wants_change = self._newcomers() or self._leavers() or self.roster.is_catching_up
        if self.runs.cell is None and not wants_change:
            self._out += self.gate.admit(self.membership, self.runs.between)

    def _newcomers(self) -> list[Seat]:
        """Those that can be admitted; where a cell trains, only when they are in that cell too."""
        ready = self.roster.in_state(SeatState.READY)
        run = self.runs.present
        if run is None or run.spec.cell is None:
            return ready
        return [seat for seat in ready if seat.slot in run.entered]

    def _ready_and_complete(self, now: float) -> list[Seat]:
        """Newcomers that can be admitted; those that lack what ran meanwhile replay it first.

        While cells run there will be more to replay: then nobody is complete.
        """
        if self.gate.open - {self.runs.cell} and self.phase is Phase.RUNNING:
            return []
        for seat in self.roster.in_state(SeatState.READY):
            if seat.replayed < self.roster.journal_length:
                self.roster.replay(seat, now)
        self._ask_in()
        return self._newcomers()

    def _ask_in(self) -> None:
        """Have the cell that trains sent to newcomers, too."""
        run = self.runs.present
        for seat in self.roster.in_state(SeatState.READY):
            if run is None or run.spec.cell is None or seat.slot in run.entered:
                continue
            if seat.pid is None or seat.engine_id is None or seat.pid in self._asked_in:
                continue
            self._asked_in.add(seat.pid)
            cell, engine_id, pid = run.spec.cell, seat.engine_id, seat.pid
            notice = SendCellTo(cell=cell, slot=seat.slot, engine_id=engine_id, pid=pid)
            self._out.append(do.Notify(notice))

    def _dismiss(self) -> None:
        """Have members beyond the size leave.

        Where a run trains a model that is divided, one leaves after the other, or as many as the
        others have copies of: nobody else has what an engine holds, and the next group makes new
        copies with its first step.
        """
        surplus, run = self.roster.surplus, self.runs.present
        if run is not None and run.will_go and not run.has_twins:
            is_whole = self.phase is Phase.RUNNING and run.progress.generation == self.generation
            num = run.num_leaving(len(self.membership.slots))
            surplus = surplus[-num:] if is_whole and not self._leavers() else []
        for seat in surplus:
            seat.state = SeatState.LEAVING

    def _leavers(self) -> list[Seat]:
        """Members that are to be given back."""
        return [s for s in self.roster.in_state(SeatState.LEAVING) if s.slot in self.membership]

    def _tell_story(self, ready: list[Seat], now: float) -> None:
        """A planned change is an incident too."""
        if not self.was_running:
            return
        refilled = dict.fromkeys(s.slot for s in ready if not s.is_added)
        scaled: dict[Slot, int | None] = dict.fromkeys(s.slot for s in ready if s.is_added)
        scaled |= {s.slot: int(self.membership.rank_of(s.slot)) for s in self._leavers()}
        if refilled:
            self.story.begin("joined", self.generation, refilled, "refill", now)
        if scaled:
            self.story.begin("scaled", self.generation, scaled, "user", now)

    # ---- helpers

    @property
    def _held_run(self) -> Run | None:
        """The run whose trainer members hold: under way, or over in mid-step."""
        run = self.runs.present
        return run if run is not None and run.state != "binding" else self.runs.uneven

    @property
    def _spec(self) -> RunSpec | None:
        """The same, by name."""
        run = self._held_run
        return run.spec if run is not None else None

    def _tell(self, slot: Slot, order: od.AgentOrder) -> None:
        self._out.append(do.Tell(slot, order))

    def _enter(self, phase: Phase, reason: str, now: float) -> None:
        self.phase, self.reason, self.phase_since = phase, reason, now
