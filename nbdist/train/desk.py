"""What an exchange may do to its rank's state, where one rank deals the steps and applies them.

Runs in the engine's main thread.
"""

from __future__ import annotations

import math
import time
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
from nbdist.train import snapshot
from nbdist.train.rates import present_rate, step_scheduler

if TYPE_CHECKING:
    from nbdist.train.ports import RunPort
    from nbdist.train.state import State
    from nbdist.train.strategies.base import Update


class Desk(snapshot.Whole):
    """A state, and the run that it is trained in."""

    def __init__(self, state: State, port: RunPort) -> None:
        super().__init__(state)
        self._port, self._began_at = port, time.monotonic()

    @property
    def wants_hold(self) -> bool:
        """This rank was told to have all stand."""
        return self._port.wants_hold

    def limit(self, low: int) -> int:
        """Up to the run's end, or the next evaluation, with which nothing else is under way."""
        state, until = self._state, self._port.go_until
        end = low if until is None else until
        if state.evaluator is None:
            return end
        every = state.evaluator.every
        is_due = low > 0 and low % every == 0
        if is_due and state.evaluated != (low, self._port.generation):
            return low
        return min(end, (low // every + 1) * every)

    def go_to(self, step: int) -> None:
        """Train this step next, which no other rank trains."""
        state = self._state
        if state.step != step:
            state.step, state.attempt = step, 0
        state.dealt, state.is_called = "step", False

    def stand(self, step: int, *, is_called: bool) -> None:
        """All ranks stand with so many steps."""
        self.go_to(step)
        self._state.dealt, self._state.is_called = "stand", is_called

    @torch.no_grad()
    def apply(self, update: Update) -> tuple[Any, ...]:
        """Apply what a worker has come to; the row that is to be reported of it."""
        state, port, began_ns = self._state, self._port, perf_counter_ns()
        emit.begin_step(update.number, port.generation, attempt=0)
        loss = update.loss_sum / update.weight if update.weight > 0 else math.nan
        rate = present_rate(state.optimizer) * update.rate_factor
        is_applied = update.is_applied and math.isfinite(loss)
        if is_applied:
            is_applied = self._step(update)
        if is_applied:
            for buffer, value in zip(state.module.buffers(), update.buffers, strict=True):
                if value is not None:
                    buffer.copy_(value)
            state.buffers.keep_all()
        else:
            state.num_skipped += 1
        step_scheduler(state.scheduler, is_applied=is_applied)
        state.clear_gradients()
        now = time.monotonic()
        before = self._began_at if state.committed_at is None else state.committed_at
        state.committed_at, state.is_warm = now, True
        num = len(state.sampling.batch(update.number))
        emit.span(Kind.OPTIMIZER, began_ns, perf_counter_ns())
        emit.tell_sent()
        row = (update.number, loss, num, now - before, port.generation)
        return (*row, port.world_size, rate, now)

    def _step(self, update: Update) -> bool:
        """Have the optimizer make its step, unless the gradient is not finite."""
        state = self._state
        for parameter, gradient in zip(state.module.parameters(), update.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        if state.recipe.clip_norm is not None:
            norm = state.exchange.norm(state.gradients())
            if not math.isfinite(norm.item()):
                return False
            torch.nn.utils.clip_grads_with_norm_(
                state.with_gradient(), state.recipe.clip_norm, norm
            )
        groups = state.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if update.rate_factor != 1:
            for group in groups:
                group["lr"] = group["lr"] * update.rate_factor
        state.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return True

    def report(self, row: tuple[Any, ...]) -> None:
        """The step is committed."""
        self._port.committed(row)

    def drop_moments(self) -> None:
        """Another rank's optimizer is used, not this one's."""
        self._state.optimizer.state.clear()

    @property
    def num_skipped(self) -> int:
        """Committed steps in which nothing was applied."""
        return self._state.num_skipped

    @num_skipped.setter
    def num_skipped(self, value: int) -> None:
        self._state.num_skipped = value
