"""The working half of tensor parallelism: all ranks take the same samples, each with its panels.

Runs in the engine's main thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nbdist.train.strategies.base import Summed
from nbdist.train.strategies.panels import Panels
from nbdist.train.strategies.settling import Settling
from nbdist.train.vote import COUNT, LOSS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Turn


class Unison(Settling[Panels]):
    """Goes through each batch together with the other ranks; what they sum is in the model."""

    pieces: ClassVar[str] = "panels"

    def _all_waited_ns(self) -> int:
        return self._held.waited_ns

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        super().begin(rank, world_size, generation)
        if self.fits(rank, world_size):
            self._held.division.bind(is_new=self._is_new)

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote; those that hold one model have the same loss, which counts once."""
        if self._portion.rank:
            vote[LOSS] *= 0.0  # what is not finite stays so
            vote[COUNT] *= 0.0
        return super().sum_vote(vote)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole model: panels of all ranks together; what each has whole counts once."""
        held = self._held
        counted = [
            float(held.division.counts(name))
            for name, p in held.named_parameters()
            if p.grad is not None
        ]
        norms = torch.stack([gradient.norm() for gradient in gradients]).cpu().double()
        squares = norms**2 * torch.tensor(counted, dtype=torch.float64)
        self._axes.sum_parts_(squares)
        return squares.sum().sqrt().to(gradients[0])

    # ---- a batch

    def train(self, batch: Any, turn: Turn) -> None:
        """Forward and backward of the whole batch."""
        turn.backward(turn.objective(turn.module, batch))

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,  # noqa: ARG002 - it comes after the gradients
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add the gradients of this rank's pieces."""
        began_ns = perf_counter_ns()
        loss.backward(torch.full_like(loss, weight))
        self._held.division.take_gradients()
        ready_ns = max(began_ns, perf_counter_ns() - self._take_waited_ns())
        if is_last:
            order = {name: i for i, (name, _) in enumerate(self._held.named_parameters())}
            self._held.division.check(order, self._axes.sum_parts_)
        if meanwhile is not None:
            meanwhile()
        return Summed(ready_ns, None)

    def predict(self, inputs: Any) -> Any:
        """What the model returns, on the first rank; on the others it would count again."""
        output = self._held(inputs)
        return None if self._portion.rank else output

    def owned(self) -> list[object]:
        """The model as torch has cut it."""
        return [self._held.whole]
