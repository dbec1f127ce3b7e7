"""What one rank holds of a model whose matrices are cut over all ranks, by columns or rows.

Of a matrix that a plan cuts, a rank has a panel, and computes with that alone; the rest it has
whole, as every rank has. Runs in the engine's main thread; making one does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.works import WORKS
from nbdist.train.parting import Origin
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.divided import (
    Bundle,
    Divided,
    made_together,
    maker,
    put,
    without_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.train.strategies.axes import Axes, Portion
    from nbdist.train.strategies.torch_tensor import Tensors

Plan = dict[str, Any]
"""Names of parts of a model -> how torch cuts them."""


class Panels(Divided):
    """A model of which this rank has panels, under the model's own names.

    Args:
        whole: the model.
        portion: whose panels these are, of how many ranks.
        tensors: what cuts it; None where there is one rank.
        dims: name -> the dimension that a parameter is cut along.
    """

    def __init__(
        self,
        whole: nn.Module,
        portion: Portion,
        tensors: Tensors | None,
        dims: Mapping[str, int],
    ) -> None:
        super().__init__(whole, portion)
        self.tensors, self.dims = tensors, dims
        self._cut: dict[str, Any] = {}
        """Those parameters that are torch's: cut, or laid out as such."""
        if tensors is not None:
            from nbdist.train.strategies.torch_tensor import cut_parameters  # noqa: PLC0415 - it takes a second

            self._cut = dict(cut_parameters(whole))
        self.origins = {n: self._origin(n, p) for n, p in whole.named_parameters()}
        self._own = {name: self._view(name, p) for name, p in whole.named_parameters()}

    def _view(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if self.tensors is None or name not in self._cut:
            return parameter
        return nn.Parameter(self.tensors.piece(parameter), requires_grad=parameter.requires_grad)

    def _origin(self, name: str, parameter: Tensor) -> Origin:
        offsets = [0] * parameter.dim()
        if name in self.dims:
            dim = self.dims[name]
            offsets[dim] = self.portion.rank * parameter.shape[dim] // self.portion.num_ranks
        return Origin(tuple(parameter.shape), tuple(offsets))

    def bind(self) -> None:
        """An attempt begins in the present group; what an earlier one has left is let go."""
        if self.tensors is not None:
            self.tensors.enter()
        for parameter in self._cut.values():
            parameter.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model gives; every rank calls it with the same."""
        if self.tensors is not None:
            self.tensors.enter()
        return self.whole(*args, **kwargs)

    def take_gradients(self) -> None:
        """A backward pass is over: add what it gave to the gradients of the pieces."""
        for name, cut in self._cut.items():
            assert self.tensors is not None
            own, gradient = self._own[name], self.tensors.take_gradient(cut)
            if gradient is not None and own.grad is not None:
                own.grad += gradient
            elif gradient is not None:
                own.grad = gradient

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have panels of."""
        if name not in self.dims:
            return piece.clone()
        dim = self.dims[name]
        mine = piece.movedim(dim, 0).contiguous()
        together = mine.new_empty(len(mine) * self.portion.num_ranks, *mine.shape[1:])
        self.axes.form(*place_of_rank())
        group = self.axes.of_parts
        WORKS.follow(dist.all_gather_single(together, mine, group=group, async_op=True)).wait()
        return together.movedim(0, dim).contiguous()


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
        return Panels(make(), portion, None, {})
    from nbdist.train.strategies.torch_tensor import Tensors  # noqa: PLC0415 - it takes a second

    part = maker(make, is_given=is_given)
    model = part([])
    device, whole = next(model.parameters()).device, without_memory(model)
    tensors = Tensors(portion, device, axes)
    held = _cut(whole, tensors, plan_of(model, portion.num_ranks), portion, part)
    held.source = [*model.named_parameters()] if is_given else []
    return held


def _cut(
    whole: nn.Module,
    tensors: Tensors,
    plan: Plan,
    portion: Portion,
    part: Callable[[Sequence[str]], nn.Module],
) -> Panels:
    """Cut a model, some parameters at a time, so that it is never there as a whole.

    Args:
        whole: the model without memory.
        tensors: what cuts it.
        plan: how it is cut.
        portion: this rank's.
        part: the model, in which at least parameters of these names have their values.
    """
    laid_out = tensors.cut(whole, plan)
    dims = {name: dim for name, dim in laid_out.items() if dim is not None}
    parameters = dict(whole.named_parameters())
    bundles = [Bundle(whole, [name], p.nbytes) for name, p in parameters.items()]
    for together in made_together(bundles, portion.num_ranks):
        names = [name for bundle in together for name in bundle.names]
        made = dict(part(names).named_parameters())
        for name in names:
            value, old = made.pop(name).detach(), parameters[name]
            if name in dims:
                value = value.chunk(portion.num_ranks, dims[name])[portion.rank]
            own = value.clone(memory_format=torch.contiguous_format)
            new = (
                tensors.filled(old, own)
                if name in laid_out
                else nn.Parameter(own, requires_grad=old.requires_grad)
            )
            put(whole, old, new)
    return Panels(whole, portion, tensors, dims)
