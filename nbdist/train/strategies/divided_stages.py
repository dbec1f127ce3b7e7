"""What one rank holds of a model that is cut into stages, each of which several ranks divide.

Of the parameters of its stages it has pieces, as its division says. Runs in the engine's main
thread; making one does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn

from nbdist.engine import runs
from nbdist.errors import WrongState
from nbdist.train.parting import InPieces, pieces_of
from nbdist.train.strategies import splitting
from nbdist.train.strategies.axes import Portion, place_of_rank
from nbdist.train.strategies.data_parallel import take_from_first
from nbdist.train.strategies.divided import fill, maker, without_memory
from nbdist.train.strategies.held import Held, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nbdist.train.strategies.division import Division
    from nbdist.train.strategies.grid import Grid
    from nbdist.train.strategies.held import Cut


class Within(Protocol):
    """The strategy that divides stages."""

    def divide(
        self, whole: nn.Module, device: torch.device, portion: Portion, axes: Grid
    ) -> Division:
        """Have a model without memory compute with this rank's pieces, still to be given.

        Args:
            whole: the model.
            device: the model's.
            portion: which pieces are this rank's.
            axes: how the ranks share the model.
        """


class DividedStages(InPieces, Held):
    """The stages of one rank, of whose parameters it has pieces.

    Args:
        portion: which part of the model that is.
        division: which pieces, and how the stages compute with them.
        held: what `Held` takes.
    """

    has_every_name: ClassVar[bool] = False

    def __init__(self, portion: Portion, division: Division, **held: Any) -> None:
        super().__init__(**held)
        self.portion, self.division = portion, division
        self.origins = division.origins

    @property
    def num_stages(self) -> int:
        """Of the whole model, times the pieces of each."""
        return super().num_stages * self.division.portion.num_ranks

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces."""
        for name, _ in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, self.division.own[name]

    @torch.no_grad()
    def take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        pieces = pieces_of(self)
        for name, whole in self.source:
            take_from_first(whole)
            if name in pieces:
                places = zip(*pieces[name], strict=True)
                own[name].copy_(whole[tuple(slice(at, at + num) for at, num in places)])
            elif name in own:
                own[name].copy_(whole)
        return bool(self.source)

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what ranks have pieces of, as of this parameter."""
        return self.division.gather(name, piece)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Of one rank's pieces there is none that another model could load."""
        raise WrongState(
            "no rank holds the whole model: each has its pieces of the stages of a pipeline. "
            "cluster.save(path) writes all of them"
        )

    def __reduce__(self) -> NoReturn:
        """It stays in its process, as the pieces of the others do in theirs."""
        raise TypeError(
            "a model that is cut over the ranks cannot be sent or copied: each rank holds its own "
            "pieces of the stages. cluster.save(path) writes all of them"
        )


def hold(
    make: Callable[[], nn.Module], *, given: nn.Module | None, cut: Cut, within: Within, axes: Grid
) -> DividedStages:
    """What this rank holds.

    Args:
        make: makes the whole model, each time the same.
        given: the model, where the user gave one that is made already. It stays as it is.
        cut: into which stages.
        within: divides them.
        axes: how the ranks share the model.
    """
    part = maker(make, is_given=given is not None)
    model = part([])
    device, whole = next(model.parameters()).device, without_memory(model)
    del model
    counts = cut.counts(splitting.blocks_of(whole, cut.split))  # of layers as they are
    division = _division(within, whole, device, axes)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    stages = splitting.cut(splitting.blocks_of(whole, cut.split), counts)
    own = [p for number in cut.layout.own for p in stages[number].parameters()]
    fill(whole, {names[id(p)]: p for p in own if id(p) in names}, part, division)
    portion = axes.together(Portion(cut.layout.rank, cut.layout.num_ranks), division.portion)
    stages = splitting.cut(splitting.blocks_of(whole, cut.split), counts)
    held = DividedStages(portion, division, **contents(whole, stages, cut.layout, counts))
    if given is not None:
        held.source = [*given.named_parameters(), *given.named_buffers()]
    return held


def _division(within: Within, whole: nn.Module, device: torch.device, axes: Grid) -> Division:
    """Of this rank."""
    pieces = axes.pieces(*place_of_rank())
    try:
        return within.divide(whole, device, pieces, axes)
    except ValueError:
        if not runs.is_replaying() or pieces.num_ranks == 1:
            raise
        # A newcomer of a world that cannot share the model: all its ranks say so together.
        return within.divide(whole, device, Portion(0, 1), axes)
