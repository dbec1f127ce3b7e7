"""The training run of this engine, if there is one: where the supervisor's orders meet it.

Runs in the engine's main thread, but for `Runs.wake`, which the agent's thread calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist.engine.port import Drivable, Port, is_trainer
from nbdist.engine.room import give_back
from nbdist.errors import OutOfMemory, WrongState, forget
from nbdist.protocol import runs as rn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.engine.group import Groups
    from nbdist.protocol import events as ev
    from nbdist.protocol.ids import CellId, RunId, Slot

log = logging.getLogger(__name__)
_REMADE = (
    "{name} is the trainer of a run that goes on, and keeps its name: the run trains on with it. "
    "run.stop() or %dist_stop ends the run; then make it anew, or use another name now"
)
_MISSING = (
    "{name} is missing on slot {slot}, whose engine came in mid-run: what was replayed there has "
    "not made it. Make trainers in a cell for all ranks, without --once"
)
OVERTAKEN_LIMIT_S = 2.0
"""For so long a cell waits for an order that it has overtaken, if the order was not lost."""
_present: Runs | None = None


def present() -> Runs | None:
    """The runs of this process; None where it is no engine."""
    return _present


def is_replaying() -> bool:
    """Whether this process is an engine that goes through what others have run before."""
    its = present()
    return its is not None and its.is_replaying


class Runs:
    """The run of this engine, if there is one.

    Args:
        slot: whose.
        groups: this engine's.
        user_ns: the user's variables.
        tell: sends an event to the supervisor, from any thread.
        poll: carries out the orders that have come.
    """

    def __init__(
        self,
        slot: Slot,
        groups: Groups,
        user_ns: dict[str, Any],
        *,
        tell: Callable[[ev.Event], None],
        poll: Callable[[], None],
    ) -> None:
        global _present  # noqa: PLW0603 - one process, one engine; the trainer finds it here
        _present = self
        self.slot, self.groups, self.tell, self.poll = slot, groups, tell, poll
        self.user_ns = user_ns
        self.port: Port | None = None
        self._over: Port | None = None
        """A run that ended in mid-step: in the next group its trainer is made the same on all
        ranks."""
        self._spec: rn.RunSpec | None = None
        """The run under which the present group was formed."""
        self.cell: CellId | None = None
        """The cell that runs now."""
        self._bound_before: dict[str, int] = {}
        """What the user's names held when it began."""
        self.is_replaying = False
        """A replay trains nothing."""
        self.slow_factor = 1.0
        """The user has made this engine so many times as slow. Set by the agent's thread."""
        self._num_loops: tuple[CellId | None, int] = (None, 0)
        self._woken = threading.Event()
        """An order has come."""
        self._news = asyncio.Event()
        """An order about the run was carried out."""
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- the kernel's side

    def begin_cell(self, cell: CellId, over: RunId | None) -> None:
        """A cell begins; what was ordered before it counts already.

        Args:
            cell: which.
            over: the run that ended last before it; the order that says so comes by another road.
        """
        if self.port is not None:
            self.poll()
        deadline = time.monotonic() + OVERTAKEN_LIMIT_S
        while self._trains_in(over) and time.monotonic() < deadline:
            self._woken.wait(OVERTAKEN_LIMIT_S / 10)
            self._woken.clear()
            self.poll()
        self.cell = cell
        self._bound_before = {name: id(value) for name, value in self.user_ns.items()}

    def cell_raised(self, error: BaseException) -> None:
        """The cell has raised, in its own loop, perhaps: who waits there is to know at once."""
        if self._is_in_loop and self.port is not None:
            self.port.raised(error)

    def end_cell(self, error: BaseException | None) -> None:
        """It is over, and with it its own loop, though something may still hold it."""
        if error is not None:
            self.cell_raised(error)
        elif self._is_in_loop and self.port is not None:
            self.port.left(self.port.trainer.step)
        self.cell, self._bound_before = None, {}

    def _trains_in(self, run: RunId | None) -> bool:
        return self.port is not None and self.port.spec.run == run

    @property
    def _is_in_loop(self) -> bool:
        """Whether the run is the own loop of the cell that runs."""
        return self.cell is not None and self.port is not None and self.port.spec.cell == self.cell

    def is_of_the_loop(self, name: str) -> bool:
        """Whether a name was bound by the cell whose own loop trains: every rank has its own."""
        if self.port is None or self.port.spec.cell is None:
            return False
        return self._bound_before.get(name) != id(self.user_ns.get(name))

    # ---- the trainer's side

    def enter(self, trainer: Drivable, steps: int) -> Port:
        """A cell's own loop begins.

        Raises:
            WrongState: a run goes on with this engine, or no cell of nbdist runs.
        """
        if self.port is not None and not self.port.is_over:
            raise WrongState(
                "a run trains on these engines now; run.wait() waits for its end, run.stop() or "
                "%dist_stop ends it"
            )
        if self.cell is None:
            raise WrongState(
                "trainer.steps() runs in a %%distributed cell; trainer.fit() elsewhere"
            )
        cell, number = self._num_loops
        self._num_loops = self.cell, number + 1 if cell == self.cell else 0
        loop = self._num_loops[1]
        spec = rn.RunSpec(run=rn.cell_run(self.cell, loop), name="", cell=self.cell)
        self._over = self.port or self._over
        self.port = Port(self, spec, trainer)
        self.port.say(
            rn.RunEntered(
                slot=self.slot,
                pid=os.getpid(),
                cell=self.cell,
                loop=loop,
                step=trainer.step,
                steps=steps,
            )
        )
        return self.port

    def wait(self) -> None:
        """Block until orders have come, and carry them out."""
        self._woken.wait()
        self._woken.clear()
        self.poll()

    async def wait_async(self) -> None:
        """The same, while the event loop carries them out and runs cells."""
        await self._news.wait()
        self._news.clear()

    # ---- orders

    def wake(self) -> None:
        """An order has come. From the agent's thread."""
        self._woken.set()

    def repeat(self) -> None:
        """Another supervisor has taken over. From the agent's thread."""
        port = self.port
        if port is not None:
            port.repeat()

    def take(self, order: rn.RunOrder) -> None:
        """Carry out an order."""
        port = self.port
        if isinstance(order, rn.BindRun):
            self._bind_and_say(order.spec)
            return
        if isinstance(order, rn.EndRun):
            self._end(order)
            return
        run = order.spec.run if isinstance(order, rn.GoOn) else order.run
        if port is None or port.spec.run != run:
            if isinstance(order, rn.GoOn) and self.groups.is_whole(order.generation):
                self._say_missing(order.spec)
            return
        match order:
            case rn.GoOn(generation=generation):
                if self.groups.is_whole(generation):
                    port.go_on(order)
            case rn.HoldRun():
                port.wants_hold = True
        self._news.set()

    def _say_missing(self, spec: rn.RunSpec) -> None:
        """The others would wait for this engine in their next step."""
        if spec.cell is not None:  # it comes to its loop by itself
            return
        fault = rn.RunFault(
            kind="WrongState", message=_MISSING.format(name=spec.name, slot=self.slot)
        )
        self.tell(rn.RunRaised(slot=self.slot, pid=os.getpid(), run=spec.run, fault=fault))

    def _end(self, order: rn.EndRun) -> None:
        """A run is over; told once more when nothing is left to be made even."""
        port, over = self.port, self._over
        if order.is_even and over is not None and over.spec.run == order.run:
            self._over = None
        if port is not None and port.spec.run == order.run:
            port.end(order.fault)
            self.port, self._over = None, None if order.is_even else port
        self._news.set()

    def stand(self) -> None:
        """The group is gone: train no more before there is another one."""
        if self.port is not None:
            self.port.stand()

    def prepare(self, spec: rn.RunSpec | None) -> int | None:
        """A group was formed under a run: the steps that its trainer has committed here.

        None where it is not here, or where it is each rank's own: then nobody is given another's,
        and the ranks find together again at the next step.
        """
        port, self._spec = self.port, spec
        if spec is None:
            return None
        if self._over is not None and self._over.spec == spec:
            return _shared_step(self._over.trainer)
        if port is not None and port.spec.run != spec.run:
            port.end(None)
            self.port = port = None
        port = port or self._bind_if_here(spec)
        return _shared_step(port.trainer) if port is not None else None

    # ---- what a cell may not do to it

    def check_names(self, names: Iterable[str]) -> None:
        """Before names are bound from outside.

        Raises:
            WrongState: the trainer that trains has one of them.
        """
        if (name := self.trained_name) in set(names):
            raise WrongState(_REMADE.format(name=name))

    def restore_name(self) -> str:
        """After a cell: give its name back to the trainer that trains.

        What is wrong, in words, where the cell had taken it; else nothing.
        """
        name = self.trained_name
        if self.port is None or not name or self.user_ns.get(name) is self.port.trainer:
            return ""
        self.user_ns[name] = self.port.trainer
        return _REMADE.format(name=name)

    @property
    def trained_name(self) -> str:
        """The variable of the trainer that trains; empty where none does."""
        port = self.port
        return port.spec.name if port is not None and not port.is_over else ""

    # ---- what a newcomer is given

    def owned(self) -> set[int]:
        """Identities of what belongs to the trainer that newcomers are given as a whole."""
        port = self._given
        return {id(o) for o in port.trainer.owned()} if port is not None else set()

    @property
    def _given(self) -> Port | None:
        """Whose trainer is handed over in the present group."""
        over = self._over
        return over if over is not None and over.spec == self._spec else self.port

    def offer(self) -> tuple[bytes, str]:
        """The present trainer, packed, and the digest of its state."""
        if self._given is None:
            raise WrongState("no run goes on here")
        trainer = self._given.trainer
        return trainer.pack(), trainer.digest()

    def receive(self, data: bytes) -> str:
        """Take over a state; the digest of what is here then."""
        port = self._given or self._bind_if_here(self._spec)
        if port is None:
            raise WrongState("no trainer is here that could take over a state")
        port.trainer.unpack(data)
        return port.trainer.digest()

    # ---- tasks

    def _bind_and_say(self, spec: rn.RunSpec) -> None:
        trainer, port = self.user_ns.get(spec.name), self.port
        is_other = port is not None and port.spec.run != spec.run
        if port is not None and is_other and (port.is_over or port.spec.cell is None):
            port.end(None)  # its end was lost with a supervisor: only one run is under way
            self.port, is_other = None, False
        kind, text = "NbdistError", ""
        if spec.name not in self.user_ns:
            text = (
                f"no variable {spec.name!r} on the engine; make the trainer in a %%distributed "
                "cell, or with cluster.run"
            )
        elif not is_trainer(trainer):
            text = f"{spec.name} is a {type(trainer).__name__}, not a nbdist.train.Trainer"
        elif is_other:
            kind, text = "WrongState", "another run goes on here"
        elif self.port is None:
            self._bind(spec, trainer)
        else:
            self.port.repeat()  # asked again by a supervisor that took over
        if text:
            fault = rn.RunFault(kind=kind, message=text)
            self.tell(
                rn.RunBound(slot=self.slot, pid=os.getpid(), run=spec.run, step=0, fault=fault)
            )

    def _bind_if_here(self, spec: rn.RunSpec | None) -> Port | None:
        """A newcomer's trainer, made by the replay or given whole."""
        trainer = self.user_ns.get(spec.name) if spec is not None else None
        if spec is None or spec.cell is not None or not is_trainer(trainer):
            return None
        return self._bind(spec, trainer)

    def _bind(self, spec: rn.RunSpec, trainer: Drivable) -> Port:
        self.port = Port(self, spec, trainer)
        self.port.say(
            rn.RunBound(
                slot=self.slot,
                pid=os.getpid(),
                run=spec.run,
                step=trainer.step,
                is_replicated=trainer.is_replicated,
                has_twin=trainer.has_twin,
                leaves_by=trainer.leaves_by,
            )
        )
        task = asyncio.get_event_loop().create_task(self._drive(self.port), name="nbdist-run")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self.port

    async def _drive(self, port: Port) -> None:
        try:
            await port.trainer.drive(port)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is reported
            log.info("the run's loop ended: %s: %s", type(error).__name__, error)
            port.raised(error)
            forget(error)
            if isinstance(error, OutOfMemory):
                give_back()


def _shared_step(trainer: Drivable) -> int | None:
    return trainer.step if trainer.is_replicated else None
