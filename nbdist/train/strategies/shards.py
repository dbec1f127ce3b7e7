"""The working half of sharding: a rank takes its share of each batch with all ranks' rows.

Runs in the engine's main thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from nbdist.train.strategies.base import Place, Summed
from nbdist.train.strategies.settling import Settling
from nbdist.train.strategies.slices import Slices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Turn


class Shards(Settling[Slices]):
    """Sums gradients over the ranks, each of which keeps its own rows of them."""

    pieces: ClassVar[str] = "rows"

    def _take(self, held: Slices) -> None:
        super()._take(held)
        self.place = Place(*held.portion)

    def _all_waited_ns(self) -> int:
        fsdp = self._held.fsdp
        return 0 if fsdp is None else fsdp.traffic.waited_ns

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        super().begin(rank, world_size, generation)
        self.place = Place(*self._portion)  # pieces are shared, and samples too
        fsdp = self._held.fsdp
        if fsdp is not None and self.fits(rank, world_size):
            fsdp.bind()
            fsdp.traffic.num_sums = 0

    def sum_places_(self, tensor: Tensor) -> None:
        """Every rank holds the whole model, as far as its batch is concerned."""
        self.sum_(tensor)

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote over all ranks; gradients are complete already."""
        tensor = torch.tensor(vote, dtype=torch.float64)
        self.sum_(tensor)
        return tensor.tolist()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all ranks' rows together."""
        own = nn.utils.get_total_norm(gradients)
        total = (own.double() ** 2).reshape(1).cpu()
        self.sum_(total)
        return total.sqrt()[0].to(own)

    # ---- a batch

    def train(self, batch: Any, turn: Turn) -> None:
        """Forward and backward of this rank's share."""
        turn.backward(turn.objective(turn.module, batch))

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,  # noqa: ARG002 - each batch's gradient is summed at once, and let go
        vote: Sequence[float] | None = None,  # noqa: ARG002 - it comes after the gradients
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add the gradients of all ranks."""
        began_ns = perf_counter_ns()
        loss.backward(torch.full_like(loss, weight))
        self._held.take_gradients()
        ready_ns = max(began_ns, perf_counter_ns() - self._take_waited_ns())
        if meanwhile is not None:
            meanwhile()
        return Summed(ready_ns, None)

    def predict(self, inputs: Any) -> Any:
        """What the model returns."""
        return self._held(inputs)

    def owned(self) -> list[object]:
        """The model as torch has cut it."""
        return [self._held.whole]
