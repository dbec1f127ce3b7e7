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
from nbdist.train.strategies.copies import Copies, Spread, Stand, are_together, newest
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.train.strategies.base import Keeper, Turn
    from nbdist.train.strategies.slices import Slices


_NO_GROUP = 0, 1, -1


class Shards:
    """Sums gradients over the ranks, each of which keeps its own rows of them."""

    is_lockstep = True
    num_lost = 0
    """A block's rows come from all ranks in each pass."""

    def __init__(self, slices: Slices, *, copy_every: int) -> None:
        self._take(slices)
        self._group = _NO_GROUP
        """Own rank, size and generation of the present group."""
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._copy_every = copy_every
        self._copies = Copies()
        self._waited_ns = 0
        """In collectives, until the present batch began."""

    def _take(self, slices: Slices) -> None:
        """This is what the rank holds."""
        self._slices, self._portion = slices, slices.portion
        self.place = Place(*slices.portion)

    # ---- the group

    def fits(self, rank: int, world_size: int) -> bool:
        """The rows are those of this rank, of so many."""
        return (rank, world_size) == self._portion

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        group = rank, world_size, generation
        if group != self._group:
            self._group, self._is_new = group, True
        fsdp = self._slices.fsdp
        if fsdp is not None and self.fits(rank, world_size):
            fsdp.bind()
            fsdp.traffic.num_sums, self._waited_ns = 0, fsdp.traffic.waited_ns

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """See that all ranks hold the same step; before the first, take a module's weights.

        In a new group all may have to go back to their copies, and to cut the model anew where it
        has another size. In any group copies are renewed every so many steps.
        """
        is_new = self._is_new
        has_changed = is_new and self._settle_in(keeper)
        self._is_new = False
        if self._portion.num_ranks == 1:
            return has_changed
        if keeper.step == 0:
            has_changed = self._take_from_first() or has_changed
        else:
            self._slices.source = []
        now = self._now(keeper)
        is_due = bool(self._copy_every) and keeper.step % self._copy_every == 0
        if self._copy_every and (is_new or (is_due and not self._copies.has(now))):
            self._copies.renew(now, self._portion.rank, keeper)
        return has_changed

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether what this rank holds has changed."""
        rank, num_ranks, _ = self._group
        if num_ranks == self._portion.num_ranks == 1:
            return False
        now = self._now(keeper)
        if not self.fits(rank, num_ranks) and keeper.step:
            self._copies.keep(now, self._portion.rank, keeper)  # all may be here still
        stands = self._copies.gather(now, self._portion.rank, rank, num_ranks)
        if are_together(stands):
            return False
        self._come_together(stands, keeper)
        return True

    def _now(self, keeper: Keeper) -> Spread:
        num_ranks = self._portion.num_ranks
        return Spread(keeper.step, num_ranks, num_ranks)

    def _come_together(self, stands: Sequence[Stand], keeper: Keeper) -> None:
        """All hold the rows that they should in this group, of the same step."""
        rank, num_ranks, _ = self._group
        spread = newest(stands)
        if spread is None and any(stand.now.step for stand in stands):
            raise RecoveryFailed(_lost(stands, self._copy_every))
        is_same = spread is not None and spread.num_ranks == num_ranks
        slices = self._slices if self.fits(rank, num_ranks) else self._cut_anew(num_ranks)
        copies: Iterable[bytes] = ()
        if spread is not None:
            copies = self._copies.fetch(stands, spread, rank, is_same=is_same)
        if is_same and slices is self._slices:
            (own,) = copies
            keeper.take_back(own)
        elif spread is not None or slices is not self._slices:
            keeper.move(slices, copies)
        self._take(slices)
        self._copies.drop_after(keeper.step)

    def _cut_anew(self, num_ranks: int) -> Slices:
        try:
            return self._slices.again()
        except ValueError as error:
            raise RecoveryFailed(
                f"the model cannot be cut anew for the {num_ranks} ranks that the group has now: "
                f"{error}. Make the trainer anew"
            ) from error

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

    def restart(self) -> None:
        """Copies of a training that is given up are of no use; new ones are made at once."""
        self._copies = Copies()

    def owned(self) -> list[object]:
        """The model as torch has cut it."""
        return [self._slices.whole]

    def end(self) -> None:
        """The next run may be in another group: all ranks begin it anew."""
        self._group = _NO_GROUP


def _lost(stands: Sequence[Stand], copy_every: int) -> str:
    """Why nothing is left to go on with."""
    last = max(stand.now for stand in stands)
    there = {stand.rank for stand in stands if stand.now == last}
    ranks = [rank for rank in range(last.num_ranks) if rank not in there]
    why = (
        "no step is left of which all ranks' rows are somewhere: neighbours were lost together"
        if copy_every
        else "nobody keeps copies, since copy_every is 0"
    )
    return (
        f"the rows of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of "
        f"{last.num_ranks} were lost with the weights of step {last.step}, and {why}. Make the "
        "trainer anew and train from the beginning"
    )
