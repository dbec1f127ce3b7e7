"""What exchanges share whose ranks have each their own piece of the model: how these come together.

In a new group all may have to go back to their copies, and where it has another size the model is
cut anew. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch

from nbdist.errors import RecoveryFailed
from nbdist.train.strategies.copies import Copies, Spread, Stand, are_together, newest
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first
from nbdist.train.strategies.divided import Divided

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper

_NO_GROUP = 0, 1, -1
D = TypeVar("D", bound=Divided)


class Settling(Generic[D]):
    """Sees that what the ranks hold fits together.

    Args:
        held: what this rank holds.
        copy_every: after so many steps its state is copied to the next rank's memory; 0: never.
    """

    is_lockstep = True
    """Others have a part in each pass."""
    pieces: ClassVar[str]
    """What a rank's are called."""

    def __init__(self, held: D, *, copy_every: int) -> None:
        self._take(held)
        self._group = _NO_GROUP
        """Own rank, size and generation of the present group."""
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._copy_every = copy_every
        self._copies = Copies()
        self._waited_ns = 0
        """In collectives, until the present batch began."""

    def _take(self, held: D) -> None:
        """This is what the rank holds."""
        self._held, self._portion = held, held.portion

    def _all_waited_ns(self) -> int:
        """How long the rank has waited in passes through the model, for all of them together."""
        raise NotImplementedError

    def fits(self, rank: int, world_size: int) -> bool:
        """The pieces are those of this rank, of so many."""
        return (rank, world_size) == self._portion

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        group = rank, world_size, generation
        if group != self._group:
            self._group, self._is_new = group, True
        self._waited_ns = self._all_waited_ns()

    def _take_waited_ns(self) -> int:
        """How long the present batch has waited for others, so that it is not taken for work."""
        before, self._waited_ns = self._waited_ns, self._all_waited_ns()
        return self._waited_ns - before

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
            self._held.source = []
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
        """All hold the pieces that they should in this group, of the same step."""
        rank, num_ranks, _ = self._group
        spread = newest(stands)
        if spread is None and any(stand.now.step for stand in stands):
            raise RecoveryFailed(_lost(stands, self.pieces, self._copy_every))
        is_same = spread is not None and spread.num_ranks == num_ranks
        held = self._held if self.fits(rank, num_ranks) else self._cut_anew(num_ranks)
        copies: Iterable[bytes] = ()
        if spread is not None:
            copies = self._copies.fetch(stands, spread, rank, is_same=is_same)
        if is_same and held is self._held:
            (own,) = copies
            keeper.take_back(own)
        elif spread is not None or held is not self._held:
            keeper.move(held, copies)
        self._take(held)
        self._copies.drop_after(keeper.step)

    def _cut_anew(self, num_ranks: int) -> D:
        try:
            held: D = self._held.again()
        except ValueError as error:
            raise RecoveryFailed(
                f"the model cannot be cut anew for the {num_ranks} ranks that the group has now: "
                f"{error}. Start as many engines as before (%dist_scale), or make the trainer anew"
            ) from error
        return held

    def _take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        for name, whole in self._held.source:
            take_from_first(whole)
            self._held.take(name, whole)
        for buffer in self._held.buffers() if self._held.source else ():
            take_from_first(buffer)
        return bool(self._held.source)

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self._portion.num_ranks > 1:
            sum_on_backend(tensor)

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """Gradients are summed as they are: nothing is left for later steps."""

    def forget(self) -> None:
        """Nothing is kept of earlier steps but whole copies, which are right for theirs."""

    def restart(self) -> None:
        """Copies of a training that is given up are of no use; new ones are made at once."""
        self._copies = Copies()

    def owned(self) -> list[object]:
        """The model as torch has cut it."""
        return [self._held.whole]

    def end(self) -> None:
        """The next run may be in another group: all ranks begin it anew."""
        self._group = _NO_GROUP


def _lost(stands: Sequence[Stand], pieces: str, copy_every: int) -> str:
    """Why nothing is left to go on with."""
    last = max(stand.now for stand in stands)
    there = {stand.rank for stand in stands if stand.now == last}
    ranks = [rank for rank in range(last.num_ranks) if rank not in there]
    why = (
        f"no step is left of which all ranks' {pieces} are somewhere: neighbours were lost together"
        if copy_every
        else "nobody keeps copies, since copy_every is 0"
    )
    return (
        f"the {pieces} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of "
        f"{last.num_ranks} were lost with the weights of step {last.step}, and {why}. Make the "
        "trainer anew and train from the beginning"
    )
