"""The training run of a cluster: bound, going or standing, over. Pure.

The world is `state`'s; this knows only who is in the group. It says when members go on, hold or are
done, as instructions; `state` says when something else must have its turn first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.ids import Slot
from nbdist.supervisor import instructions as do
from nbdist.supervisor.entering import Entering
from nbdist.supervisor.progress import Progress
from nbdist.supervisor.run import Place, Run, loop_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from nbdist.protocol.ids import CellId, RunId
    from nbdist.protocol.topology import Membership

NUM_PAST = 8
"""So many runs that are over are remembered."""


class Runs:
    """The present run and those that are over.

    Args:
        out: where instructions go.
    """

    def __init__(self, out: list[do.Instruction]) -> None:
        self._out = out
        self.present: Run | None = None
        self.past: deque[Run] = deque(maxlen=NUM_PAST)
        self.uneven: Run | None = None
        """The last run, if it ended in mid-step: the next group gives its newest step to all."""
        self.entering = Entering(out)
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

    @property
    def between(self) -> tuple[int, int] | None:
        """Numbers of the last step before a cell that runs now, and of the first one after it.

        With n committed steps these are n - 1 and n. None where no run is under way, or nothing is
        committed yet.
        """
        run = self.present
        if run is None or run.state == "binding" or run.step == 0:
            return None
        return run.step - 1, run.step

    @property
    def over(self) -> RunId | None:
        """The one that ended last."""
        return self.past[-1].spec.run if self.past else None

    def find(self, run: RunId) -> Run | None:
        """A run by its name."""
        return next((r for r in self._every() if r.spec.run == run), None)

    def views(self, *, is_whole: bool, cells: tuple[CellId, ...] = ()) -> tuple[rn.RunView, ...]:
        """All that are remembered, oldest first; `cells`: for which the present one stands."""
        every = [run for run in self._every() if run.state != "binding"]
        views = [
            run.view(is_whole=is_whole, cells=cells if run is self.present else ()) for run in every
        ]
        return tuple(views[-NUM_PAST:])

    # ---- the user's orders

    def begin(self, run: RunId, order: rn.BeginRun) -> str:
        """A run is wanted; why it cannot be, in words, or nothing."""
        if order.steps < 1:
            return f"steps={order.steps}: at least 1"
        if self.present is not None or self.entering:
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
                run.is_paused, run.until = True, None
            case "resume":
                run.is_paused, run.until = False, None
            case "stop":
                run.is_stopping = True
            case "step":
                if order.steps < 1:
                    return f"steps={order.steps}: at least 1"
                if run.is_going or not run.is_paused:
                    return "the run goes on; pause it before you step through it"
                run.is_paused, run.until = False, min(run.step + order.steps, run.target)
        return ""

    def set(self, order: rn.SetRun) -> str:
        """Change a setting at the next boundary; why not, in words, or nothing."""
        run = self.present
        if run is None or run.spec.run != order.run:
            return self._why_over(order.run)
        run.wanted_lr = order.lr
        return ""

    def _why_over(self, name: RunId) -> str:
        run = self.find(name)
        state = run.state if run is not None else "over, or not known here"
        return f"the run is {state}; it takes no orders any more"

    def _every(self) -> list[Run]:
        return [*self.past, self.present] if self.present is not None else list(self.past)

    # ---- what members say

    def bound(self, event: rn.RunBound) -> None:
        """A member has looked for its trainer."""
        if self.present is not None and self.present.spec.run == event.run:
            self.present.bound[event.slot] = event
        else:  # it was refused or is over, or a supervisor that is gone had begun it
            self.let_go(event.slot, event.run)

    def held(self, event: rn.RunHeld, membership: Membership, now: float) -> str:
        """A member stands; what is wrong with it, in words, or nothing."""
        run = self.present
        if run is None or (run.spec.run, run.number) != (event.run, event.number):
            return ""
        if not run.is_going:
            return ""  # said again
        run.held[event.slot] = Place(event.step, now)
        return self._come_to_stand(run, membership)

    def left(self, event: rn.RunLeft, membership: Membership, now: float) -> str:
        """An own loop was left early on one engine; what is wrong with it, or nothing."""
        run = self.present
        if run is None or run.spec.run != event.run:
            self.let_go(event.slot, event.run)
            return ""
        return self._leave(run, event.slot, Place(event.step, now), membership)

    def let_go(self, slot: Slot, run: RunId) -> None:
        """A member is out of a run that is not under way: over, or not begun."""
        self.entering.turn_back(slot, run)
        is_even = self.uneven is None or self.uneven.spec.run != run
        self._tell(slot, rn.EndRun(run=run, is_even=is_even))

    def _leave(self, run: Run, slot: Slot, place: Place, membership: Membership) -> str:
        run.left[slot] = place
        if len(run.leavers(membership)) < membership.world_size:
            return self._come_to_stand(run, membership)
        steps = {place.step for place in run.left.values()}
        run.step, run.is_even = max(steps), len(steps) == 1
        self.end("stopped" if run.step < run.target else "finished", membership)
        return ""

    def _come_to_stand(self, run: Run, membership: Membership) -> str:
        places = run.held | run.left
        if not run.is_going or not set(membership.slots) <= set(places):
            return ""
        steps = {places[slot].step for slot in membership.slots}
        if len(steps) > 1:
            return f"members stand at different steps: {sorted(steps)}"
        self.stand()
        run.step, run.is_even = steps.pop(), True
        return ""

    def committed(self, event: rn.StepsCommitted) -> tuple[Run, NDArray[np.void]] | None:
        """A member has applied steps; the run, and the rows that nobody had reported before."""
        run = self.find(event.run)
        return (run, run.progress.add(event.slot, event.rows)) if run is not None else None

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
        self, event: rn.RunEntered, membership: Membership, now: float, refusal: str
    ) -> str:
        """A cell has come to its own loop on an engine; what is wrong with it, or nothing.

        Args:
            event: where.
            membership: the group.
            now: the time.
            refusal: why this cell cannot train, in words, or nothing.
        """
        run = self.present
        if run is not None and run.spec.run == rn.cell_run(event.cell, event.loop):
            run.entered.add(event.slot)
        elif self.entering.has_begun(event.cell, event.loop):  # the others have left it behind
            over = self.find(rn.cell_run(event.cell, event.loop))
            self.entering.send_away(event, over.fault if over is not None else None)
        else:
            if run is not None and run.spec.cell != event.cell:
                refusal = "trainer.steps() trains without another run beside it; stop that first"
            self.entering.wait(event)
            if refusal:
                self.entering.refuse("WrongState", refusal, event.cell)
            elif run is not None and event.slot not in run.left:
                # That it left the loop before was told to a supervisor that is gone.
                return self._leave(run, event.slot, Place(event.step, now), membership)
            self._begin_own_loop(membership)
        return ""

    def _begin_own_loop(self, membership: Membership) -> None:
        event = self.entering.begin(membership) if self.present is None else None
        if event is None:
            return
        spec = rn.RunSpec(run=rn.cell_run(event.cell, event.loop), name="", cell=event.cell)
        self.present = run = Run(spec, event.steps, step=event.step)
        run.state, run.target = "running", event.step + event.steps
        run.progress = Progress(event.step)
        run.entered = self.entering.follow(event.cell, event.loop)
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

    def settle(self, membership: Membership) -> None:
        """All stand at one step: bind, take the user's orders, come to the end."""
        run = self.present
        if run is None or run.is_going:
            return
        if run.state == "binding" and not self._bind_or_refuse(run, membership):
            return
        if run.until is not None and run.step >= run.until:
            run.is_paused, run.until = True, None
        if run.step >= run.target:
            self.end("finished", membership)
        elif run.is_stopping or len(run.leavers(membership)) == membership.world_size:
            self.end("stopped", membership)
        elif run.is_paused:
            run.state = "paused"

    def go_on(self, membership: Membership) -> None:
        """Nothing else has its turn: tell all members to go on, if the run is to."""
        run = self.present
        if run is None or run.is_going or run.is_paused or run.state == "binding":
            return
        if left := run.leavers(membership):
            ranks = ", ".join(str(membership.rank_of(slot)) for slot in left)
            text = f"rank {ranks} left the training loop while the others trained on"
            self.end("failed", membership, rn.RunFault(kind="WrongState", message=text))
            return
        run.state, run.is_going, run.is_even, run.number = "running", True, False, run.number + 1
        run.lr, run.wanted_lr = run.wanted_lr, None
        for slot in membership.slots:
            self.tell_again(slot, membership)

    def tell_again(self, slot: Slot, membership: Membership) -> None:
        """Tell a member what it is to do; what it was told may have been lost."""
        run = self.present
        if run is not None and run.state == "binding" and slot not in run.bound:
            self._tell(slot, rn.BindRun(spec=run.spec))
        if run is None or not run.is_going or slot in run.held:
            return
        order = rn.GoOn(
            spec=run.spec,
            generation=membership.generation,
            until=run.target if run.until is None else run.until,
            number=run.number,
            lr=run.lr,
        )
        self._tell(slot, order)
        if run.is_hold_ordered:
            self._tell(slot, rn.HoldRun(run=run.spec.run))

    def _bind_or_refuse(self, run: Run, membership: Membership) -> bool:
        """Whether all have their trainer; a run that cannot begin is refused."""
        bound = {slot: run.bound[slot] for slot in membership.slots if slot in run.bound}
        if len(bound) < membership.world_size:
            return False
        steps = {int(membership.rank_of(slot)): its.step for slot, its in bound.items()}
        slot, fault = next(((s, b.fault) for s, b in bound.items() if b.fault), (Slot(0), None))
        refusal = None
        if fault is not None:
            text = f"rank {membership.rank_of(slot)}: {fault.message}"
            refusal = rn.RunFault(kind=fault.kind, message=text)
        elif len(set(steps.values())) > 1 and all(its.is_replicated for its in bound.values()):
            text = f"the trainer has committed different numbers of steps, rank by rank: {steps}"
            refusal = rn.RunFault(kind="WrongState", message=text)
        if refusal is not None:
            self.end("failed", membership, refusal)
            return False
        run.state, run.step = "running", max(steps.values())
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
        if run.state != "binding":
            self.past.append(run)
        elif fault is not None:
            refusal = od.Refused(kind=fault.kind, message=fault.message)
            self._out.append(do.AnswerRun(run.spec.run, refusal))
        self.stand()
        run.state, run.fault, self.present = state, fault, None
        self.uneven = None if run.is_even else run
        for slot in {*membership.slots, *run.entered}:
            self._tell(slot, rn.EndRun(run=run.spec.run, fault=fault, is_even=run.is_even))
        if run.spec.cell is not None:
            self._out.append(do.Notify(rn.CellTrains(cell=run.spec.cell, is_training=False)))
            self._begin_own_loop(membership)  # some may have come to the next one early

    def evened(self, membership: Membership) -> None:
        """All members hold the same step of the last run: those that lagged were given it."""
        if self.present is not None:
            self.present.is_even = True
        if self.uneven is not None:
            over, self.uneven = self.uneven.spec.run, None
            for slot in membership.slots:
                self.let_go(slot, over)

    def end_cell(self, cell: CellId, membership: Membership) -> None:
        """A cell is over for the kernel: whoever still is in its loop leaves it."""
        self.entering.end_cell(cell)
        if self.cell == cell:
            text = "the cell is over for the notebook"
            self.end("stopped", membership, rn.RunFault(kind="RunEnded", message=text))

    def lost(self, slot: Slot) -> None:
        """An engine is gone."""
        self.entering.lost(slot)
        if self.present is not None:
            for told in (self.present.bound, self.present.held, self.present.left):
                told.pop(slot, None)
            self.present.entered.discard(slot)

    def take_up(self, views: tuple[rn.RunView, ...], rows: Callable[[RunId], bytes]) -> None:
        """What another supervisor wrote down; `rows`: the committed steps of a run."""
        for view in views:
            run = Run.taken_up(view, rows(view.spec.run))
            if view.spec.cell is not None:
                self.entering.note(view.spec.cell, loop_of(view.spec.run))
            if run.is_over:
                self.past.append(run)
            else:
                self.present = run

    def _tell(self, slot: Slot, order: rn.RunOrder) -> None:
        self._out.append(do.Tell(slot, order))
