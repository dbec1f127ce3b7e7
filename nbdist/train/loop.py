"""The loop that every training goes through: tasks, own loops in cells, and `fit`.

Runs in the engine's main thread. It stands where the port says so, and yields a step where it goes;
a step that was broken is yielded again once the port says to go on.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from nbdist.engine import emit
from nbdist.errors import WrongState, forget
from nbdist.protocol.story import Evaluation
from nbdist.protocol.telemetry import Kind
from nbdist.train import snapshot
from nbdist.train.agreement import Lookout
from nbdist.train.desk import Desk
from nbdist.train.memory import explained
from nbdist.train.randomness import seed_all, seed_of
from nbdist.train.rates import set_base_rate
from nbdist.train.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.train.ports import RunPort
    from nbdist.train.state import State

GIVE_WAY_S = 0.01
"""For so long at most, or for one step, the event loop waits. A turn of it costs a quick step some
percent of its time."""


LOOK_AGAIN_S = 0.02
"""Between two looks whether a group has come in which the trainer can train."""


class Aside(NamedTuple):
    """The present group is too small: look again soon whether there is another."""


def walk(state: State, port: RunPort) -> Iterator[Step | Aside | None]:
    """Steps, one after the other; None: stand, and wait for an order."""
    number = state.begin_walk()
    emit.begin_sent()
    patience, lookout = _Patience(), Lookout()
    try:
        while not port.is_over:
            if port.go_until is None:
                state.put_back()
                yield None
                continue
            state.keep()
            _apply_settings(state, port)
            if patience.lasts(state, port):
                if _may_wait(state, port):
                    yield Aside()
                continue
            if not _is_ready(state, port, lookout):
                continue
            if state.step >= port.go_until or state.is_called:
                state.is_called = False
                port.hold(state.step)
                continue
            if state.dealt == "stand":
                continue
            port.begin_step(state.step, patient=not state.is_warm)
            step = Step(state, port)
            yield step
            if not step.is_over:
                raise WrongState(
                    f"{step!r} was not run: the loop's body is `with step:` and what belongs to it"
                )
            if step.is_held and not (_is_due(state, port) and state.step == port.go_until):
                port.hold(state.step)
    finally:
        state.end_walk(number)


def own(state: State, port: RunPort) -> Iterator[Step]:
    """The steps of a loop that the user writes."""
    for step in _polled(state, port):
        if step is None:
            port.wait()
        elif isinstance(step, Aside):
            time.sleep(LOOK_AGAIN_S)
        else:
            yield step
    if port.fault is not None:
        raise port.fault


def train(step: Step) -> None:
    """The body of a step where the user has written none."""
    step.vote_early()
    with step:
        for batch in step.batches():
            step.train(batch)


async def drive(state: State, port: RunPort) -> None:
    """Train as a task of an event loop, giving way between steps."""
    snapshot.check(state)
    gave_way_at = 0.0
    for step in walk(state, port):
        if step is None:
            await port.wait_async()
            continue
        if isinstance(step, Aside):
            await asyncio.sleep(LOOK_AGAIN_S)
            continue
        train(step)
        if time.monotonic() >= gave_way_at + GIVE_WAY_S:
            await asyncio.sleep(0)
            gave_way_at = time.monotonic()


class _Patience:
    """Waits for the next group where what is held does not fit the present one.

    A seat that is being filled again leaves the others in a group of their own until then.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, state: State, port: RunPort) -> bool:
        """Whether to wait; False: train in this group, for which there may be much to do first."""
        if state.exchange.fits(port.rank, port.world_size) or not port.others_come:
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since <= port.patience_s


def _may_wait(state: State, port: RunPort) -> bool:
    """Wait; False: somebody wants all to stand meanwhile."""
    state.put_back()
    if port.wants_hold:
        port.hold(state.step)
    return not port.wants_hold and port.go_until is not None


def _polled(state: State, port: RunPort) -> Iterator[Step | Aside | None]:
    """Steps, with a look at new orders before each; says where the loop is left early."""
    try:
        for step in walk(state, port):
            yield step
            port.poll()
    finally:
        if not port.is_over:
            port.left(state.step)


def _apply_settings(state: State, port: RunPort) -> None:
    while port.settings:
        for name, value in port.settings.pop(0).items():
            if name != "lr":
                raise ValueError(f"setting {name!r} is unknown; there is lr")
            set_base_rate(state.optimizer, state.scheduler, value)


def _is_due(state: State, port: RunPort) -> bool:
    """Whether an evaluation belongs to this boundary.

    One that was done in an earlier group is due again: it may have been done on some ranks only,
    and a rank that has joined has not done it.
    """
    evaluator = state.evaluator
    return (
        evaluator is not None
        and state.dealt != "step"
        and state.step > 0
        and state.step % evaluator.every == 0
        and state.evaluated != (state.step, port.generation)
    )


def _is_ready(state: State, port: RunPort, lookout: Lookout) -> bool:
    """Do what comes before a step; False where the group broke in it."""
    emit.begin_step(state.step, port.generation, attempt=state.attempt)
    try:
        state.exchange.begin(port.rank, port.world_size, port.generation)
        if state.step == 0 or state.settled_in != port.generation:
            port.begin_step(state.step, patient=True)
        if state.exchange.settle(Desk(state, port)):
            state.buffers.keep_all()
        state.settled_in = port.generation
        lookout.look(state, port)
        if _is_due(state, port):
            port.begin_step(state.step, patient=True)
            _evaluate(state, port)
    except BaseException as error:  # noqa: BLE001 - it is raised again, or what it became
        if not port.broken(state.step, error):
            said = explained(error, state.recipe.strategy, state.module)
            port.raised(said)
            try:
                raise said
            finally:
                del said  # or its frames hold it, and what they hold lives with them
        forget(error)
        return False
    return True


def _evaluate(state: State, port: RunPort) -> None:
    assert state.evaluator is not None
    exchange, began_ns = state.exchange, time.perf_counter_ns()
    seed_all(seed_of(state.recipe.seed, state.step, exchange.place.at, 2), state.device)
    metrics = state.evaluator.run(state.module, state.device, exchange)
    emit.span(Kind.EVALUATE, began_ns, time.perf_counter_ns())
    state.evaluated = state.step, port.generation
    port.evaluated(Evaluation(step=state.step, at=time.monotonic(), metrics=metrics))
