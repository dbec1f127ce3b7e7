"""One training run on this engine, as the trainer's loop sees it.

Runs in the engine's main thread, but for `Port.flush` and what beats read, which the agent's thread
calls. The loop itself is the trainer's (`nbdist.train`), which stands above this package: here it
is only known by what it can do.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch.distributed as dist

from nbdist.engine.group import is_communication_error
from nbdist.errors import RecoveryFailed, RunEnded
from nbdist.protocol import events as ev
from nbdist.protocol import runs as rn
from nbdist.protocol.ids import Generation
from nbdist.protocol.story import ROWS, Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.engine.group import Groups
    from nbdist.protocol.ids import Slot

MAX_RECENT_BYTES = 512 << 10
"""Of the last rows, which are reported again to a supervisor that takes over: 8,192 steps, far more
than pass until one does."""
OURS = str(Path(__file__).parents[1]) + os.sep
"""Where nbdist's own code lies."""
PATIENCE_S = 120.0
"""A newcomer's replay may take long; where nobody comes, a run is not to stand for ever."""
MAX_BREAKS = 3
"""So often in a row may a step break among the very same engines; then the error is the user's."""


@runtime_checkable
class Drivable(Protocol):
    """What the engine asks of a trainer."""

    @property
    def step(self) -> int:
        """Committed steps."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same, so that any can hand it over to any other."""

    @property
    def has_twin(self) -> bool:
        """Whether another rank of the present group holds what this one holds."""

    @property
    def leaves_by(self) -> int:
        """So many ranks may leave together, and as often as they are half of all; 0: one alone."""

    async def drive(self, port: Port) -> None:
        """Train as the port says, giving way to the event loop between steps, until it is over."""

    def pack(self) -> bytes:
        """The whole state."""

    def unpack(self, data: bytes) -> None:
        """Load a state, in place; the bytes are known to be ours."""

    def digest(self) -> str:
        """Equal for equal states, in every process."""

    def parameter_digest(self) -> str:
        """The same of the parameters alone."""

    def owned(self) -> list[object]:
        """What it carries: a newcomer is given these through it."""


_ASKED = [n for n in vars(Drivable) if not n.startswith("_") and n != "step"]
"""Each class has these; an object may count its steps in an attribute of its own."""


def is_trainer(value: object) -> TypeGuard[Drivable]:
    """Whether it can be driven, told by its class: an object of the user's is not touched."""
    return all(hasattr(type(value), name) for name in _ASKED)


class Ground(Protocol):
    """What a port stands on: `engine.runs.Runs`."""

    slot: Slot
    groups: Groups
    tell: Callable[[ev.Event], None]
    poll: Callable[[], None]
    slow_factor: float

    def wait(self) -> None:
        """Block until orders have come, and carry them out."""

    async def wait_async(self) -> None:
        """The same, while the event loop carries them out and runs cells."""


class Port:
    """One run on this engine, as its loop sees it."""

    def __init__(self, ground: Ground, spec: rn.RunSpec, trainer: Drivable) -> None:
        self._ground = ground
        self.spec, self.trainer = spec, trainer
        self._number = 0
        """Of the last order to go on."""
        self.go_until: int | None = None
        """Train until so many steps are committed; None: stand and wait."""
        self.is_over = False
        self._has_left = False
        self.fault: Exception | None = None
        """With `is_over`: what an own loop raises."""
        self.wants_hold = False
        """To be said in the next vote."""
        self.settings: list[dict[str, float]] = []
        """Changes to be made before going on."""
        self.patience_s = PATIENCE_S
        """For so long a trainer that does not fit the present group waits for the next."""
        self.begun: int | None = None
        """The step that is being trained, and whether it may take long."""
        self.is_patient = False
        self._said: ev.Event | None = None
        """What the supervisor must know of this run here, as it was told last."""
        self._rows: deque[tuple[Any, ...]] = deque()
        self._recent: deque[bytes] = deque()
        """Reports."""
        self._recent_bytes = 0
        self._flushing = threading.Lock()
        self._breaks: tuple[tuple[int, ...], int] = ((), 0)
        """Engines among which the last attempts broke, and how many did."""

    # ---- the world

    @property
    def generation(self) -> int:
        """Of the present group."""
        return self._ground.groups.generation

    @property
    def rank(self) -> int:
        """In the present group."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Of the present group."""
        return dist.get_world_size()

    @property
    def others_come(self) -> bool:
        """Seats are being filled: another group follows the present one."""
        return self._ground.groups.others_come

    @property
    def slow_factor(self) -> float:
        """The user has made this engine so many times as slow; in a group that is cut, it is not.

        Nobody waits for its share there, but for it to leave the group.
        """
        groups = self._ground.groups
        return 1.0 if groups.cut_generation == groups.generation else self._ground.slow_factor

    # ---- what the loop calls

    def poll(self) -> None:
        """Carry out orders that have come; never waits."""
        self._ground.poll()

    def wait(self) -> None:
        """Own loops: block until an order has been carried out."""
        self._ground.wait()

    async def wait_async(self) -> None:
        """Tasks: the same, while cells run."""
        await self._ground.wait_async()

    def begin_step(self, step: int, *, patient: bool) -> None:
        """An attempt at a step begins; `patient`: it may take long (first step, evaluation)."""
        self.begun, self.is_patient = step, patient

    def hold(self, step: int) -> None:
        """The loop stands, `step` steps being committed. Said once for each `GoOn`."""
        if self.go_until is not None:
            self.stand()
            self._say_held(step)

    def _say_held(self, step: int) -> None:
        self._ground.tell(
            rn.RunHeld(
                slot=self._ground.slot,
                pid=os.getpid(),
                generation=Generation(self.generation),
                run=self.spec.run,
                step=step,
                number=self._number,
            )
        )

    def committed(self, row: tuple[Any, ...]) -> None:
        """A step is applied; `row` as `protocol.story.ROWS`."""
        self._rows.append(row)
        self._breaks = ((), 0)

    def broken(self, step: int, error: BaseException) -> bool:
        """Whether an error in an attempt is the group's: then wait, and repeat the step.

        False where it is the user's own, or where the step has broken again and again although
        nobody was lost.
        """
        groups = self._ground.groups
        was_cut = groups.cut_generation == groups.generation
        is_ours = is_communication_error(error) or (was_cut and isinstance(error, RuntimeError))
        members, num_breaks = self._breaks
        num_breaks = num_breaks + 1 if members == groups.pids else 1
        self._breaks = groups.pids, num_breaks
        if not is_ours or num_breaks > MAX_BREAKS:
            return False
        generation = Generation(groups.generation)
        if not was_cut:
            self._ground.tell(
                ev.CollectiveFailed(
                    slot=self._ground.slot,
                    pid=os.getpid(),
                    generation=generation,
                    error=str(error).splitlines()[0] if str(error) else type(error).__name__,
                )
            )
        self.stand()
        self._ground.tell(
            rn.StepBroken(
                slot=self._ground.slot, run=self.spec.run, generation=generation, step=step
            )
        )
        return True

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""
        self._ground.tell(
            rn.RunEvaluated(slot=self._ground.slot, run=self.spec.run, evaluation=evaluation)
        )

    def raised(self, error: BaseException) -> None:
        """The user's code raised; said once, also where the loop was left by it."""
        if self.is_over and not self._has_left:
            return
        self.is_over, self._has_left = True, False
        self.stand()
        self.say(
            rn.RunRaised(
                slot=self._ground.slot, pid=os.getpid(), run=self.spec.run, fault=_fault_of(error)
            )
        )

    def left(self, step: int) -> None:
        """An own loop was left early; said once."""
        if self.is_over:
            return
        self.is_over = self._has_left = True
        self.stand()
        self.say(rn.RunLeft(slot=self._ground.slot, pid=os.getpid(), run=self.spec.run, step=step))

    # ---- what others call

    def flush(self) -> None:
        """Report the steps that were committed. From any thread."""
        with self._flushing:
            if not (rows := [self._rows.popleft() for _ in range(len(self._rows))]):
                return
            data = np.array(rows, dtype=ROWS).tobytes()
            self._recent.append(data)
            self._recent_bytes += len(data)
            while self._recent_bytes > MAX_RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popleft())
            self._report(data)

    def say(self, event: ev.Event) -> None:
        """Tell the supervisor how it stands with this run here."""
        self._said = event
        self._ground.tell(event)

    def repeat(self) -> None:
        """Tell it to a supervisor that took over: what is told twice counts once.

        From any thread.
        """
        if self._said is not None:
            self._ground.tell(self._said)
        with self._flushing:
            if self._recent:
                self._report(b"".join(self._recent))

    def _report(self, data: bytes) -> None:
        self._ground.tell(rn.StepsCommitted(slot=self._ground.slot, run=self.spec.run, rows=data))

    def go_on(self, order: rn.GoOn) -> None:
        """Train until so many steps are committed; said again, it is the same order."""
        if order.number != self._number:
            self.go_until, self.wants_hold, self._number = order.until, False, order.number
            self.settings += [{"lr": order.lr}] if order.lr is not None else []
        elif self.go_until is None:
            self._say_held(self.trainer.step)

    def end(self, fault: rn.RunFault | None) -> None:
        """The run is over."""
        self.stand()
        self._has_left = False
        if fault is not None and not self.is_over:
            self.fault = RunEnded(f"{fault.kind}: {fault.message}")
        self.is_over = True

    def stand(self) -> None:
        """Train no more until told to; the group is broken, the run over, or it was said so."""
        self.go_until, self.wants_hold, self.begun = None, False, None
        self.flush()


def _fault_of(error: BaseException) -> rn.RunFault:
    if isinstance(error, RecoveryFailed):  # all ranks say the same, of no line of theirs
        return rn.RunFault(kind=type(error).__name__, message=str(error))
    shown = traceback.TracebackException.from_exception(error)
    _leave_out_ours(shown)
    return rn.RunFault(
        kind=type(error).__name__,
        message=str(error),
        rank=dist.get_rank() if dist.is_initialized() else None,
        traceback=tuple("".join(shown.format()).splitlines()),
    )


def _leave_out_ours(shown: traceback.TracebackException) -> None:
    """The user sees the lines of the user's own code, and of what it calls."""
    theirs = [frame for frame in shown.stack if not frame.filename.startswith(OURS)]
    shown.stack = traceback.StackSummary.from_list(theirs)
    for other in (shown.__cause__, shown.__context__):
        if other is not None:
            _leave_out_ours(other)
