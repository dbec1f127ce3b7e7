"""A batch on its way through the stages of one rank: what they share, and what they tell.

Runs in the engine's main thread.
"""

from __future__ import annotations

import contextlib
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

from nbdist.engine import emit
from nbdist.protocol.plans import packed
from nbdist.protocol.telemetry import Kind
from nbdist.train.randomness import seed_all, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from nbdist.protocol.plans import Action


class Passage:
    """What the stages of one rank share while a batch goes through them."""

    def __init__(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.autocast = autocast
        """The context in which the model computes."""
        self.key: tuple[int, ...] = ()
        """From which, with block and micro-batch, the random numbers of a forward pass follow."""
        self.first = 0
        """The number of the first micro-batch, of all that go through the model's twins."""
        self._forward: tuple[int, torch.device] | None = None
        """The micro-batch that goes forward now, and on which device."""
        self.slow_factor = 1.0
        """What is computed is to take so many times as long."""
        self.compute_ns = 0
        """Computed so far, without sleep."""
        self.ready_ns = 0
        """When the last of it was done."""
        self.is_silent = False
        """Tell nothing: it is no training."""
        self.is_trial = False
        """torch tries the stages out, on inputs without meaning, to learn the shapes."""

    def begin(self, key: tuple[int, ...], slow_factor: float) -> None:
        """A batch begins to go through."""
        self.key, self.slow_factor, self.compute_ns = key, slow_factor, 0
        self.ready_ns = perf_counter_ns()

    def go_forward(self, microbatch: int, device: torch.device) -> None:
        """A micro-batch is about to go forward through a stage."""
        self._forward = microbatch, device

    def come_to(self, block: int) -> None:
        """To a block, whose random numbers depend neither on the schedule nor on the cut."""
        if self._forward is not None:
            microbatch, device = self._forward
            seed_all(seed_of(*self.key, block, self.first + microbatch), device)

    @contextlib.contextmanager
    def computes(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """A stage computes."""
        began_ns = perf_counter_ns()
        try:
            yield
        except RuntimeError as error:
            # torch wraps what a stage raises, and shows its inputs; the user's own error says more.
            raise error.__cause__ or error from None
        took_ns = perf_counter_ns() - began_ns
        self.compute_ns += took_ns
        if self.slow_factor > 1:
            sleep((self.slow_factor - 1) * took_ns * 1e-9)
        self.ready_ns = perf_counter_ns()
        if not self.is_silent:
            ident = self.first + microbatch
            emit.span(kind, began_ns, self.ready_ns, ident=ident, value=stage)

    def tell_plan(self, actions: Iterable[Action], num_stages: int) -> None:
        """What this rank is to compute, in its order."""
        now_ns = perf_counter_ns()
        for place, action in enumerate(actions):
            value = packed(action._replace(microbatch=self.first + action.microbatch), num_stages)
            emit.span(Kind.PLANNED, now_ns, now_ns, ident=place, value=value)

    def tell(self, kind: Kind, microbatch: int, ops: Sequence[Any]) -> None:
        """A stage sends, or is ready to receive."""
        if ops and not self.is_silent:
            now_ns = perf_counter_ns()
            num_bytes = sum(op.tensor.nbytes for op in ops)
            emit.span(kind, now_ns, now_ns, ident=self.first + microbatch, value=num_bytes)
            if kind is Kind.SEND:
                emit.sent(num_bytes)
