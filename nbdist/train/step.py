"""One attempt at one step: its batches, its backward passes, its vote and its commit.

Runs in the engine's main thread. `with step:` ends in the vote, a small sum over all ranks after
the gradients, or with them where the body is the trainer's own; whoever has both applies the step.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch

from nbdist.errors import WrongState, forget
from nbdist.train.loading import to_device
from nbdist.train.memory import explained
from nbdist.train.objective import weigh
from nbdist.train.randomness import seed_all, seed_of
from nbdist.train.rates import present_rate, step_scheduler
from nbdist.train.stamps import Stamps
from nbdist.train.vote import COUNT, FIRST_BUFFER, HOLD, LOSS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import nn

    from nbdist.train.objective import Objective
    from nbdist.train.ports import RunPort
    from nbdist.train.state import State

NAP_S = 0.02
"""A rank that was made slow looks so often whether it still is."""
_FULL = (torch.float32, torch.float64)


class Step:
    """A step as a loop's body has it.

    Attributes:
        number: committed steps before it.
        attempt: how often it has been broken before.
        generation: of the group that it runs in.
        epoch: that its samples belong to.
        indices: samples of this rank.
    """

    def __init__(self, state: State, port: RunPort) -> None:
        self.number, self.attempt = state.step, state.attempt
        self.generation = port.generation
        self.epoch = state.sampling.epoch(self.number)
        self._state, self._port = state, port
        self._began_at = time.monotonic()
        parts = state.parts(self.number)
        self._num_global = len(state.sampling.batch(self.number))
        self._is_empty = parts[0].first >= self._num_global
        self._num_parts = len(parts)
        self._first = parts[0].first
        pieces = [part.indices for part in parts]
        if self._is_empty:
            pieces = [pieces[0][:0]]
        self.indices: NDArray[np.int64] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        self._num_begun = self._num_done = 0
        """Batches given out; those of them that have gone backward."""
        self._samples = 0.0
        """In the present batch."""
        self._loss = self._count = 0.0
        self._votes_early = False
        self._result: list[float] | None = None
        """The vote of all ranks, once it is there."""
        self._is_finite = True
        """Whether the gradient of all ranks is, as far as the exchange has looked."""
        self._phase = "new"
        self._autocast = state.objective.autocast(state.device)
        self.is_held = False
        """The vote said that all stand after this step."""

    def __repr__(self) -> str:
        return f"<step {self.number}, attempt {self.attempt}, generation {self.generation}>"

    def __reduce__(self) -> NoReturn:
        """A step stays in its process, with the model and the data that hang on it."""
        raise TypeError("a step cannot be sent: it belongs to the loop that yielded it")

    def vote_early(self) -> None:
        """Before the body: nothing in it can fail after its last backward pass.

        The vote then goes along with the gradients. It must not in a body of the user's: one rank's
        error would come too late for the others, who had committed.
        """
        self._votes_early = True

    # ---- what the body calls

    def batches(self) -> Iterator[Any]:
        """This rank's share, in as many batches as `accumulate` says."""
        self._check_phase()
        if self._num_begun:
            raise WrongState("step.batches() was called before in this step; go through it once")
        state = self._state
        self._stamps.next_part()
        for part, batch in state.loader.batches(self.number, state.parts):
            if self._num_done < self._num_begun:
                raise WrongState(_NOT_BACKWARD)
            self._stamps.data()
            self._num_begun += 1
            self._samples = float(len(part.indices))
            yield batch if state.device.type == "cpu" else to_device(batch, state.device)
            self._stamps.next_part()
        if self._num_done < self._num_begun:
            raise WrongState(_NOT_BACKWARD)

    def backward(self, loss: Any, count: float | torch.Tensor | None = None) -> None:
        """Go backward from the loss of the present batch; once for each batch.

        Args:
            loss: the mean over `count` samples, or `(sum, count)`.
            count: how many samples, tokens … the mean is over; the batch's samples where None.
                0: the batch does not count, and its loss is not looked at.
        """
        self._check_phase()
        if self._num_begun == 0:
            raise WrongState(
                "step.backward() was called outside `for batch in step.batches()`: it belongs to "
                "one batch"
            )
        if self._num_done == self._num_begun:
            raise WrongState(
                "step.backward() was called twice for one batch; add the losses, and call it once"
            )
        value, weight = self._count_in(loss, self._samples if count is None else float(count))
        is_last = self._num_begun == self._num_parts
        vote = self._vote() if is_last and self._votes_early else None
        if is_last and self._port.slow_factor > 1:
            self._lag()
        self._stamps.forward()
        with self._state.objective.autocast(self._state.device, is_suspended=True):
            ready_ns, self._result, self._is_finite = self._state.exchange.backward(
                value, weight, is_last=is_last, vote=vote, meanwhile=self._look_ahead
            )
        self._stamps.backward(ready_ns)
        if self._result is not None:
            self._stamps.vote()
        self._num_done += 1

    def train(self, batch: Any) -> None:
        """Forward and backward of a batch, as the strategy does it; in place of `backward`."""
        self._check_phase()
        self._state.exchange.train(batch, self)

    # ---- what an exchange calls, as `strategies.base.Turn`

    @property
    def objective(self) -> Objective:
        """The trainer's loss."""
        return self._state.objective

    @property
    def module(self) -> nn.Module:
        """What this rank holds of the model."""
        return self._state.module

    @property
    def slow_factor(self) -> float:
        """The user has made this rank so many times as slow."""
        return self._port.slow_factor

    def weigh(self, loss: Any, count: float) -> torch.Tensor:
        """Count the loss of a part of the batch in; what to go backward from."""
        value, weight = self._count_in(loss, count)
        return value * weight

    def went_back(self, ready_ns: int, compute_ns: int) -> None:
        """All gradients of the batch are there."""
        self._stamps.computed(ready_ns, compute_ns)
        self._num_done += 1

    def _count_in(self, loss: Any, count: float) -> tuple[torch.Tensor, float]:
        weighed = weigh(loss, count, "loss")
        if not weighed.value.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters: it was detached, computed "
                "under torch.no_grad(), or of something else than trainer.model gave"
            )
        weight = 0.0 if self._is_empty else 1.0  # times NaN it is NaN, and all ranks skip
        self._loss += weighed.value.item() * weighed.factor * weight
        self._count += weighed.weight * weight
        weight *= weighed.factor / (self._num_global * self._state.unit)
        value = weighed.value if weighed.value.dtype in _FULL else weighed.value.float()
        return value, weight

    # ---- what the body calls besides

    def generator(self, index: int) -> torch.Generator:
        """Random numbers for one sample in this step: the same on whichever rank it is."""
        key = seed_of(self._state.recipe.seed, self.number, int(index), 1)
        return torch.Generator(self._state.device).manual_seed(key)

    def log(self, **scalars: float) -> None:
        """Note numbers of this rank; `trainer.logged` has the latest of each name."""
        for name, value in scalars.items():
            self._state.log(name, self.number, float(value))

    # ---- from the first line to the commit

    def __enter__(self) -> Self:
        if self._phase != "new":
            raise WrongState("a step runs once; the loop yields the next one")
        self._phase = "body"
        self._stamps = Stamps()
        state = self._state
        state.clear_gradients()
        seed_all(seed_of(state.recipe.seed, self.number, self._first), state.device)
        state.is_in_step = True
        self._autocast.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._state.is_in_step = False
        self._autocast.__exit__(kind, error, trace)
        if error is not None:
            return self._fail(error)
        try:
            self._commit()
        except BaseException as broken:
            if not self._fail(broken):
                raise
        return True

    @property
    def is_over(self) -> bool:
        """It was committed, or has failed."""
        return self._phase == "over"

    def _fail(self, error: BaseException) -> bool:
        """Undo what the attempt did; whether it is to be repeated."""
        state = self._state
        self._phase = "over"
        self._stamps.broken()
        state.loader.forget()
        state.clear_gradients()
        state.buffers.put_back()
        if not self._port.broken(self.number, error):
            said = explained(error, state.recipe.strategy, state.module)
            self._port.raised(said)
            state.end_walk()
            if said is error:
                return False
            try:
                raise said
            finally:
                del said, error  # or its frames hold it, and what they hold lives with them
        state.attempt += 1
        forget(error)
        return True

    def _commit(self) -> None:
        """Vote, then apply."""
        self._check_done()
        state, exchange = self._state, self._state.exchange
        result = self._result
        self._stamps.next_part()
        if result is None:
            result = exchange.sum_vote(self._vote())
            self._stamps.vote()
        changed = result[FIRST_BUFFER:]
        loss = result[LOSS] / result[COUNT] if result[COUNT] > 0 else math.nan
        is_applied = math.isfinite(loss)
        if is_applied and any(changed):
            weight = len(self.indices) / self._num_global
            rank = exchange.place.at
            state.buffers.settle(changed, exchange.sum_places_, weight=weight, rank=rank)
        rate, unit = present_rate(state.optimizer), state.unit
        if is_applied:
            is_applied = self._apply(result[COUNT])
        exchange.commit(is_applied=is_applied, factor=unit / state.unit)
        if is_applied:
            state.buffers.keep(changed)
        else:
            state.buffers.put_back()
            state.num_skipped += 1
        if exchange.has_optimizer:
            step_scheduler(state.scheduler, is_applied=is_applied)
        self._stamps.update()
        self._phase = "over"
        self.is_held = result[HOLD] > 0
        self._note_commit(loss, rate)

    def _lag(self) -> None:
        """Be slow, as the user wants it: the common sums begin with the last backward pass."""
        began_at, port, compute_s = time.monotonic(), self._port, self._state.compute_s
        # In short naps: the user may set another factor meanwhile, or the group may break.
        while (left_s := (port.slow_factor - 1) * compute_s - time.monotonic() + began_at) > 0:
            time.sleep(min(left_s, NAP_S))
        self._stamps.slept(time.monotonic() - began_at)

    def _look_ahead(self) -> None:
        """The next step's first batch, while this one's gradients are on their way."""
        state = self._state
        state.loader.prepare(state.parts(self.number + 1)[0])

    def _vote(self) -> list[float]:
        """What this rank says."""
        hold = float(self._port.wants_hold)
        return [self._loss, self._count, hold, *self._state.buffers.changed()]

    def _apply(self, count: float) -> bool:
        """Update the parameters, unless the gradient is not finite."""
        state = self._state
        gradients = state.gradients()
        if not gradients:
            raise WrongState(
                "the gradients are gone: zero_grad() was called in the body of a step. The "
                "trainer clears them itself; leave it out"
            )
        unit = count / self._num_global
        if unit != state.unit:
            torch._foreach_mul_(gradients, state.unit / unit)
            state.unit = unit  # for the next step, also where this one is skipped
        if not self._is_finite:
            return False
        if not state.exchange.has_optimizer:
            return True
        if state.recipe.clip_norm is not None:
            norm = state.exchange.norm(gradients)
            self._stamps.norm(norm.item())
            if not math.isfinite(norm.item()):
                return False
            torch.nn.utils.clip_grads_with_norm_(
                self._state.with_gradient(), state.recipe.clip_norm, norm
            )
        state.optimizer.step()
        return True

    def _note_commit(self, loss: float, rate: float) -> None:
        """The step is committed."""
        state, port, now = self._state, self._port, time.monotonic()
        before = self._began_at if state.committed_at is None else state.committed_at
        state.committed_at, state.is_warm = now, True
        state.compute_s = self._stamps.own_compute_s
        state.step, state.attempt = self.number + 1, 0
        mine = self._loss / self._count if self._count else math.nan
        self._stamps.committed(len(self.indices), mine)
        if state.exchange.has_optimizer:
            row = (self.number, loss, self._num_global, now - before, self.generation)
            port.committed((*row, port.world_size, rate, now))

    # ---- misuse

    def _check_phase(self) -> None:
        if self._phase != "body":
            raise WrongState(
                f"step {self.number} is not going on; batches() and backward() belong inside "
                "`with step:`"
            )

    def _check_done(self) -> None:
        if self._num_begun == 0:
            raise WrongState(
                "the body of the step did not train: go through `for batch in step.batches()` and "
                "call step.backward(loss, count=…) for each batch"
            )
        if self._num_done < self._num_begun:
            raise WrongState(_NOT_BACKWARD)
        if self._num_done < self._num_parts:
            raise WrongState(
                f"step.batches() was left after {self._num_done} of {self._num_parts} batches; "
                "go through all of them. A batch that is not to count: "
                "step.backward(loss, count=0)"
            )


_NOT_BACKWARD = (
    "step.backward(loss) was not called for a batch. It takes the place of loss.backward(), and "
    "every rank calls it for each of its batches; for one that is not to count: "
    "step.backward(loss, count=0)"
)
