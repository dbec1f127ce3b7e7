"""What kernel, supervisor and engines say to one another about a training run. Pure.

A run stands at a step boundary or goes. It goes when the supervisor has told every member to go on
(`GoOn`), up to a step that it names; it stands again when that step is committed, when the step's
vote has said so because somebody was told to hold (`HoldRun`), or when the group is broken.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.protocol.events import Event
from nbdist.protocol.ids import CellId, EngineId, Generation, RunId, Slot
from nbdist.protocol.story import Evaluation

TRAINER = "(trainer)"
"""Stands for the trainer of the present run among the names of a hand-over."""

RunState = Literal["binding", "running", "paused", "recovering", "finished", "stopped", "failed"]


class RunMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of orders and answers about runs; the tag on the wire is the class name."""


def cell_run(cell: CellId, loop: int) -> RunId:
    """Names the run of a cell's loop."""
    return RunId(f"{cell}.{loop}")


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which run."""

    run: RunId
    name: str
    """The variable that holds the trainer on the engines; empty where a cell's loop holds it."""
    cell: CellId | None = None
    """The cell whose own loop this is; None: a task beside the cells."""


class RunFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run failed."""

    kind: str
    """Name of the exception's class, or a class of `nbdist.errors`."""
    message: str
    rank: int | None = None
    traceback: tuple[str, ...] = ()


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the kernel is told it, after every change; how far it is `QueryRun` says."""

    spec: RunSpec
    state: RunState
    target: int
    """It ends when so many steps are committed."""
    stands: bool = True
    """No member trains now."""
    until: int | None = None
    """It pauses when so many steps are committed."""
    fault: RunFault | None = None
    """Set where it failed."""
    step: int = 0
    """Committed steps where it stood last."""
    number: int = 0
    """Of the last order to go on."""
    lr: float | None = None
    """The base rate that it has set, if it has."""
    cells: tuple[CellId, ...] = ()
    """Cells that run; until they are over it stands, but for its own."""


# ---- kernel -> supervisor


class BeginRun(RunMessage, frozen=True, kw_only=True):
    """Train with the trainer that `name` holds, `steps` more committed steps.

    Answered with `RunBegun` when every member has found its trainer.
    """

    name: str
    steps: int


class SteerRun(RunMessage, frozen=True, kw_only=True):
    """Answered with `Done` when it is so: the run stands, goes, or has come to its end.

    `step`: `steps` more steps, then pause. A run that is over is refused.
    """

    run: RunId
    action: Literal["pause", "resume", "stop", "step"]
    steps: int = 0


class SetRun(RunMessage, frozen=True, kw_only=True):
    """Change a setting at the next step boundary, on all ranks the same one.

    Answered with `Done` when it is ordered; the agents are told with the next order to go on.
    """

    run: RunId
    lr: float
    """The base rate that the scheduler works on."""


class QueryRun(RunMessage, frozen=True, kw_only=True):
    """Answered with the `RunReport` of a run."""

    run: RunId
    num_known: int = 0
    """Committed steps that the kernel has already."""


# ---- supervisor -> kernel


class RunBegun(RunMessage, frozen=True, kw_only=True):
    """Answer to `BeginRun`."""

    run: RunId
    step: int
    """Steps that the trainer has committed before."""


class RunReport(RunMessage, frozen=True, kw_only=True):
    """Answer to `QueryRun`."""

    view: RunView
    first: int
    """Place of the first of `rows`, counted from the run's first step.

    Smaller than asked: the last rows are sent again, since a step whose holders all died runs once
    more.
    """
    rows: bytes
    """Committed steps from there on, of dtype `protocol.story.ROWS`."""
    durable: int
    """So many steps are acknowledged by every member."""
    evaluations: tuple[Evaluation, ...]
    num_dropped: int = 0
    """Oldest rows that were dropped to keep memory bounded."""
    remarks: tuple[str, ...] = ()
    """What the user did to it that a reader should know."""


class CellTrains(RunMessage, frozen=True, kw_only=True):
    """Notice: a cell is inside its own training loop now, or no more.

    While it is, a rank that dies does not end it.
    """

    cell: CellId
    is_training: bool


class SendCellTo(RunMessage, frozen=True, kw_only=True):
    """Notice: a newcomer is to run this cell too, which trains.

    Its outcome for a rank is that of the last engine on that slot.
    """

    cell: CellId
    slot: Slot
    engine_id: EngineId
    pid: int


# ---- supervisor -> agent


class BindRun(RunMessage, frozen=True, kw_only=True):
    """Find the trainer; report `RunBound`."""

    spec: RunSpec


class GoOn(RunMessage, frozen=True, kw_only=True):
    """Train until `until` steps are committed, then stand, and report `RunHeld`."""

    spec: RunSpec
    generation: Generation
    """Only in the group of this generation."""
    until: int
    number: int
    """Counts the orders to go on of a run. One that is told again is carried out once: who stands
    already says so again."""
    lr: float | None = None
    """Change the base rate to this before. With this order, so that all ranks do it or none."""


class HoldRun(RunMessage, frozen=True, kw_only=True):
    """Say so in the next vote: all members stand after that step."""

    run: RunId


class EndRun(RunMessage, frozen=True, kw_only=True):
    """The run is over for this engine; an own loop ends, or raises where there is a fault."""

    run: RunId
    fault: RunFault | None = None
    is_even: bool = True
    """All members hold the same step. Where they do not, the trainer is kept for the next group, in
    which those that lag are given the newest; then this order comes once more."""


RunOrder = BindRun | GoOn | HoldRun | EndRun
"""What an agent may be ordered to do with a run."""


# ---- agent -> supervisor


class RunBound(Event, frozen=True, kw_only=True):
    """An engine has found its trainer, or not."""

    slot: Slot
    pid: int
    run: RunId
    step: int
    """Steps that the trainer has committed."""
    is_replicated: bool = True
    """Every rank holds the same. Where not, ranks that stand apart find together by themselves."""
    has_twin: bool = False
    """Another rank holds what this one holds, as of now, so that both need not stay."""
    leaves_by: int = 0
    """Else so many may leave together, and as often as they are half of all: copies of what they
    hold are with those that stay. 0: one leaves after the other."""
    fault: RunFault | None = None


class RunEntered(Event, frozen=True, kw_only=True):
    """A cell has come to its own training loop on this engine, and waits to be told to go on."""

    slot: Slot
    pid: int
    cell: CellId
    loop: int
    """Which of the cell's loops, from 0."""
    step: int
    steps: int
    """It wants so many more committed steps."""


class RunHeld(Event, frozen=True, kw_only=True):
    """The run stands on this engine, `step` steps being committed."""

    slot: Slot
    pid: int
    generation: Generation
    run: RunId
    step: int
    number: int
    """Of the order to go on that has come to its end by it."""


class StepsCommitted(Event, frozen=True, kw_only=True):
    """An engine has applied these steps: rows of dtype `protocol.story.ROWS`, in order."""

    slot: Slot
    run: RunId
    rows: bytes


class StepBroken(Event, frozen=True, kw_only=True):
    """An attempt at a step came to nothing on this engine; it will be repeated."""

    slot: Slot
    run: RunId
    generation: Generation
    step: int


class RunEvaluated(Event, frozen=True, kw_only=True):
    """An evaluation is done, with the same result on every rank."""

    slot: Slot
    run: RunId
    evaluation: Evaluation


class RunRaised(Event, frozen=True, kw_only=True):
    """The user's code raised on this engine, in a step or between steps."""

    slot: Slot
    pid: int
    run: RunId
    fault: RunFault


class RunLeft(Event, frozen=True, kw_only=True):
    """An own loop was left early on this engine (`break`)."""

    slot: Slot
    pid: int
    run: RunId
    step: int


RunEvent = (
    RunBound
    | RunEntered
    | RunHeld
    | StepsCommitted
    | StepBroken
    | RunEvaluated
    | RunRaised
    | RunLeft
)
"""What an agent may report of a run."""
