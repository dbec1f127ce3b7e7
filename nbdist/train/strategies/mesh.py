"""Meshes: two strategies, each along one axis of the ranks.

With a data axis there are several pipelines, or several groups of ranks that compute in unison,
each with a whole model; each takes a part of every batch, and those that hold the same part of the
model, twins, sum its gradients. A part that is lost comes back from a twin. Or stages are divided:
by rows over ranks that take different samples, or by panels over ranks that compute together. What
is done along each axis is the strategy of that axis. Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.engine import runs
from nbdist.train.checks import check_whole, shown
from nbdist.train.strategies import schedules
from nbdist.train.strategies.axes import Axes, place_of_rank
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.grid import Grid
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.sharded import Sharded
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
    data: DataParallel | Sharded | int | None = None
    """Along this axis ranks take different samples, and hold the same; or, with `Sharded()`, rows
    of the same stages, which are whole while batches go through. A number: of ranks."""
    tensor: TensorParallel | int | None = None
    """Matrices are cut along this axis; a number: of ranks, and the model's own plan. Beside a
    pipeline, those of each stage."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, int):
                check_whole(name, value, 1)
            elif value is not None and not isinstance(value, kind):
                kinds = " or a ".join(k.__name__ for k in kind)
                raise TypeError(
                    f"{name} is {shown(value)}; it must be a number of ranks or a {kinds}. "
                    "Other strategies are not there yet along this axis"
                )
        if sum(getattr(self, name) is not None for name in _KINDS) != NUM_AXES:
            raise ValueError(
                "a mesh has two axes: give two of data=, pipeline= and tensor=. All three are not "
                "there yet"
            )
        if self.tensor is not None and isinstance(self.data, Sharded):
            raise ValueError(
                "data=Sharded() goes with pipeline=: rows of tensors that are cut are not there "
                "yet. Give data= as a number of ranks"
            )
        self._check_settings()
        if self._num_along_model() is None and self._num_beside() is None:
            what = "data= as a number"
            if self.within is not None:
                what = "tensor= as a number, or" if self.data is None else ""
                what += " a schedule that always has as many stages on a rank"
            raise ValueError(
                f"how many ranks are along each axis does not follow: give {what.strip()}, and all "
                "others are along the other axis"
            )

    def _check_settings(self) -> None:
        """Raise ValueError where one says what has no meaning in a mesh."""
        for kind in (DataParallel, Sharded):
            if isinstance(self.data, kind) and self.data != kind():
                raise ValueError(
                    f"data is {self.data!r}; in a mesh, gradients are summed as they are and "
                    "stages gathered as a whole, and settings of that are not there yet: give "
                    f"data={kind.__name__}(), or a number of ranks"
                )
        inner = self.within
        if isinstance(inner, TensorParallel) and inner != TensorParallel(inner.plan):
            raise ValueError(
                f"tensor is {self.tensor!r}; copies are made as the pipeline's copy_every says: "
                "leave it out here"
            )

    @property
    def along_model(self) -> Pipeline | TensorParallel:
        """The strategy of the axis that models lie along."""
        if self.pipeline is not None:
            return Pipeline(self.pipeline) if isinstance(self.pipeline, int) else self.pipeline
        return TensorParallel() if isinstance(self.tensor, int) else self.tensor or TensorParallel()

    @property
    def within(self) -> TensorParallel | Sharded | None:
        """Where stages are divided: by which strategy."""
        if self.pipeline is not None and self.tensor is not None:
            return self.tensor if isinstance(self.tensor, TensorParallel) else TensorParallel()
        return self.data if isinstance(self.data, Sharded) else None

    def _num_along_model(self) -> int | None:
        """Ranks along the axis of the pipeline, or else of the tensors; None: that is not said."""
        along = self.tensor if self.pipeline is None else self.pipeline
        if isinstance(along, int):
            return along
        if not isinstance(along, Pipeline):
            return None
        if not isinstance(along.schedule, str):
            return len(along.schedule)
        per_rank = schedules.named(along.schedule).per_rank
        return None if per_rank is None else max(1, along.stages // per_rank)

    def _num_beside(self) -> int | None:
        """Ranks along the other axis, where that is said."""
        beside = self.tensor if self.data is None else self.data
        return beside if isinstance(beside, int) else None

    def axes(self) -> Axes:
        """Which rank has what. In a group of another size than was said, the data axis gives way.

        Where only that was said, the other one does. Beside tensors of which the number is said,
        the pipeline does.
        """
        num_along, num_beside = self._num_along_model(), self._num_beside()
        if self.within is None:
            return Axes(num_along) if num_along is not None else Axes(num_twins=num_beside)
        if num_beside is not None:
            return Grid(num_pieces=num_beside)
        return Grid(num_along, has_rows=self.tensor is None)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError where the mesh is not one of so many ranks; one alone has all of it."""
        num_along, num_beside, axes = self._num_along_model(), self._num_beside(), self.axes()
        said = None if num_along is None or num_beside is None else num_along * num_beside
        if num_ranks == 1 or (axes.fits(num_ranks) and said in (None, num_ranks)):
            return
        if said is not None:
            raise ValueError(
                f"{self!r} is a mesh of {num_along} x {num_beside} ranks, and the group has "
                f"{num_ranks}: start {said} engines, or give other numbers"
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
            raise ValueError(
                f"for a model, which takes 1/{self._num_places} of a batch: {error}"
            ) from error

    @property
    def _num_places(self) -> int:
        """Parts of a batch that ranks along the data axis take, as far as that is said."""
        return self.data if isinstance(self.data, int) else 1

    def _terms(self, terms: Terms) -> Terms:
        """As the strategy along the model axis is given them; it checks them."""
        return terms.for_axis(self.along_model, self._num_places)

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:
        """The part of this rank."""
        if not runs.is_replaying():  # a newcomer may come into a world of another size
            self.check_ranks(place_of_rank()[1])
        axes, its_terms, along = self.axes(), self._terms(terms), self.along_model
        if self.within is not None:
            assert isinstance(along, Pipeline)
            return along.hold_along(axes, its_terms, sample, self.within)
        return along.hold_along(axes, its_terms, sample)

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Exchange:
        """The working half."""
        return self.along_model.exchange(module, self._terms(terms), num_votes)

    def describe(self) -> str:
        """What it does and what it costs."""
        first = f"Along one axis: {self.along_model.describe().removesuffix('.')}. "
        if isinstance(self.within, Sharded):
            return (
                f"{first}Along the other, each of d ranks has 1/d of the rows of the same stages, "
                "of their gradients and optimizer state, and takes 1/d of every batch; the stages "
                "are gathered before it goes through, and their gradients summed when the last of "
                "it has gone backward, in which each sends 2(d−1)/d times the stages' bytes."
            )
        if self.within is not None:
            return f"{first}Along the other, in each stage: {self.within.describe()}"
        return (
            f"{first}Along the other, d ranks hold the same part and each takes 1/d of every "
            "batch; after the last of it has gone backward they sum that part's gradients, in "
            "which each sends 2(d−1)/d times their bytes."
        )


NUM_AXES = 2
"""Of a mesh."""
_KINDS: dict[str, tuple[type, ...]] = {
    "pipeline": (Pipeline,),
    "data": (DataParallel, Sharded),
    "tensor": (TensorParallel,),
}
