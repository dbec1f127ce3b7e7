"""How the ranks of a group share a model and a batch: as parts of a model, and as its twins.

Ranks next to each other hold the parts of one model, along the model axis; ranks that hold the same
part, along the data axis, are twins, and take different samples. Where there is one axis alone, all
ranks hold the parts of one model. Runs in the engine's main thread.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from nbdist.engine import rebind
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis
from nbdist.train.parting import Origin
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.data_parallel import sum_on_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.futures import Future


class Portion(NamedTuple):
    """Which pieces are a rank's, and of how many ranks."""

    rank: int
    num_ranks: int

    def rows(self, num: int) -> slice:
        """Of a parameter with so many; torch cuts so that only the last ranks have fewer."""
        each = -(-num // self.num_ranks)
        return slice(min(self.rank * each, num), min((self.rank + 1) * each, num))

    def origin(self, parameter: Tensor) -> Origin:
        """Where they begin in a whole parameter."""
        starts = [self.rows(num).start for num in parameter.shape[:1]]
        return Origin(tuple(parameter.shape), (*starts, *[0] * (parameter.dim() - len(starts))))

    def num_padded(self, num: int) -> int:
        """Rows that collectives carry for so many: as many for each rank."""
        return -(-num // self.num_ranks) * self.num_ranks


class Axes:
    """Which part of the model each rank has, and the groups of those that work together.

    Groups are made within the default group when that is new, and let go of when it is left.

    Args:
        num_parts: ranks that a model lies on; None: as many as there are.
        num_twins: ranks that hold the same part; None: as many as there are models. Not both.
    """

    def __init__(self, num_parts: int | None = None, num_twins: int | None = None) -> None:
        self._num_parts = num_parts
        self._num_twins = 1 if num_parts is None and num_twins is None else num_twins
        self._default: weakref.ref[Any] | None = None
        """The group in which they were made."""
        self._lengths = 1, 1
        """Of both axes there."""
        self.of_parts: Any = None
        """The group of those that hold one model; None: all do."""
        self._of_twins: Any = None
        rebind.watch(self)

    # ---- who has what

    def num_parts(self, num_ranks: int) -> int:
        """In a group of so many."""
        if num_ranks == 1:  # alone, a rank has all
            return 1
        return self._num_parts or max(1, num_ranks // (self._num_twins or 1))

    def fits(self, num_ranks: int) -> bool:
        """Whether so many ranks can share the work so."""
        num_parts = self.num_parts(num_ranks)
        num_twins = 1 if num_ranks == 1 else self._num_twins or num_ranks // num_parts
        return num_twins > 0 and num_parts * num_twins == num_ranks

    def portion(self, rank: int, num_ranks: int) -> Portion:
        """The part of the model that a rank has."""
        num_parts = self.num_parts(num_ranks)
        return Portion(rank % num_parts, num_parts)

    def present(self) -> Portion:
        """The part of this rank in the present group."""
        return self.portion(*place_of_rank())

    def twins(self, rank: int, num_ranks: int) -> Place:
        """Which it is of those that hold the same."""
        num_parts = self.num_parts(num_ranks)
        return Place(rank // num_parts, num_ranks // num_parts)

    def place(self, rank: int, num_ranks: int) -> Place:
        """The part of each batch that it takes: twins take different ones."""
        return self.twins(rank, num_ranks)

    def stages(self, rank: int, num_ranks: int) -> Portion:
        """Which of the ranks it is that stages lie on; each has its stages whole."""
        return self.portion(rank, num_ranks)

    def pipelines(self, num_ranks: int) -> list[Sequence[int]]:
        """Of each row of ranks that a batch goes through: which they are, in the stages' order."""
        return self.models(num_ranks)

    def parts(self, num_ranks: int) -> list[int]:
        """Of each rank the part that it has."""
        return [self.portion(rank, num_ranks).rank for rank in range(num_ranks)]

    def models(self, num_ranks: int) -> list[Sequence[int]]:
        """Of each model the ranks that hold it, part by part."""
        num_parts = self.num_parts(num_ranks)
        return [range(at, at + num_parts) for at in range(0, num_ranks, num_parts)]

    def stride(self, num_parts: int) -> int:
        """So many parts further the copy of one is kept."""
        del num_parts
        return 1

    @property
    def leaves_by(self) -> int:
        """So many ranks may leave together, and as often as they are half of all; 0: one alone."""
        return 0

    @property
    def wanted(self) -> str:
        """In words, how many ranks there may be."""
        if self._num_parts is not None:
            return f"a multiple of {self._num_parts}, since a model lies on {self._num_parts}"
        return f"a multiple of {self._num_twins}, since so many hold the same part of the model"

    # ---- the groups

    def form(self, rank: int, num_ranks: int) -> None:
        """Have groups within the present default group; every rank comes here."""
        default = dist.group.WORLD if num_ranks > 1 else None
        if default is not None and self._default is not None and self._default() is default:
            return
        self.let_go()
        self._lengths = self.num_parts(num_ranks), self.twins(rank, num_ranks).num_places
        if default is None:
            return
        num_parts, num_twins = self._lengths
        if num_twins > 1:
            self.of_parts = own_group(self.models(num_ranks), rank)
            twins = [range(at, num_ranks, num_parts) for at in range(num_parts)]
            self._of_twins = own_group(twins, rank)
        self._form_within(rank, num_ranks)
        self._default = weakref.ref(default)

    def _form_within(self, rank: int, num_ranks: int) -> None:
        """Have groups of ranks that hold one model, where they lie in more than one direction."""

    def let_go(self) -> None:
        """The group is about to be left."""
        self.of_parts = self._of_twins = self._default = None

    @property
    def of_stages(self) -> Any:
        """The group of those that a batch goes through, one after the other."""
        return self.of_parts

    @property
    def of_pieces(self) -> Any:
        """The group of those that have pieces of the same layers."""
        return self.of_parts

    @property
    def num_twins(self) -> int:
        """In the present group, how many hold the same part."""
        return self._lengths[1]

    @property
    def has_twins(self) -> bool:
        """Whether others hold what this rank holds."""
        return self._lengths[1] > 1

    def sum_parts_(self, tensor: Tensor) -> None:
        """Sum a tensor on the CPU over those that hold one model, in place; blocks."""
        if self._lengths[0] > 1:
            sum_on_backend(tensor, self.of_parts)

    def sum_twins_(self, tensor: Tensor) -> None:
        """The same over those that hold the same part."""
        if self.has_twins:
            sum_on_backend(tensor, self._of_twins, Axis.DATA)

    def sum_places_(self, tensor: Tensor) -> None:
        """The same over those that have the same layers, and take other samples."""
        self.sum_twins_(tensor)

    def begin_sum(self, tensor: Tensor) -> Future[list[Tensor]]:
        """Sum a tensor, where it is, over the twins; at its end it holds the sum."""
        return WORKS.follow(dist.all_reduce(tensor, group=self._of_twins, async_op=True))


def own_group(lines: Sequence[Sequence[int]], rank: int) -> Any:
    """The group of those ranks that a rank is among; None: it is not. Every rank comes here."""
    own = None
    for ranks in lines:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own


def place_of_rank() -> tuple[int, int]:
    """This process's rank and their number, in the present group; alone: 0 of 1."""
    has_group = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
