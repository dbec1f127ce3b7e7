"""What exchanges share whose ranks have each their own piece of the model: how these come together.

In a new group all may have to go back to their copies, and where it has another size the model is
cut anew. A piece that others hold too comes from one of them. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch

from nbdist.errors import RecoveryFailed
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.copies import Copies, Spread, Stand, are_together, newest
from nbdist.train.strategies.data_parallel import sum_on_backend
from nbdist.train.strategies.holding import Holding
from nbdist.train.strategies.twins import sum_gradients
from nbdist.train.vote import FIRST_BUFFER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper

_NO_GROUP = 0, 1, -1
_START_AGAIN = "Start as many engines as before (%dist_scale), or make the trainer anew"


H = TypeVar("H", bound=Holding)


class Settling(Generic[H]):
    """Sees that what the ranks hold fits together.

    Args:
        held: what this rank holds.
        copy_every: after so many steps its state is copied to the next rank's memory; 0: never.
    """

    is_lockstep = True
    """Others have a part in each pass."""
    num_lost = 0
    has_optimizer = True
    pieces: ClassVar[str]
    """What a rank's are called."""

    def __init__(self, held: H, *, copy_every: int) -> None:
        self.place = Place(0, 1)
        self._take(held)
        self._axes = held.axes
        self._group = _NO_GROUP
        """Own rank, size and generation of the present group."""
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._copy_every = copy_every
        self._copies = Copies()
        self._waited_ns = 0
        """In collectives, until the present batch began."""

    def _take(self, held: H) -> None:
        """This is what the rank holds."""
        self._held, self._portion = held, held.portion

    def _all_waited_ns(self) -> int:
        """How long the rank has waited in passes through the model, for all of them together."""
        return 0

    # ---- the group

    def fits(self, rank: int, world_size: int) -> bool:
        """The pieces are those of this rank, in a group of this size."""
        axes = self._axes
        return axes.fits(world_size) and axes.portion(rank, world_size) == self._portion

    def twins(self, rank: int, world_size: int) -> Place:
        """Those that hold the same pieces, and take other samples."""
        return self._axes.twins(rank, world_size)

    @property
    def leaves_by(self) -> int:
        """So many ranks may leave together, and as often as they are half of all; 0: one alone."""
        return self._axes.leaves_by

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins: in the present group, with nothing left of the one before."""
        group = rank, world_size, generation
        if group != self._group:
            self._group, self._is_new = group, True
            if self._axes.fits(world_size):
                self.place = self._axes.place(rank, world_size)
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
        is_new, (rank, num_ranks, _) = self._is_new, self._group
        has_changed = is_new and self._settle_in(keeper)
        self._is_new = False
        if num_ranks == 1:
            return has_changed
        if keeper.step == 0:
            has_changed = self._held.take_from_first() or has_changed
        else:
            self._held.source = []
        now = _spread(self._held, keeper.step)
        is_due = bool(self._copy_every) and keeper.step % self._copy_every == 0
        is_due = is_due and not self._copies.has(now)
        if self._copy_every and (is_new or is_due or self._copies.is_empty):
            beside = self._axes.models(num_ranks)[self._axes.twins(rank, num_ranks).at]
            stride = self._axes.stride(len(beside))
            self._copies.renew(now, self._portion.rank, keeper, beside, stride)
        return has_changed

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether what this rank holds has changed."""
        rank, num_ranks, _ = self._group
        if not self._axes.fits(num_ranks):
            raise RecoveryFailed(
                f"the group has {num_ranks} ranks now, and there must be {self._axes.wanted}. "
                f"{_START_AGAIN}"
            )
        self._axes.form(rank, num_ranks)
        if num_ranks == self._portion.num_ranks == 1:
            return False
        now = _spread(self._held, keeper.step)
        if not self.fits(rank, num_ranks) and keeper.step:
            self._copies.keep(now, self._portion.rank, keeper)  # all may be here still
        stands = self._copies.gather(now, self._portion.rank, rank, num_ranks)
        if are_together(stands, self._axes.parts(num_ranks)):
            return False
        self._come_together(stands, keeper)
        return True

    def _come_together(self, stands: Sequence[Stand], keeper: Keeper) -> None:
        """All hold the pieces that they should in this group, of the same step."""
        rank, num_ranks, _ = self._group
        spread = newest(stands, self._axes.num_parts(num_ranks))
        if spread is None and any(stand.now.step for stand in stands):
            raise RecoveryFailed(self._lost(stands))
        held = self._held_as([stand.now for stand in stands] if spread is None else [spread])
        is_same = spread is not None and spread == _spread(held, spread.step)
        copies: Iterable[bytes] = ()
        if spread is not None:
            wanted = self._axes.parts(num_ranks) if is_same else None
            copies = self._copies.fetch(stands, spread, rank, keeper, wanted=wanted)
        if is_same and held is self._held:
            (own,) = copies
            keeper.take_back(own)
        elif spread is not None or held is not self._held:
            keeper.move(held, copies)
        self._take(held)
        self._copies.drop_after(keeper.step)

    def _held_as(self, known: Sequence[Spread]) -> H:
        """What this rank is to hold in the present group: what it does, or what is cut anew.

        Args:
            known: how the model lies on ranks, or has lain.
        """
        rank, num_ranks, _ = self._group
        per_part = max(spread.num_stages // spread.num_ranks for spread in known)
        num_stages = per_part * self._axes.num_parts(num_ranks)
        if self.fits(rank, num_ranks) and self._held.num_stages == num_stages:
            return self._held
        try:
            held: H = self._held.again(num_stages)
        except ValueError as error:
            raise RecoveryFailed(
                f"the model cannot be cut anew for the {num_ranks} ranks that the group has now: "
                f"{error}. {_START_AGAIN}"
            ) from error
        return held

    def _lost(self, stands: Sequence[Stand]) -> str:
        """Why nothing is left to go on with."""
        last = max(stand.now for stand in stands)
        there = {stand.rank for stand in stands if stand.now == last}
        parts = [part for part in range(last.num_ranks) if part not in there]
        why = (
            f"no step is left of which all ranks' {self.pieces} are somewhere: neighbours were "
            "lost together"
            if self._copy_every
            else "nobody keeps copies, since copy_every is 0"
        )
        return (
            f"{self._were_lost(parts, last)}, and {why}. Make the trainer anew and train from the "
            "beginning"
        )

    def _were_lost(self, parts: Sequence[int], last: Spread) -> str:
        """Whose pieces were, in words."""
        return (
            f"the {self.pieces} of {listed(parts)} of {last.num_ranks} were lost with the weights "
            f"of step {last.step}"
        )

    # ---- sums

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self._group[1] > 1:
            sum_on_backend(tensor)

    def sum_places_(self, tensor: Tensor) -> None:
        """Over those that compute with the same layers."""
        self._axes.sum_places_(tensor)

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote; what it says of buffers over those that have them. First, their gradients."""
        if self._axes.has_twins:
            sum_gradients(self._held.parameters(), self._axes)
        numbers = torch.tensor(vote, dtype=torch.float64)
        own, buffers = numbers[:FIRST_BUFFER], numbers[FIRST_BUFFER:]
        self.sum_(own)
        if len(buffers):
            self.sum_places_(buffers)
        return numbers.tolist()

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """Gradients are summed as they are: nothing is left for later steps."""

    def forget(self) -> None:
        """Nothing is kept of earlier steps but whole copies, which are right for theirs."""

    def restart(self) -> None:
        """Copies of a training that is given up are of no use; new ones are made at once."""
        self._copies = Copies()

    def end(self) -> None:
        """The next run may be in another group: all ranks begin it anew."""
        self._group = _NO_GROUP


def _spread(held: Holding, step: int) -> Spread:
    """How the model lies on the ranks, at this step."""
    return Spread(step, held.portion.num_ranks, held.num_stages)


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
