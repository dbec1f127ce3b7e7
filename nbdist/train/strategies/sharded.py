"""Sharding: every rank has some rows of each parameter, of its gradient and optimizer state.

A block's other rows are gathered from all ranks just before it computes, forward and backward, and
let go after it; gradients are summed over the ranks, and each keeps those of its rows. So a rank
needs memory for a part of the model, and for one block as a whole. Runs in the engine's main
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nbdist.train.checks import check_whole, shown
from nbdist.train.randomness import seeded
from nbdist.train.strategies.axes import Axes, Portion
from nbdist.train.strategies.rows import Rows
from nbdist.train.strategies.shards import Shards
from nbdist.train.strategies.slices import Slices, hold
from nbdist.train.strategies.splitting import named, returned

if TYPE_CHECKING:
    from nbdist.train.strategies.base import Terms

Blocks = str | Sequence[str] | Callable[[nn.Module], Sequence[nn.Module]]
"""What is gathered together: "auto", names of modules, or a function from the model to them."""


@dataclass(frozen=True)
class Sharded:
    """Every rank has some rows of each parameter; a block's others come when it computes."""

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = (
        "On more engines each holds fewer rows. Copies that lost rows come back from take up to "
        "four times a rank's state: copy_every=0 makes none. blocks= of fewer layers are gathered "
        "in smaller pieces"
    )

    blocks: Blocks = "auto"
    """Which parts of the model are gathered at once, each as a whole: "auto", the blocks that a
    pipeline would be cut between, or else the members of its ModuleLists; a list of names; or a
    function from the model to its blocks. What lies in none is gathered for the whole pass."""
    copy_every: int = 10
    """After so many steps each rank's state is copied to the next rank's memory, to which all go
    back when a rank is lost; 0: never, and the run ends then."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("copy_every", self.copy_every, 0)
        blocks: Any = self.blocks
        is_list = isinstance(blocks, Sequence) and not isinstance(blocks, str)
        is_names = is_list and all(isinstance(name, str) for name in blocks)
        if not (blocks == "auto" or is_names or callable(blocks)):
            raise TypeError(
                f'blocks is {shown(self.blocks)}; it must be "auto", the names of the blocks, or a '
                "function from the model to its blocks"
            )

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The parts that are gathered at once, as far as they are modules of the model."""
        if callable(self.blocks):
            return returned("blocks", self.blocks(model))
        if not isinstance(self.blocks, str):
            return named("blocks", model, self.blocks)
        own = getattr(type(model), "pipeline_blocks", None)
        if own is not None:
            return list(own(model))
        if isinstance(model, nn.Sequential):
            return list(model)
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return [block for blocks in lists for block in blocks]

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The rows of this rank."""

        def make() -> nn.Module:
            with seeded(terms.seed, torch.device("cpu")):
                return terms.make_module()

        axes, is_given = Axes(), isinstance(terms.model, nn.Module)

        def cut(_num_stages: int) -> Slices:
            blocks_of = self.blocks_of
            slices = hold(make, is_given=is_given, blocks_of=blocks_of, portion=axes.present())
            slices.axes, slices.again = axes, cut
            return slices

        return cut(1)

    def divide(self, whole: nn.Module, device: torch.device, portion: Portion, axes: Axes) -> Rows:  # noqa: ARG002 - as for all
        """This rank's rows of a model without memory, still to be given."""
        return Rows(portion, axes)

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Shards:  # noqa: ARG002 - as for all strategies
        """The working half."""
        assert isinstance(module, Slices)
        return Shards(module, copy_every=self.copy_every)

    def describe(self) -> str:
        """What it does and what it costs."""
        return (
            "Each of n ranks holds 1/n of every parameter, gradient and optimizer state, and takes "
            "a part of each batch; a block is gathered whole when it computes. For each batch a "
            "rank sends 3(n−1)/n times the parameters' bytes: two gathers, forward and backward, "
            "and one sum of gradients."
        )
