"""What one rank holds of a model that is cut into stages.

Runs in the engine's main thread; making one does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from nbdist.errors import WrongState
from nbdist.train.strategies import building, splitting
from nbdist.train.strategies.axes import Portion
from nbdist.train.strategies.data_parallel import take_from_first
from nbdist.train.strategies.division import Division
from nbdist.train.strategies.holding import Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.train.strategies.splitting import Split, Stage


class Layout(NamedTuple):
    """Who has which stage."""

    owners: tuple[int, ...]
    """For each stage the rank that has it."""
    rank: int
    """This one."""
    num_ranks: int

    @property
    def own(self) -> list[int]:
        """The stages of this rank, in order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == self.rank]


class Cut(NamedTuple):
    """How a model is cut into stages."""

    split: Split
    layout: Layout
    """Who has which stage."""
    sample: Callable[[], Any]
    """Gives an input."""

    def counts(self, blocks: Sequence[nn.Module]) -> list[int]:
        """How many of these blocks each stage has."""
        return splitting.counts_of(blocks, len(self.layout.owners), self.split, self.sample)


class Held(Holding):
    """The stages of one rank. Parameters have the names that they have in the whole model.

    Args:
        stages: number of a stage -> the stage.
        layout: who has which.
        counts: how many blocks each stage of the whole model has.
        names: of the whole model's parameters and buffers, by identity.
        shared: name -> ranks, of parameters that stages of several ranks use.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        *,
        layout: Layout,
        counts: Sequence[int],
        names: dict[int, str],
        shared: dict[str, tuple[int, ...]],
    ) -> None:
        super().__init__(Portion(layout.rank, layout.num_ranks))
        self.division = Division()
        """What of its stages the rank has: all."""
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.layout, self.counts, self.shared = layout, list(counts), shared
        mine = [*self.stages.parameters(), *self.stages.buffers()]
        self._names = {id(tensor): names[id(tensor)] for tensor in mine}
        self.order = {name: place for place, name in enumerate(names.values())}
        """Of everything in the whole model."""

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return len(self.layout.owners)

    def take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        for tensor in self.source:
            take_from_first(tensor)
        return bool(self.source)

    def stage(self, number: int) -> Stage:
        """A stage of this rank."""
        return cast("Stage", self.stages[str(number)])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As in the whole model."""
        for _, tensor in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._names[id(tensor)], tensor

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in the whole model, as long as the module has not put another tensor in its place."""
        for name, tensor in super().named_buffers(prefix, recurse, remove_duplicate):
            yield self._names.get(id(tensor), name), tensor

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """No rank can do this alone."""
        raise WrongState(
            "no rank holds the whole model: it is cut into the stages of a pipeline. In a loop of "
            "your own, call step.train(batch) in place of step.backward(loss)"
        )


def hold(make: Callable[[], nn.Module], *, given: nn.Module | None, cut: Cut) -> Held:
    """What this rank holds.

    Args:
        make: makes the whole model, each time the same.
        given: the model, where the user gave one that is made already.
        cut: into which stages.
    """
    outlined = building.outline(make) if given is None else None
    whole = outlined[0] if outlined is not None else given or make()
    blocks = splitting.blocks_of(whole, cut.split)
    counts = cut.counts(blocks)
    if outlined is not None:
        own = [splitting.cut(blocks, counts)[stage] for stage in cut.layout.own]
        wanted = [tensor for stage in own for tensor in [*stage.parameters(), *stage.buffers()]]
        whole = building.build(make, outlined[1], wanted)
        blocks = splitting.blocks_of(whole, cut.split)
    held = Held(**contents(whole, splitting.cut(blocks, counts), cut.layout, counts))
    if given is not None:
        held.source = [*given.parameters(), *given.buffers()]
    return held


def contents(
    whole: nn.Module, stages: list[Stage], layout: Layout, counts: Sequence[int]
) -> dict[str, Any]:
    """What a rank holds of these stages, as `Held` takes it.

    Args:
        whole: the model.
        stages: all of its.
        layout: who has which.
        counts: how many blocks each has.

    Raises:
        ValueError: they are not the whole model, or leave a rank nothing to train.
    """
    names = {id(t): n for n, t in [*whole.named_parameters(), *whole.named_buffers()]}
    users: dict[str, set[int]] = {}
    for stage, owner in zip(stages, layout.owners, strict=True):
        for tensor in stage.parameters():
            if id(tensor) not in names:
                raise ValueError(
                    f"split: a block has a parameter of shape {tuple(tensor.shape)} that is not "
                    "the model's; blocks must be parts of the model"
                )
            users.setdefault(names[id(tensor)], set()).add(owner)
    _check_trainable(stages, layout)
    _check_complete(whole, users)
    own = {number: stages[number] for number in layout.own}
    shared = {name: tuple(sorted(ranks)) for name, ranks in users.items() if len(ranks) > 1}
    return {"stages": own, "layout": layout, "counts": counts, "names": names, "shared": shared}


def _check_trainable(stages: list[Stage], layout: Layout) -> None:
    for rank in range(layout.num_ranks):
        mine = [stage for stage, owner in zip(stages, layout.owners, strict=True) if owner == rank]
        if not any(p.requires_grad for stage in mine for p in stage.parameters()):
            raise ValueError(
                f"rank {rank} would have nothing to train: its stages have no parameter that "
                "requires a gradient. Cut the model elsewhere: split=[blocks of each stage]"
            )


def _check_complete(whole: nn.Module, users: dict[str, set[int]]) -> None:
    left = [name for name, _ in whole.named_parameters() if name not in users]
    if left:
        raise ValueError(
            f"split: {len(left)} of the model's parameters are in no block: "
            f"{', '.join(left[:8])}{' …' if len(left) > 8 else ''}"
        )
