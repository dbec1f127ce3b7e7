"""What one rank holds of a model whose matrices are cut over all ranks, by columns or rows.

Of a matrix that a plan cuts, a rank has a panel, and computes with that alone; the rest it has
whole, as every rank has. Runs in the engine's main thread; making one does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbdist.train.parting import Origin
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.divided import Divided, fill, maker, without_memory
from nbdist.train.strategies.division import Division
from nbdist.train.strategies.spreading import gather_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.train.strategies.axes import Axes, Portion
    from nbdist.train.strategies.torch_tensor import Tensors

Plan = dict[str, Any]
"""Names of parts of a model -> how torch cuts them."""
_TOLERANCE = 1e-3
"""Gradients that are the same on all ranks differ by less than this part of their norm."""


class Panelled(Division):
    """A rank's panels of what a plan cuts, and the whole of the rest.

    Args:
        portion: whose panels these are, of how many ranks.
        axes: how all ranks share the model.
        tensors: what cuts the layers; None where there is one rank.
        laid_out: name -> the dimension that a parameter is cut along, of those that the plan has
            something to do with; None: it stays whole.
    """

    def __init__(
        self,
        portion: Portion,
        axes: Axes,
        tensors: Tensors | None = None,
        laid_out: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(portion)
        self._axes, self.tensors, self._laid_out = axes, tensors, laid_out or {}
        self.dims = {name: dim for name, dim in self._laid_out.items() if dim is not None}
        self._cut: dict[str, Any] = {}
        """Those parameters that are torch's: cut, or laid out as such."""
        self._is_checked = False
        """Gradients of what every rank has whole were seen to be the same on all of the group."""

    @property
    def is_first(self) -> bool:
        """All that have panels of the same layers come to the same."""
        return self.portion.rank == 0

    def counts(self, name: str) -> bool:
        """What each rank has whole counts once."""
        return self.is_first or name in self.dims

    def layer(self, name: str, old: nn.Parameter, value: Tensor) -> nn.Parameter:
        """Keep a panel of a parameter, or all of it; what its layer is to compute with."""
        origin = Origin.whole(value)
        if name in self.dims:
            dim, (rank, num_ranks) = self.dims[name], self.portion
            offset = rank * value.shape[dim] // num_ranks
            origin = origin._replace(offsets=tuple(offset * (i == dim) for i in range(value.dim())))
            value = value.chunk(num_ranks, dim)[rank]
        own = value.clone(memory_format=torch.contiguous_format)
        if self.tensors is None or name not in self._laid_out:
            return self.keep(name, nn.Parameter(own, requires_grad=old.requires_grad))
        cut = self._cut[name] = self.tensors.filled(old, own)
        view = nn.Parameter(self.tensors.piece(cut), requires_grad=cut.requires_grad)
        self.own[name], self.origins[name] = view, origin
        return cut

    def keep(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        """A parameter that is this rank's as it is."""
        self.own[name], self.origins[name] = whole, Origin.whole(whole)
        return whole

    def bind(self, *, is_new: bool) -> None:
        """An attempt begins in the present group; what an earlier one has left is let go."""
        if is_new:  # on all ranks, also on those that were not in the group before
            self._is_checked = False
        self.come()
        for parameter in self._cut.values():
            parameter.grad = None

    def come(self) -> None:
        """Layers are about to compute."""
        if self.tensors is not None:
            self.tensors.enter()

    def take_gradients(self) -> None:
        """Backward passes are over: what they gave is added to the gradients of the pieces."""
        for name, cut in self._cut.items():
            assert self.tensors is not None
            own, gradient = self.own[name], self.tensors.take_gradient(cut)
            if gradient is not None and own.grad is not None:
                own.grad += gradient
            elif gradient is not None:
                own.grad = gradient

    def check(self, order: Mapping[str, int], sum_: Callable[[Tensor], None]) -> None:
        """See that ranks agree on the gradients of what each has whole.

        Raises:
            ValueError: they do not, so the plan lacks something; on all ranks alike.
        """
        rank, num_ranks = self.portion
        if num_ranks == 1 or self._is_checked:
            return
        table = torch.zeros(num_ranks, max(order.values()) + 1, dtype=torch.float64)
        for name, parameter in self.own.items():
            if name not in self.dims and parameter.grad is not None:
                table[rank, order[name]] = float(parameter.grad.norm())
        sum_(table)
        least, most = table.amin(0), table.amax(0)
        differing = (most - least > _TOLERANCE * most).tolist()
        if names := [name for name, place in order.items() if differing[place]]:
            raise ValueError(
                f"the ranks come to different gradients of {', '.join(names[:4])}"
                f"{' …' if len(names) > 4 else ''}, which each has whole: plan= must cut these "
                "too, or lay them out (SequenceParallel), or leave whole what they are used "
                "with. Also, data[i] must be the same on all ranks"
            )
        self._is_checked = True

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have panels of."""
        if name not in self.dims:
            return piece.clone()
        dim = self.dims[name]
        mine = piece.movedim(dim, 0).contiguous()
        together = mine.new_empty(len(mine) * self.portion.num_ranks, *mine.shape[1:])
        self._axes.form(*place_of_rank())
        gather_(together, mine, self._axes.of_pieces)
        return together.movedim(0, dim).contiguous()


class Panels(Divided):
    """A model of which this rank has panels, under the model's own names.

    Args:
        whole: the model.
        division: which panels, with which it computes.
    """

    def __init__(self, whole: nn.Module, division: Panelled) -> None:
        super().__init__(whole, division.portion)
        self.division = division
        self.origins, self._own = division.origins, division.own

    @property
    def waited_ns(self) -> int:
        """In collectives, for all of them together."""
        tensors = self.division.tensors
        return 0 if tensors is None else tensors.traffic.waited_ns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model gives; every rank calls it with the same."""
        self.division.come()
        return self.whole(*args, **kwargs)

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have panels of."""
        return self.division.gather(name, piece)


def divide(
    whole: nn.Module,
    plan_of: Callable[[nn.Module, int], Plan],
    device: torch.device,
    portion: Portion,
    axes: Axes,
) -> Panelled:
    """Have a model without memory compute with this rank's panels, which it is still to be given.

    Args:
        whole: the model.
        plan_of: from a model, and a number of ranks, to how it is cut.
        device: the model's.
        portion: which panels are this rank's.
        axes: how the ranks share the model.
    """
    if portion.num_ranks == 1:
        return Panelled(portion, axes)
    from nbdist.train.strategies.torch_tensor import Tensors  # noqa: PLC0415 - it takes a second

    tensors = Tensors(portion, device, axes)
    return Panelled(portion, axes, tensors, tensors.cut(whole, plan_of(whole, portion.num_ranks)))


def hold(
    make: Callable[[], nn.Module],
    *,
    is_given: bool,
    plan_of: Callable[[nn.Module, int], Plan],
    portion: Portion,
    axes: Axes,
) -> Panels:
    """What this rank holds.

    Args:
        make: makes the whole model, each time the same.
        is_given: that is one which the user has made. It stays as it is.
        plan_of: from a model, and a number of ranks, to how it is cut.
        portion: which panels are this rank's.
        axes: how the ranks share the model.
    """
    if portion.num_ranks == 1:
        alone, whole = Panelled(portion, axes), make()
        for name, parameter in whole.named_parameters():
            alone.keep(name, parameter)
        return Panels(whole, alone)
    part = maker(make, is_given=is_given)
    model = part([])
    device, whole = next(model.parameters()).device, without_memory(model)
    division = divide(whole, plan_of, device, portion, axes)
    fill(whole, dict(whole.named_parameters()), part, division)
    held = Panels(whole, division)
    held.source = [*model.named_parameters()] if is_given else []
    return held
