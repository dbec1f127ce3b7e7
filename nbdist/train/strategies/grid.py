"""How the ranks of a group share a model in two directions: stages, and pieces of each stage.

Along one direction a batch goes from stage to stage; the ranks along the other have the same
stages, and of these a piece each: panels, with which all compute the same samples, or rows, with
which each computes its own. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.protocol.traffic import Axis
from nbdist.train.strategies.axes import Axes, Portion, own_group
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.data_parallel import sum_on_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Shape(NamedTuple):
    """How many ranks there are along each direction."""

    num_stages: int
    """Which stages lie on."""
    num_pieces: int
    """Which a stage is divided over."""


class Grid(Axes):
    """All ranks hold one model, each its piece of its stages.

    With panels those that have the same stages are next to each other: they talk most. With rows
    those that have the same rows are, as models are that twins hold.

    Args:
        num_stages: ranks that stages lie on; None: as many as there are, pieces being given.
        num_pieces: ranks that a stage is divided over; None likewise. One of both.
        has_rows: pieces are rows, and ranks with other rows take other samples.
    """

    def __init__(
        self,
        num_stages: int | None = None,
        num_pieces: int | None = None,
        *,
        has_rows: bool = False,
    ) -> None:
        super().__init__()
        self._num_stages, self._num_pieces, self.has_rows = num_stages, num_pieces, has_rows
        self._of_stages: Any = None
        self._of_pieces: Any = None
        self._shape = Shape(1, 1)
        """Of the group there."""

    def shape(self, num_ranks: int) -> Shape:
        """In a group of so many."""
        if num_ranks == 1:  # alone, a rank has all
            return Shape(1, 1)
        if self._num_pieces is not None:
            return Shape(max(1, num_ranks // self._num_pieces), self._num_pieces)
        num_stages = self._num_stages or 1
        return Shape(num_stages, max(1, num_ranks // num_stages))

    def fits(self, num_ranks: int) -> bool:
        """Whether so many ranks can share the work so."""
        num_stages, num_pieces = self.shape(num_ranks)
        return num_stages * num_pieces == num_ranks

    def stages(self, rank: int, num_ranks: int) -> Portion:
        """Which of the ranks it is that stages lie on."""
        shape = self.shape(num_ranks)
        at = rank % shape.num_stages if self.has_rows else rank // shape.num_pieces
        return Portion(at, shape.num_stages)

    def pieces(self, rank: int, num_ranks: int) -> Portion:
        """Which pieces of its stages it has."""
        shape = self.shape(num_ranks)
        at = rank // shape.num_stages if self.has_rows else rank % shape.num_pieces
        return Portion(at, shape.num_pieces)

    def together(self, stages: Portion, pieces: Portion) -> Portion:
        """Whose part of the model these pieces of these stages are."""
        num = stages.num_ranks * pieces.num_ranks
        if self.has_rows:
            return Portion(pieces.rank * stages.num_ranks + stages.rank, num)
        return Portion(stages.rank * pieces.num_ranks + pieces.rank, num)

    def place(self, rank: int, num_ranks: int) -> Place:
        """The part of each batch that it takes."""
        return Place(*self.pieces(rank, num_ranks)) if self.has_rows else Place(0, 1)

    def pipelines(self, num_ranks: int) -> list[Sequence[int]]:
        """Of each row of ranks that a batch goes through: which they are, in the stages' order."""
        num_stages, num_pieces = self.shape(num_ranks)
        if self.has_rows:
            return [range(at, at + num_stages) for at in range(0, num_ranks, num_stages)]
        return [range(at, num_ranks, num_pieces) for at in range(num_pieces)]

    def stride(self, num_parts: int) -> int:
        """So many parts further the copy of one is kept: with the half that stays when one goes."""
        return max(1, num_parts // 2)

    @property
    def leaves_by(self) -> int:
        """So many ranks may leave together, and as often as they are half of all."""
        return self._num_pieces or self._num_stages or 1

    @property
    def wanted(self) -> str:
        """In words, how many ranks there may be."""
        if self._num_pieces is not None:
            num, why = self._num_pieces, "each stage is divided over so many"
        else:
            num, why = self._num_stages or 1, "stages lie on so many"
        return f"a multiple of {num}, since {why}"

    # ---- the groups

    def _form_within(self, rank: int, num_ranks: int) -> None:
        self._shape = self.shape(num_ranks)
        if min(self._shape) > 1:
            pipelines = self.pipelines(num_ranks)
            self._of_stages = own_group(pipelines, rank)
            self._of_pieces = own_group(list(zip(*pipelines, strict=True)), rank)

    def let_go(self) -> None:
        """The group is about to be left."""
        super().let_go()
        self._of_stages = self._of_pieces = None
        self._shape = Shape(1, 1)

    @property
    def of_stages(self) -> Any:
        """The group of those that a batch goes through; None: all do."""
        return self._of_stages

    @property
    def of_pieces(self) -> Any:
        """The group of those that have pieces of the same layers; None: all do."""
        return self._of_pieces

    def sum_places_(self, tensor: Tensor) -> None:
        """Sum a tensor over those that have the same layers, and take other samples."""
        if self.has_rows and self._shape.num_pieces > 1:
            sum_on_backend(tensor, self._of_pieces, Axis.DATA)
