"""Everything that one trainer consists of in one process: what its loop works on.

Runs in the engine's main thread; making one does no communication.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import WrongState
from nbdist.train.buffers import Buffers
from nbdist.train.evaluate import Evaluator
from nbdist.train.loading import Loader, Part, check_data
from nbdist.train.objective import Objective
from nbdist.train.randomness import Kept
from nbdist.train.sampling import Sampling, share
from nbdist.train.vote import FIRST_BUFFER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from nbdist.train.recipe import Recipe


MAX_LOGGED = 10_000
"""Numbers of one name that are kept."""


@dataclass
class _Walk:
    """The loop that trains, or did so last."""

    number: int = 0
    is_open: bool = False
    kept: Kept | None = None
    """Random numbers of the user's own code, while steps draw theirs."""


class State:
    """A trainer's parts, and how far it has come."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        data = check_data(recipe.data)
        self.sampling = Sampling(len(data), recipe.global_batch, seed=recipe.seed, tail=recipe.tail)
        self.loader = Loader(data, recipe.collate, num_workers=recipe.num_workers, seed=recipe.seed)
        self.objective = Objective(recipe.loss, recipe.forward, recipe.precision)
        self.equip(recipe.strategy.hold(recipe, self.loader.sample))
        self.exchange = recipe.strategy.exchange(
            self.module, recipe, num_votes=FIRST_BUFFER + len(self.buffers)
        )
        self.evaluator = _make_evaluator(recipe, self.objective)
        self._cut: tuple[tuple[int, ...], list[Part]] = (), []
        """The latest step's batches of this rank, and which step and rank that is."""
        self.registered: dict[str, Any] = {}
        self.step = 0
        """Committed steps."""
        self.num_skipped = 0
        """Of them, those whose loss or gradient was not finite: nothing was applied."""
        self.unit = 1.0
        """The count of a sample, as the last step had it: with it losses are scaled beforehand."""
        self.evaluated: tuple[int, int] | None = None
        """Committed steps before the last evaluation in this process, and the generation in which
        it was done. No part of what replicas share: it may break when some ranks have done it."""
        self.settled_in: int | None = None
        """The generation in which the ranks have seen last that what they hold fits together."""
        self.dealt: Literal["step", "stand"] | None = None
        """Where one rank deals the steps: this rank has one, which no other has; or has none, and
        all stand. None: all ranks train the same step."""
        self.is_called = False
        """With "stand": since somebody was told to."""
        self.attempt = 0
        """How often the present step has been broken."""
        self._walk = _Walk()
        self.is_warm = False
        """A step has been committed in this process."""
        self.compute_s = 0.0
        """This rank's own forward and backward in the last committed step, without sleep."""
        self.committed_at: float | None = None
        """When the last one was, by the monotonic clock."""
        self.logged: dict[str, deque[tuple[int, float]]] = {}
        """Name -> step and value, of what own loops have noted in this process."""
        self.is_in_step = False
        """The body of a step runs: the optimizer is not the user's to step."""

    def equip(self, module: nn.Module) -> None:
        """Hold this of the model; optimizer and scheduler are made for it."""
        self.module = module
        self._parameters = list(module.parameters())
        self.device = self._parameters[0].device
        self.optimizer = self.recipe.make_optimizer(module)
        self.optimizer.register_step_pre_hook(_refusing(weakref.ref(self)))
        self.scheduler = self.recipe.make_scheduler(self.optimizer)
        self.buffers = Buffers(module)

    # ---- the loop that works on it

    def begin_walk(self) -> int:
        """A loop begins; its number. One before it, that somebody still holds, is over."""
        self.end_walk()
        self._walk = _Walk(number=self._walk.number + 1, is_open=True)
        return self._walk.number

    def end_walk(self, number: int | None = None) -> None:
        """The loop (None: whichever it is) is over.

        An error's frames may hold it for as long as the user looks at them, so it is ended where it
        fails, and must not end another one when they let go.
        """
        if not self._walk.is_open or number not in (None, self._walk.number):
            return
        self._walk.is_open = False
        self.put_back()
        self.loader.forget()
        self.exchange.end()

    def keep(self) -> None:
        """Training goes on: what it disturbs is kept."""
        if self._walk.kept is None:
            self._walk.kept = Kept(self.device)
            self.buffers.keep_all()  # a cell may have changed them

    def put_back(self) -> None:
        """Training stands: the user's own code has its random numbers again."""
        if self._walk.kept is not None:
            self._walk.kept.put_back()
            self._walk.kept = None

    # ---- its parts

    def parts(self, step: int) -> list[Part]:
        """What this rank fetches for a step, a batch each.

        A rank whose share is empty takes the batch's first sample, which does not count.
        """
        key = (step, *self.exchange.place)
        if self._cut[0] != key:
            self._cut = key, self._cut_share(step)
        return self._cut[1]

    def _cut_share(self, step: int) -> list[Part]:
        batch = self.sampling.batch(step)
        mine = share(len(batch), *self.exchange.place)
        num = mine.stop - mine.start
        if num == 0:
            return [Part(step, len(batch), batch[:1])]
        num_parts = min(self.recipe.accumulate, num)
        if self.exchange.is_lockstep:  # as many as the rank with the smallest share can
            num_parts = min(num_parts, max(1, len(batch) // self.exchange.place.num_places))
        cuts = [share(num, i, num_parts) for i in range(num_parts)]
        own = batch[mine]
        return [Part(step, mine.start + cut.start, own[cut]) for cut in cuts]

    def gradients(self) -> list[Tensor]:
        """All that there are."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def with_gradient(self) -> list[Tensor]:
        """The parameters that have one."""
        return [p for p in self._parameters if p.grad is not None]

    def clear_gradients(self) -> None:
        """Forget them."""
        for parameter in self._parameters:
            parameter.grad = None

    def log(self, name: str, step: int, value: float) -> None:
        """Note a number."""
        self.logged.setdefault(name, deque(maxlen=MAX_LOGGED)).append((step, value))


def _refusing(state: weakref.ref[State]) -> Callable[..., None]:
    """What the optimizer calls before its step.

    It does not hold the state: what a trainer holds is let go with it, not when Python next looks
    for cycles.
    """

    def refuse(*_args: Any) -> None:
        its = state()
        if its is not None and its.is_in_step:
            raise WrongState(
                "optimizer.step() was called in the body of a step. The trainer steps the "
                "optimizer itself at the end of `with step:`, on all ranks or on none; leave it out"
            )

    return refuse


def _make_evaluator(recipe: Recipe, objective: Objective) -> Evaluator | None:
    if recipe.evaluate is None:
        return None
    return Evaluator(recipe.evaluate, objective, collate=recipe.collate, batch=recipe.global_batch)
