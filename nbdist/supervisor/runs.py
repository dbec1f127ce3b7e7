"""The training run of a cluster: bound, going or standing, over. Pure.

The world is `state`'s; this knows only who is in the group. It says when members go on, hold or are
done, as instructions; `state` says when something else must have its turn first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.ids import Slot
from nbdist.protocol.story import ROWS
from nbdist.supervisor import instructions as do
from nbdist.supervisor.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.protocol.ids import CellId, RunId
    from nbdist.protocol.story import Evaluation
    from nbdist.protocol.topology import Membership

NUM_PAST = 8
"""So many runs that are over are remembered."""
ENDED: tuple[rn.RunState, ...] = ("finished", "stopped", "failed")


@dataclass
class Run:
    """One run."""

    spec: rn.RunSpec
    steps: int
    """So many more steps were asked for."""
    state: rn.RunState = "binding"
    step: int = 0
    """Committed steps at the last boundary at which the run stood."""
    target: int = 0
    until: int | None = None
    """Pause when so many steps are committed."""
    is_going: bool = False
    """Members were told to go on, and have not all come to a stand."""
    is_hold_ordered: bool = False
    is_paused: bool = False
    is_stopping: bool = False
    bound: dict[Slot, rn.RunBound] = field(default_factory=dict)
    held: dict[Slot, int] = field(default_factory=dict)
    entered: set[Slot] = field(default_factory=set)
    """An own loop: newcomers that have come to it."""
    left: dict[Slot, float] = field(default_factory=dict)
    """An own loop: who left it early, and when."""
    settings: list[rn.SetRun] = field(default_factory=list)
    fault: rn.RunFault | None = None
    progress: Progress = field(default_factory=lambda: Progress(0))
    evaluations: list[Evaluation] = field(default_factory=list)
    broken: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) of attempts that came to nothing."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.state in ENDED

    @property
    def wants_stand(self) -> bool:
        """Whether the user wants something that takes place at a boundary."""
        return self.is_paused or self.is_stopping or bool(self.settings)

    def view(self, *, is_whole: bool) -> rn.RunView:
        """As the kernel is told it; `is_whole`: the group is formed."""
        is_broken = not is_whole and not self.is_over and self.state != "binding"
        return rn.RunView(
            spec=self.spec,
            state="recovering" if is_broken else self.state,
            target=self.target,
            stands=not self.is_going,
            until=self.until,
            fault=self.fault,
        )


class Runs:
    """The present run and those that are over.

    Args:
        out: where instructions go.
    """

    def __init__(self, out: list[do.Instruction]) -> None:
        self._out = out
        self.present: Run | None = None
        self.past: deque[Run] = deque(maxlen=NUM_PAST)
        self._entering: dict[Slot, rn.RunEntered] = {}
        """Members whose cell has come to its own loop; they wait for the others."""

    # ---- what is asked of it

    @property
    def is_going(self) -> bool:
        """Whether members train now."""
        return self.present is not None and self.present.is_going

    @property
    def cell(self) -> CellId | None:
        """The cell whose own loop trains; None where none does."""
        return self.present.spec.cell if self.present is not None else None

    def find(self, run: RunId) -> Run | None:
        """A run by its name."""
        return next((r for r in self._every() if r.spec.run == run), None)

    def views(self, *, is_whole: bool) -> tuple[rn.RunView, ...]:
        """All that are remembered, oldest first."""
        every = [run for run in self._every() if run.state != "binding"]
        views = [run.view(is_whole=is_whole) for run in every]
        return tuple(views[-NUM_PAST:])

    # ---- the user's orders

    def begin(self, run: RunId, order: rn.BeginRun) -> str:
        """A run is wanted; why it cannot be, in words, or nothing."""
        if order.steps < 1:
            return f"steps={order.steps}: at least 1"
        if self.present is not None:
            return "a run trains on these engines now; wait for it, or stop it first"
        self.present = Run(rn.RunSpec(run=run, name=order.name), order.steps)
        return ""

    def steer(self, order: rn.SteerRun) -> str:
        """Pause, go on, stop, or a few steps; why not, in words, or nothing."""
        run = self.present
        if run is None or run.spec.run != order.run:
            return self._why_over(order.run)
        match order.action:
            case "pause":
                run.is_paused = True
            case "resume":
                run.is_paused, run.until = False, None
            case "stop":
                run.is_stopping = True
            case "step":
                if order.steps < 1:
                    return f"steps={order.steps}: at least 1"
                if run.is_going:
                    return "the run goes on; pause it before you step through it"
                run.is_paused, run.until = False, min(run.step + order.steps, run.target)
        return ""

    def set(self, order: rn.SetRun) -> str:
        """Change a setting at the next boundary; why not, in words, or nothing."""
        run = self.present
        if run is None or run.spec.run != order.run:
            return self._why_over(order.run)
        run.settings.append(order)
        return ""

    def _why_over(self, name: RunId) -> str:
        run = self.find(name)
        state = run.state if run is not None else "not known here"
        return f"the run is {state}; it takes no orders any more"

    def _every(self) -> list[Run]:
        return [*self.past, self.present] if self.present is not None else list(self.past)

    # ---- what members say

    def bound(self, event: rn.RunBound) -> None:
        """A member has looked for its trainer."""
        if self.present is not None and self.present.spec.run == event.run:
            self.present.bound[event.slot] = event

    def held(self, event: rn.RunHeld, membership: Membership) -> str:
        """A member stands; what is wrong with it, in words, or nothing."""
        run = self.present
        if run is None or run.spec.run != event.run or not run.is_going:
            return ""
        run.held[event.slot] = event.step
        if set(run.held) < set(membership.slots):
            return ""
        steps = {run.held[slot] for slot in membership.slots}
        if len(steps) > 1:
            return f"members stand at different steps: {sorted(steps)}"
        self.stand()
        run.step = steps.pop()
        return ""

    def committed(self, event: rn.StepsCommitted) -> None:
        """A member has applied steps."""
        run = self.find(event.run)
        if run is not None:
            run.progress.add(event.slot, event.rows)

    def evaluated(self, event: rn.RunEvaluated) -> None:
        """An evaluation is done; the first report of it counts."""
        run = self.find(event.run)
        if run is not None and all(e.step != event.evaluation.step for e in run.evaluations):
            run.evaluations.append(event.evaluation)

    def broken(self, event: rn.StepBroken) -> None:
        """An attempt came to nothing."""
        run = self.find(event.run)
        if run is not None:
            run.broken.add((event.generation, event.step))

    def entered(
        self, event: rn.RunEntered, membership: Membership, ranks: tuple[int, ...] | None
    ) -> None:
        """A cell has come to its own loop on an engine; `ranks`: where the cell was sent."""
        run, name = self.present, rn.cell_run(event.cell, event.loop)
        if run is not None and run.spec.run == name:
            run.entered.add(event.slot)
        elif run is not None and run.spec.cell == event.cell:
            self._tell(event.slot, rn.EndRun(run=name))  # a loop that the others have left behind
        elif run is None and (ranks is None or len(ranks) == membership.world_size):
            self._entering[event.slot] = event
            self._begin_own_loop(event, membership)
        else:
            text = "trainer.steps() trains on all ranks, and without another run beside it"
            self._tell(event.slot, _end(name, "WrongState", text))

    def _begin_own_loop(self, event: rn.RunEntered, membership: Membership) -> None:
        if not set(membership.slots) <= set(self._entering):
            return
        name, entering = rn.cell_run(event.cell, event.loop), self._entering
        self._entering = {}
        wanted = {(e.cell, e.loop, e.step, e.steps) for e in entering.values()}
        if len(wanted) > 1:
            asked = {
                int(membership.rank_of(s)): f"{entering[s].steps} from step {entering[s].step}"
                for s in membership.slots
            }
            text = f"ranks want different steps, rank by rank: {asked}"
            for slot, its in entering.items():
                self._tell(slot, _end(rn.cell_run(its.cell, its.loop), "WrongState", text))
            return
        spec = rn.RunSpec(run=name, name="", cell=event.cell)
        self.present = Run(spec, event.steps, step=event.step, target=event.step + event.steps)
        self.present.state, self.present.progress = "running", Progress(event.step)
        self._out.append(do.Notify(rn.CellTrains(cell=event.cell, is_training=True)))

    # ---- what becomes of it

    def bind(self, membership: Membership) -> None:
        """Ask every member for its trainer."""
        if self.present is not None and self.present.state == "binding":
            self.present.bound.clear()
            for slot in membership.slots:
                self._tell(slot, rn.BindRun(spec=self.present.spec))

    def stand(self) -> None:
        """Nobody trains: all have come to a boundary, or the group is broken."""
        if self.present is not None:
            self.present.is_going = self.present.is_hold_ordered = False
            self.present.held.clear()

    def hold(self, membership: Membership) -> None:
        """Have all stand at the next common boundary; said once."""
        run = self.present
        if run is not None and not run.is_hold_ordered:
            run.is_hold_ordered = True
            for slot in membership.slots:
                self._tell(slot, rn.HoldRun(run=run.spec.run))

    def advance(self, membership: Membership) -> None:
        """All stand, and nothing else has its turn: go on, pause or end."""
        run = self.present
        if run is None or run.is_going:
            return
        if run.state == "binding" and not self._bind_or_refuse(run, membership):
            return
        for setting in run.settings:
            for slot in membership.slots:
                self._tell(slot, setting)
        run.settings = []
        if run.until is not None and run.step >= run.until:
            run.is_paused, run.until = True, None
        if run.step >= run.target:
            self.end("finished", membership)
        elif run.is_stopping:
            self.end("stopped", membership)
        elif run.is_paused:
            run.state = "paused"
        else:
            run.state, run.is_going = "running", True
            for slot in membership.slots:
                self.go(slot, membership)

    def go(self, slot: Slot, membership: Membership) -> None:
        """Tell one member to go on."""
        run = self.present
        if run is not None:
            until = run.target if run.until is None else run.until
            order = rn.GoOn(spec=run.spec, generation=membership.generation, until=until)
            self._tell(slot, order)

    def _bind_or_refuse(self, run: Run, membership: Membership) -> bool:
        """Whether all have their trainer; a run that cannot begin is refused."""
        bound = {slot: run.bound[slot] for slot in membership.slots if slot in run.bound}
        if len(bound) < membership.world_size:
            return False
        faults = {slot: its.fault for slot, its in bound.items() if its.fault is not None}
        steps = {int(membership.rank_of(slot)): its.step for slot, its in bound.items()}
        refusal = None
        if faults:
            slot, fault = next(iter(faults.items()))
            text = f"rank {membership.rank_of(slot)}: {fault.message}"
            refusal = od.Refused(kind=fault.kind, message=text)
        elif len(set(steps.values())) > 1:
            text = f"the trainer has committed different numbers of steps, rank by rank: {steps}"
            refusal = od.Refused(kind="WrongState", message=text)
        if refusal is not None:
            self._out.append(do.AnswerRun(run.spec.run, refusal))
            for slot in bound:
                self._tell(slot, rn.EndRun(run=run.spec.run))
            self.present = None
            return False
        run.state, run.step = "running", next(iter(steps.values()))
        run.target, run.progress = run.step + run.steps, Progress(run.step)
        self._out.append(do.AnswerRun(run.spec.run, rn.RunBegun(run=run.spec.run, step=run.step)))
        return True

    def end(
        self, state: rn.RunState, membership: Membership, fault: rn.RunFault | None = None
    ) -> None:
        """The present run is over."""
        run = self.present
        if run is None:
            return
        if run.state == "binding":
            text = fault.message if fault is not None else "the run was ended before it began"
            refusal = od.Refused(kind=fault.kind if fault else "WrongState", message=text)
            self._out.append(do.AnswerRun(run.spec.run, refusal))
        else:
            self.past.append(run)
        run.state, run.fault, self.present = state, fault, None
        self.stand()
        run.is_going = False
        for slot in {*membership.slots, *run.entered}:
            self._tell(slot, rn.EndRun(run=run.spec.run, fault=fault))
        if run.spec.cell is not None:
            self._out.append(do.Notify(rn.CellTrains(cell=run.spec.cell, is_training=False)))

    def end_cell(self, cell: CellId, membership: Membership) -> None:
        """A cell is over for the kernel: whoever still is in its loop leaves it."""
        text = "the cell is over for the notebook"
        for slot, event in list(self._entering.items()):
            if event.cell == cell:
                del self._entering[slot]
                self._tell(slot, _end(rn.cell_run(cell, event.loop), "RunEnded", text))
        if self.cell == cell:
            self.end("stopped", membership, rn.RunFault(kind="RunEnded", message=text))

    def lost(self, slot: Slot) -> None:
        """An engine is gone."""
        self._entering.pop(slot, None)
        if self.present is not None:
            for told in (self.present.bound, self.present.held, self.present.left):
                told.pop(slot, None)
            self.present.entered.discard(slot)

    def take_up(self, views: tuple[rn.RunView, ...], rows: Callable[[RunId], bytes]) -> None:
        """What another supervisor wrote down; `rows`: the committed steps of a run."""
        for view in views:
            run = Run(view.spec, 0, state=view.state, target=view.target)
            data = rows(view.spec.run)
            first = int(np.frombuffer(data, ROWS)["step"][0]) if data else 0
            run.progress = Progress(first)
            run.progress.add(Slot(-1), data)
            run.step = run.progress.step
            run.until, run.fault, run.is_going = view.until, view.fault, not view.stands
            run.is_paused = view.state == "paused"
            if run.is_over:
                self.past.append(run)
            else:
                run.state = "paused" if run.is_paused else "running"
                self.present = run

    def _tell(self, slot: Slot, order: rn.RunOrder) -> None:
        self._out.append(do.Tell(slot, order))


def _end(run: RunId, kind: str, message: str) -> rn.EndRun:
    return rn.EndRun(run=run, fault=rn.RunFault(kind=kind, message=message))
