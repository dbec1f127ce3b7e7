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

_TOLERANCE = 1e-3
"""Gradients that are the same on all ranks differ by less than this part of their norm."""


class Unison(Settling[Panels]):
    """Goes through each batch together with the other ranks; what they sum is in the model."""

    pieces: ClassVar[str] = "panels"

    def _take(self, held: Panels) -> None:
        super()._take(held)
        self._is_checked = False
        """Gradients of what every rank has whole were seen to be the same on all of the group."""

    def _all_waited_ns(self) -> int:
        tensors = self._held.tensors
        return 0 if tensors is None else tensors.traffic.waited_ns

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        super().begin(rank, world_size, generation)
        if self._is_new:  # on all ranks, also on those that were not in the group before
            self._is_checked = False
        if self.fits(rank, world_size):
            self._held.bind()

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote; those that hold one model have the same loss, which counts once."""
        if self._portion.rank:
            vote[LOSS] *= 0.0  # what is not finite stays so
            vote[COUNT] *= 0.0
        return super().sum_vote(vote)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole model: panels of all ranks together; what each has whole counts once."""
        held, is_first = self._held, self._portion.rank == 0
        counted = [
            float(is_first or name in held.dims)
            for name, p in held.named_parameters()
            if p.grad is not None
        ]
        norms = torch.stack([gradient.norm() for gradient in gradients]).cpu().double()
        squares = norms**2 * torch.tensor(counted, dtype=torch.float64)
        self._axes.sum_parts_(squares)
        return squares.sum().sqrt().to(gradients[0])

    def _check(self) -> None:
        """See that ranks agree on the gradients of what each has whole.

        Raises:
            ValueError: they do not, so the plan lacks something; on all ranks alike.
        """
        rank, num_ranks = self._portion
        if num_ranks == 1 or self._is_checked:
            return
        own = {
            name: p.grad.norm()
            for name, p in self._held.named_parameters()
            if name not in self._held.dims and p.grad is not None
        }
        if own:
            table = torch.zeros(num_ranks, len(own), dtype=torch.float64)
            table[rank] = torch.stack(list(own.values())).cpu().double()
            self._axes.sum_parts_(table)
            least, most = table.amin(0), table.amax(0)
            differing = (most - least > _TOLERANCE * most).tolist()
            if names := [n for n, is_apart in zip(own, differing, strict=True) if is_apart]:
                raise ValueError(
                    f"the ranks come to different gradients of {', '.join(names[:4])}"
                    f"{' …' if len(names) > 4 else ''}, which each has whole: plan= must cut these "
                    "too, or lay them out (SequenceParallel), or leave whole what they are used "
                    "with. Also, data[i] must be the same on all ranks"
                )
        self._is_checked = True

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
        self._held.take_gradients()
        ready_ns = max(began_ns, perf_counter_ns() - self._take_waited_ns())
        if is_last:
            self._check()
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
