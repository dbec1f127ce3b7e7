"""The working half of sharding: a rank takes its share of each batch with all ranks' rows.

Runs in the engine's main thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbdist.errors import RecoveryFailed
from nbdist.train.strategies.base import Place, Summed
from nbdist.train.strategies.copies import Copies, common_step
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Keeper, Turn
    from nbdist.train.strategies.slices import Slices


class Shards:
    """Sums gradients over the ranks, each of which keeps its own rows of them."""

    is_lockstep = True
    """A block's rows come from all ranks in each pass."""

    def __init__(self, slices: Slices, *, copy_every: int) -> None:
        self.place = Place(*slices.portion)
        """Of all ranks, each takes a share of the batch."""
        self._slices, self._portion = slices, slices.portion
        self._generation: int | None = None
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._copy_every = copy_every
        self._copies = Copies(*slices.portion)
        self._waited_ns = 0
        """In collectives, until the present batch began."""

    # ---- the group

    def fits(self, rank: int, world_size: int) -> bool:
        """The rows are those of this rank, of so many."""
        return (rank, world_size) == self._portion

    def misfit(self, rank: int, world_size: int) -> str:
        """They are another rank's."""
        own, num_ranks = self._portion
        return (
            f"the model was cut for {num_ranks} ranks, and this one has the rows of rank {own}; "
            f"the group has {world_size} ranks now, and this is rank {rank}"
        )

    def begin(self, rank: int, world_size: int, generation: int) -> None:  # noqa: ARG002 - it fits
        """An attempt begins: in the present group, with nothing left of the one before."""
        if generation != self._generation:
            self._generation, self._is_new = generation, True
        fsdp = self._slices.fsdp
        if fsdp is not None:
            fsdp.bind()
            fsdp.traffic.num_sums, self._waited_ns = 0, fsdp.traffic.waited_ns

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """See that all ranks hold the same step; before the first, take a module's weights.

        In a new group all may have to go back to their copies. In any group these are renewed every
        so many steps.
        """
        if self._portion.num_ranks == 1:
            return False
        is_new = self._is_new
        has_changed = is_new and self._settle_in(keeper)
        self._is_new = False
        if keeper.step == 0:
            has_changed = self._take_from_first() or has_changed
        else:
            self._slices.source = []
        is_due = bool(self._copy_every) and keeper.step % self._copy_every == 0
        if self._copy_every and (is_new or (is_due and not self._copies.has(keeper.step))):
            self._copies.renew(keeper)
        return has_changed

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether all had to go back."""
        stands = self._copies.gather(keeper.step)
        steps = [stand.step for stand in stands]
        if len(set(steps)) == 1:
            return False
        step = common_step(stands)
        if step is None:
            raise RecoveryFailed(_lost(steps, self._copy_every))
        self._copies.go_back(stands, step, keeper)
        return True

    def _take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        rows = dict(self._slices.named_parameters())
        for name, whole in self._slices.source:
            take_from_first(whole)
            rows[name].copy_(whole[self._portion.rows(len(whole))])
        for buffer in self._slices.buffers() if self._slices.source else ():
            take_from_first(buffer)
        return bool(self._slices.source)

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self._portion.num_ranks > 1:
            sum_on_backend(tensor)

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
        self._slices.take_gradients()
        ready_ns = max(began_ns, perf_counter_ns() - self._take_waited_ns())
        if meanwhile is not None:
            meanwhile()
        return Summed(ready_ns, None)

    def _take_waited_ns(self) -> int:
        """How long the present batch has waited for others, so that it is not taken for work."""
        fsdp = self._slices.fsdp
        if fsdp is None:
            return 0
        before, self._waited_ns = self._waited_ns, fsdp.traffic.waited_ns
        return self._waited_ns - before

    def predict(self, inputs: Any) -> Any:
        """What the model returns."""
        return self._slices(inputs)

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """Gradients are summed as they are: nothing is left for later steps."""

    def forget(self) -> None:
        """Nothing is kept of earlier steps but whole copies, which are right for theirs."""

    def owned(self) -> list[object]:
        """The model as torch has cut it."""
        return [self._slices.whole]

    def end(self) -> None:
        """What a step that failed has left is let go when the next begins."""


def _lost(steps: list[int], copy_every: int) -> str:
    newest = max(steps)
    behind = [rank for rank, step in enumerate(steps) if step != newest]
    why = (
        "no step is left of which all ranks' rows are somewhere: neighbours were lost together"
        if copy_every
        else "nobody keeps copies, since copy_every is 0"
    )
    return (
        f"the rows of rank{'s' if len(behind) > 1 else ''} {', '.join(map(str, behind))} were lost "
        f"with the weights of step {newest}: of the present group they stand at step {min(steps)}, "
        f"and {why}. Make the trainer anew and train from the beginning"
    )
