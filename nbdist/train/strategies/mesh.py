"""Meshes: ranks along one axis hold the parts of a model, ranks along the other the same part.

So there are several pipelines, or several groups of ranks that compute in unison, each with a whole
model; each takes a part of every batch, and those that hold the same part of the model, twins, sum
its gradients. What is done along each axis is the strategy of that axis. A part that is lost comes
back from a twin. Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.engine import runs
from nbdist.train.checks import check_whole, shown
from nbdist.train.strategies import schedules
from nbdist.train.strategies.axes import Axes, place_of_rank
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.strategies.base import Exchange, Terms


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Two strategies, each along one axis of the ranks."""

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = (
        "With more ranks along the axis of the pipeline, or of the tensors, each holds a smaller "
        "part of the model; more along the data axis take smaller parts of each batch"
    )

    pipeline: Pipeline | int | None = None
    """The model is cut into stages along this axis; a number: of stages, one on each rank."""
    data: DataParallel | int | None = None
    """Along this axis ranks hold the same and take different samples; a number: of ranks."""
    tensor: TensorParallel | int | None = None
    """Matrices are cut along this axis; a number: of ranks, and the model's own plan."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, int):
                check_whole(name, value, 1)
            elif value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"{name} is {shown(value)}; it must be a number of ranks or a {kind.__name__}. "
                    "Other strategies are not there yet along this axis"
                )
        if self.data is None or (self.pipeline is None) == (self.tensor is None):
            raise ValueError(
                "a mesh has a data axis and one that models lie along: give data= and either "
                "pipeline= or tensor=. Other compositions are not there yet"
            )
        if isinstance(self.data, DataParallel) and self.data != DataParallel():
            raise ValueError(
                f"data is {self.data!r}; in a mesh, gradients are summed as they are, and settings "
                "of their sums are not there yet: give data=DataParallel(), or a number of ranks"
            )
        if self._num_parts() is None and not isinstance(self.data, int):
            raise ValueError(
                "how many ranks are along each axis does not follow: give data= as a number, and "
                "all others are along the other axis"
            )

    @property
    def along_model(self) -> Pipeline | TensorParallel:
        """The strategy of the axis that models lie along."""
        if self.pipeline is not None:
            return Pipeline(self.pipeline) if isinstance(self.pipeline, int) else self.pipeline
        return TensorParallel() if isinstance(self.tensor, int) else self.tensor or TensorParallel()

    def _num_parts(self) -> int | None:
        """Ranks that a model lies on; None: as many as the data axis leaves."""
        for value in (self.pipeline, self.tensor):
            if isinstance(value, int):
                return value
        if not isinstance(self.pipeline, Pipeline):
            return None
        if not isinstance(self.pipeline.schedule, str):
            return len(self.pipeline.schedule)
        per_rank = schedules.named(self.pipeline.schedule).per_rank
        return None if per_rank is None else max(1, self.pipeline.stages // per_rank)

    def _num_twins(self) -> int | None:
        """Ranks along the data axis, where that is said."""
        return self.data if isinstance(self.data, int) else None

    def axes(self) -> Axes:
        """Which rank has what. In a group of another size than was said, the data axis gives way.

        Where only that was said, the other one does.
        """
        num_parts = self._num_parts()
        return Axes(num_parts) if num_parts is not None else Axes(num_twins=self._num_twins())

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError where the mesh is not one of so many ranks; one alone has all of it."""
        num_parts, num_twins, axes = self._num_parts(), self._num_twins(), self.axes()
        is_fit = axes.fits(num_ranks) and num_twins in (None, axes.place(0, num_ranks).num_places)
        if num_ranks == 1 or is_fit:
            return
        if num_parts is not None and num_twins is not None:
            raise ValueError(
                f"{self!r} is a mesh of {num_parts} x {num_twins} ranks, and the group has "
                f"{num_ranks}: start {num_parts * num_twins} engines, or give other numbers"
            )
        raise ValueError(
            f"{self!r} cannot lie on the {num_ranks} ranks of the group; there must be "
            f"{axes.wanted}"
        )

    def check(self, terms: Terms) -> None:
        """See that the trainer fits the strategy along the model axis."""
        try:
            self._terms(terms)
        except ValueError as error:
            num_twins = self._num_twins() or 1
            raise ValueError(
                f"for a model, which takes 1/{num_twins} of a batch: {error}"
            ) from error

    def _terms(self, terms: Terms) -> Terms:
        """As the strategy along the model axis is given them; it checks them."""
        return terms.for_axis(self.along_model, self._num_twins() or 1)

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:
        """The part of this rank."""
        if not runs.is_replaying():  # a newcomer may come into a world of another size
            self.check_ranks(place_of_rank()[1])
        return self.along_model.hold_along(self.axes(), self._terms(terms), sample)

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Exchange:
        """The working half."""
        return self.along_model.exchange(module, self._terms(terms), num_votes)

    def describe(self) -> str:
        """What it does and what it costs."""
        return (
            "Along one axis: "
            f"{self.along_model.describe().removesuffix('.')}. Along the other, d ranks hold the "
            "same part and each takes 1/d of every batch; after the last of it has gone backward "
            "they sum that part's gradients, in which each sends 2(d−1)/d times their bytes."
        )


_KINDS: dict[str, type] = {
    "pipeline": Pipeline,
    "data": DataParallel,
    "tensor": TensorParallel,
}
