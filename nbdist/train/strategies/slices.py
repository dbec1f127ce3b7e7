"""What one rank holds of a model whose parameters are cut by rows over all ranks.

Every rank has the whole model's modules and buffers, and of each parameter its own rows. A block's
other rows are there only while it computes. Runs in the engine's main thread; making one does no
communication.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.works import WORKS
from nbdist.errors import WrongState
from nbdist.train.parting import InPieces, Origin
from nbdist.train.strategies import building

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.train.strategies.torch_fsdp import Fsdp


_KEPT_UP_TO_BYTES = 1 << 20
"""Blocks come and go in each pass: kept for the next, their memory would add up (`building`)."""


class Portion(NamedTuple):
    """Which rows a rank has, of how many ranks."""

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


class Slices(InPieces):
    """A model of which this rank has some rows of each parameter, under the model's own names."""

    def __init__(self, whole: nn.Module, portion: Portion, fsdp: Fsdp | None) -> None:
        super().__init__()
        self.whole = whole
        """The model. Its parameters are torch's, which no rank can work with alone."""
        self.portion, self.fsdp = portion, fsdp
        """Whose rows these are; what cuts the model, None where there is one rank."""
        self._cut = dict(whole.named_parameters())
        self.origins = {name: portion.origin(p) for name, p in self._cut.items()}
        self._rows = self._cut if fsdp is None else self._views(fsdp)
        self.source: list[tuple[str, Tensor]] = []
        """Where the user gave a module: all its parameters, to be taken from rank 0."""
        self.again: Callable[[], Slices] = lambda: self
        """Cuts the same model anew, for the group that there is then."""

    def _views(self, fsdp: Fsdp) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(fsdp.rows(p), requires_grad=p.requires_grad)
            for name, p in self._cut.items()
        }

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002 - as torch has it; there are none
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's rows."""
        for name, parameter in self._rows.items() if recurse else ():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in the whole model."""
        yield from self.whole.named_buffers(prefix, recurse, remove_duplicate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model gives; every rank calls it as often as the others."""
        if self.fsdp is not None:
            self.fsdp.begin_pass()
        return self.whole(*args, **kwargs)

    def take_gradients(self) -> None:
        """A backward pass is over: add what it gave to the gradients of the rows."""
        if self.fsdp is None:
            return
        for name, parameter in self._rows.items():
            gradient = self.fsdp.take_gradient(self._cut[name])
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient
        self.fsdp.end_pass()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter as a whole, one after the other.

        Every rank goes through all of them; only one is there at a time.
        """
        for name, parameter in self._rows.items():
            yield name, self._gather(name, parameter.detach())

    def _gather(self, name: str, rows: Tensor) -> Tensor:
        if self.fsdp is None:
            return rows.clone()
        num = self.origins[name].shape[0]
        each = self.portion.num_padded(num) // self.portion.num_ranks
        mine = rows.new_zeros(each, *rows.shape[1:])
        mine[: len(rows)] = rows
        together = rows.new_empty(each * self.portion.num_ranks, *rows.shape[1:])
        WORKS.follow(dist.all_gather_single(together, mine, async_op=True)).wait()
        return together[:num]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # as its overloads come to
        """Of one rank's rows there is none that another model could load."""
        if self.fsdp is None:
            state: dict[str, Any] = self.whole.state_dict(*args, **kwargs)
            return state
        raise WrongState(
            "no rank holds the whole model: each has its rows of every parameter. On all ranks, "
            "dict(trainer.model.whole_parameters()) gathers them"
        )

    def __reduce__(self) -> NoReturn:
        """It stays in its process, as the rows of the others do in theirs."""
        raise TypeError(
            "a model that is cut over the ranks cannot be sent or copied: each rank holds its own "
            "rows. On all ranks, dict(trainer.model.whole_parameters()) gathers them"
        )


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
    outlined = None if is_given else building.outline(make)
    if outlined is None:
        model = make()
        held = _cut(blocks_of, portion, lambda _: model)
        held.source = [*model.named_parameters()] if is_given else []
        return held
    outline, made = outlined
    buffers, places = list(outline.buffers()), dict(outline.named_parameters())

    def part(names: Sequence[str]) -> nn.Module:
        return building.build(make, made, [*buffers, *(places[name] for name in names)])

    return _cut(blocks_of, portion, part)


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
    device, whole = next(model.parameters()).device, _without_memory(model)
    del model
    parameters = dict(whole.named_parameters())
    check_rows(parameters)
    fsdp = Fsdp(device)
    for together in made_together(bundles_of(whole, blocks_of(whole)), portion.num_ranks):
        names = [name for bundle in together for name in bundle.names]
        made = dict(part(names).named_parameters())
        for bundle in together:
            for name in bundle.names:
                _put(whole, parameters[name], made[name])
                del made[name]
            fsdp.cut(bundle.module)
    building.keep_freed(_KEPT_UP_TO_BYTES)
    return Slices(whole, portion, fsdp)


class Bundle(NamedTuple):
    """Parameters that are gathered together: those of a block, or all that are in none."""

    module: nn.Module
    names: list[str]
    num_bytes: int


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


def made_together(bundles: Sequence[Bundle], num_ranks: int) -> Iterator[list[Bundle]]:
    """Groups that are made together: few times, and little beside what a rank keeps anyway."""
    sizes = [bundle.num_bytes for bundle in bundles]
    room = max(sum(sizes) / num_ranks, *sizes)
    together: list[Bundle] = []
    for bundle in bundles:
        if together and sum(b.num_bytes for b in together) + bundle.num_bytes > room:
            yield together
            together = []
        together.append(bundle)
    yield together


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory; its buffers do."""
    bare = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    copied: nn.Module = copy.deepcopy(model, dict(bare))
    return copied


def _put(whole: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Have one parameter in place of another, wherever that is used."""
    for module in whole.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)


def check_rows(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError where a parameter cannot be cut by rows."""
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            raise ValueError(
                f"{name} is a parameter without dimensions, which has no rows to be cut into; make "
                "it one of shape (1,)"
            )
