"""What one rank holds of a model of which every rank has a piece of each parameter, or of some.

The model's modules and buffers are on every rank. Its parameters there are torch's, with which no
rank can work alone; the trainer is given those of its pieces, under the model's own names. Runs in
the engine's main thread; making one does no communication.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from nbdist.errors import WrongState
from nbdist.train.parting import InPieces, pieces_of
from nbdist.train.strategies import building
from nbdist.train.strategies.data_parallel import take_from_first
from nbdist.train.strategies.holding import Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.train.strategies.axes import Portion
    from nbdist.train.strategies.division import Division


class Divided(InPieces, Holding):
    """A model of which this rank has its pieces of parameters.

    Args:
        whole: the model.
        portion: whose pieces these are, of how many ranks.
    """

    def __init__(self, whole: nn.Module, portion: Portion) -> None:
        super().__init__(portion)
        self.whole = whole
        self._own: dict[str, nn.Parameter] = {}
        """Name -> this rank's piece; the same memory as that of the model's parameter."""

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002 - as torch has it; there are none
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces."""
        for name, parameter in self._own.items() if recurse else ():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in the whole model; none is this module's own."""
        if recurse:
            yield from self.whole.named_buffers(prefix, recurse, remove_duplicate)

    def take(self, name: str, whole: Tensor) -> None:
        """Have these values, of a whole parameter."""
        piece = pieces_of(self)[name]
        places = zip(*piece, strict=True)
        self._own[name].copy_(whole[tuple(slice(at, at + num) for at, num in places)])

    def take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        for name, whole in self.source:
            take_from_first(whole)
            self.take(name, whole)
        for buffer in self.buffers() if self.source else ():
            take_from_first(buffer)
        return bool(self.source)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter as a whole, one after the other.

        Every rank goes through all of them; only one is there at a time.
        """
        for name, parameter in self._own.items():
            yield name, self.gather(name, parameter.detach())

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have pieces of, as of this parameter."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have pieces of it."""
        return self.portion.num_ranks > 1

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # as its overloads come to
        """Of one rank's pieces there is none that another model could load."""
        if not self.is_cut:
            state: dict[str, Any] = self.whole.state_dict(*args, **kwargs)
            return state
        raise WrongState(
            "no rank holds the whole model: each has its pieces of the parameters. On all ranks, "
            "dict(trainer.model.whole_parameters()) gathers them"
        )

    def __reduce__(self) -> NoReturn:
        """It stays in its process, as the pieces of the others do in theirs."""
        raise TypeError(
            "a model that is cut over the ranks cannot be sent or copied: each rank holds its own "
            "pieces. On all ranks, dict(trainer.model.whole_parameters()) gathers them"
        )


# ---- making one a part at a time


def maker(make: Callable[[], nn.Module], *, is_given: bool) -> Callable[[Sequence[str]], nn.Module]:
    """From names to the model, in which at least the parameters of these names have their values.

    Args:
        make: makes the whole model, each time the same.
        is_given: that is one which the user has made.
    """
    outlined = None if is_given else building.outline(make)
    if outlined is None:
        model = make()
        return lambda _names: model
    outline, made = outlined
    buffers, places = list(outline.buffers()), dict(outline.named_parameters())

    def part(names: Sequence[str]) -> nn.Module:
        return building.build(make, made, [*buffers, *(places[name] for name in names)])

    return part


class Bundle(NamedTuple):
    """Parameters that are made, or gathered, together."""

    module: nn.Module
    """The part of the model that they are in."""
    names: list[str]
    num_bytes: int


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


def fill(
    whole: nn.Module,
    wanted: Mapping[str, nn.Parameter],
    part: Callable[[Sequence[str]], nn.Module],
    division: Division,
) -> None:
    """Give layers without memory what they compute with, some parameters at a time.

    Args:
        whole: the model that they are of, which is never there as a whole.
        wanted: name -> parameter, of these layers.
        part: the model, in which at least parameters of these names have their values.
        division: keeps this rank's pieces of them.
    """
    bundles = [Bundle(whole, [name], p.nbytes) for name, p in wanted.items()]
    for together in made_together(bundles, division.portion.num_ranks):
        names = [name for bundle in together for name in bundle.names]
        made = dict(part(names).named_parameters())
        for name in names:
            value, old = made.pop(name).detach(), wanted[name]
            put(whole, old, division.layer(name, old, value))


def without_memory(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory; its buffers do."""
    bare = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    copied: nn.Module = copy.deepcopy(model, dict(bare))
    return copied


def put(whole: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Have one parameter in place of another, wherever that is used."""
    for module in whole.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)
