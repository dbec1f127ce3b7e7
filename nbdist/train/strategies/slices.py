"""What one rank holds of a model whose parameters are cut by rows over all ranks.

Every rank has the whole model's modules and buffers, and of each parameter its own rows. A block's
other rows are there only while it computes. Runs in the engine's main thread; making one does no
communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nbdist.train.strategies import building
from nbdist.train.strategies.divided import (
    Bundle,
    Divided,
    made_together,
    maker,
    put,
    without_memory,
)
from nbdist.train.strategies.spreading import gather_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.axes import Portion
    from nbdist.train.strategies.torch_fsdp import Fsdp


_KEPT_UP_TO_BYTES = 1 << 20
"""Blocks come and go in each pass: kept for the next, their memory would add up (`building`)."""


class Slices(Divided):
    """A model of which this rank has some rows of each parameter, under the model's own names."""

    def __init__(self, whole: nn.Module, portion: Portion, fsdp: Fsdp | None) -> None:
        super().__init__(whole, portion)
        self.fsdp = fsdp
        """What cuts the model; None where there is one rank."""
        self._cut = dict(whole.named_parameters())
        self.origins = {name: portion.origin(p) for name, p in self._cut.items()}
        self._own = self._cut if fsdp is None else self._views(fsdp)

    def _views(self, fsdp: Fsdp) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(fsdp.rows(p), requires_grad=p.requires_grad)
            for name, p in self._cut.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model gives; every rank calls it as often as the others."""
        if self.fsdp is not None:
            self.fsdp.begin_pass()
        return self.whole(*args, **kwargs)

    def take_gradients(self) -> None:
        """A backward pass is over: add what it gave to the gradients of the rows."""
        if self.fsdp is None:
            return
        for name, parameter in self._own.items():
            gradient = self.fsdp.take_gradient(self._cut[name])
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient
        self.fsdp.end_pass()

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have rows of."""
        if self.fsdp is None:
            return piece.clone()
        num = self.origins[name].shape[0]
        each = self.portion.num_padded(num) // self.portion.num_ranks
        mine = piece.new_zeros(each, *piece.shape[1:])
        mine[: len(piece)] = piece
        together = piece.new_empty(each * self.portion.num_ranks, *piece.shape[1:])
        gather_(together, mine, None)
        return together[:num]


def hold(
    make: Callable[[], nn.Module],
    *,
    is_given: bool,
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    portion: Portion,
) -> Slices:
    """What this rank holds.

    Args:
        make: makes the whole model, each time the same.
        is_given: that is one which the user has made. It stays as it is.
        blocks_of: from a model to the parts of it that are gathered together.
        portion: which rows are this rank's.
    """
    if portion.num_ranks == 1:
        return Slices(make(), portion, None)
    part = maker(make, is_given=is_given)
    held = _cut(blocks_of, portion, part)
    held.source = [*part([]).named_parameters()] if is_given else []
    return held


def _cut(
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    portion: Portion,
    part: Callable[[Sequence[str]], nn.Module],
) -> Slices:
    """Cut a model, some blocks at a time, so that it is never there as a whole.

    Args:
        blocks_of: from a model to its blocks.
        portion: this rank's.
        part: the model, in which at least parameters of these names have their values.
    """
    from nbdist.train.strategies.torch_fsdp import Fsdp  # noqa: PLC0415 - it takes a second

    model = part([])
    device, whole = next(model.parameters()).device, without_memory(model)
    del model
    parameters = dict(whole.named_parameters())
    check_rows(parameters)
    fsdp = Fsdp(device)
    for together in made_together(bundles_of(whole, blocks_of(whole)), portion.num_ranks):
        names = [name for bundle in together for name in bundle.names]
        made = dict(part(names).named_parameters())
        for bundle in together:
            for name in bundle.names:
                put(whole, parameters[name], made[name])
                del made[name]
            fsdp.cut(bundle.module)
    building.keep_freed(_KEPT_UP_TO_BYTES)
    return Slices(whole, portion, fsdp)


def bundles_of(whole: nn.Module, blocks: Sequence[nn.Module]) -> list[Bundle]:
    """The parts of a model that are gathered together; the last is what no block has.

    Left to the last are blocks that are no modules of the model, or lie in one another, or have a
    parameter that is used elsewhere too.
    """
    users: dict[int, set[int]] = {}
    for module in whole.modules():
        for _, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    inside = {id(module) for module in whole.modules()} - {id(whole)}
    left, bundles = dict(whole.named_parameters()), []
    for block in blocks:
        own = {id(module) for module in block.modules()}
        mine = {id(parameter) for parameter in block.parameters()}
        if not mine or not own <= inside or any(not users[i] <= own for i in mine):
            continue
        inside -= own
        bundles.append(_bundle(block, {n: p for n, p in left.items() if id(p) in mine}))
        left = {name: p for name, p in left.items() if id(p) not in mine}
    return [*bundles, _bundle(whole, left)]


def _bundle(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Bundle:
    return Bundle(module, list(parameters), sum(p.nbytes for p in parameters.values()))


def check_rows(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError where a parameter cannot be cut by rows."""
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            raise ValueError(
                f"{name} is a parameter without dimensions, which has no rows to be cut into; make "
                "it one of shape (1,)"
            )
