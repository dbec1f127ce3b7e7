"""Pipelines: the model is cut into stages, one or more on each rank; batches go through in pieces.

The first stage takes a micro-batch's inputs, each stage sends what it makes of them to the next,
the last computes the loss; gradients come back the same way. While one micro-batch is on a stage,
others are on the other stages: the schedule says which. Every rank fetches every batch, so that all
know its shape before any of them enters the schedule; where a batch does not come apart into equal
pieces, they are filled up with samples that the loss never sees.

Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nbdist.engine import runs
from nbdist.train.checks import check_whole
from nbdist.train.randomness import seeded
from nbdist.train.strategies import actions, schedules
from nbdist.train.strategies.axes import Axes, Portion, place_of_rank
from nbdist.train.strategies.divided_stages import hold as hold_divided
from nbdist.train.strategies.grid import Grid
from nbdist.train.strategies.held import Cut, Held, Layout, hold
from nbdist.train.strategies.splitting import Split, check_split, is_counts
from nbdist.train.strategies.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.train.strategies.base import Terms
    from nbdist.train.strategies.divided_stages import Within


@dataclass(frozen=True)
class Pipeline:
    """The model is cut into stages, which batches go through in pieces."""

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = (
        "On more engines each holds a smaller part of the model. Copies that a lost stage comes "
        "back from take up to four times a rank's state: copy_every=0 makes none. More "
        "micro-batches are smaller ones"
    )

    stages: int
    """How many, over all ranks; each rank has the same number of them."""
    schedule: str | schedules.Order = "1f1b"
    """In which order ranks go forward and backward: "gpipe", "1f1b", "interleaved", "looped-bfs",
    "zero-bubble", "zbv", "dualpipev"; or rank -> list of actions such as "0F0", "0B0"."""
    microbatches: int | None = None
    """Pieces in which a batch goes through; None: four for each stage, as far as it has samples."""
    split: Split = "auto"
    """How the model is cut: "auto", by what its blocks cost; a list, how many blocks each stage
    has; a list of the names of its blocks; or a function from the model to its blocks."""
    copy_every: int = 10
    """After so many steps each rank's state is copied to the next rank's memory, to which all go
    back when a rank is lost; 0: never, and the run ends then."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("stages", self.stages, 1)
        check_whole("copy_every", self.copy_every, 0)
        if self.microbatches is not None:
            check_whole("microbatches", self.microbatches, 1)
        if isinstance(self.schedule, str):
            schedules.named(self.schedule)
        else:
            order = actions.parse(self.schedule)
            if self.microbatches is None:
                raise ValueError("with a schedule of your own, say microbatches=…: it names each")
            actions.check(order, self.stages, self.microbatches)
        check_split(self.split)

    def check(self, terms: Terms) -> None:
        """See that the trainer can be a pipeline."""
        if terms.loss is None:
            raise ValueError(
                "strategy=Pipeline(…) needs loss=, a function of output and target, in place of "
                "forward=: no rank has a model that a function could call"
            )
        if self._num_microbatches(terms) > terms.global_batch // terms.accumulate:
            raise ValueError(
                f"microbatches is {self.microbatches}, and global_batch is {terms.global_batch}, "
                f"accumulate {terms.accumulate}: there are fewer samples than micro-batches"
            )

    def _num_microbatches(self, terms: Terms) -> int:
        samples = terms.global_batch // terms.accumulate
        return self.microbatches or schedules.default_microbatches(self.stages, samples)

    def _layout(self, num_stages: int, num_microbatches: int, portion: Portion) -> Layout:
        """Who has which stage in the present group."""
        rank, num_ranks = portion
        if num_ranks == 1:
            return Layout((0,) * num_stages, 0, 1)
        try:
            owners = self._owners(num_stages, num_ranks, num_microbatches)
        except ValueError:
            if not runs.is_replaying():
                raise
            # A newcomer of a world in which the others have cut the model anew: so will it.
            return Layout(tuple(range(num_stages)), min(rank, num_stages - 1), num_stages)
        return Layout(owners, rank, num_ranks)

    def _owners(self, num_stages: int, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        if isinstance(self.schedule, str):
            owners = schedules.owners(self.schedule, num_stages, num_ranks)
            schedules.check_counts(self.schedule, num_stages, num_ranks, num_microbatches)
        else:
            owners = actions.check(actions.parse(self.schedule), num_stages, num_microbatches)
            if len(self.schedule) != num_ranks:
                raise ValueError(
                    f"schedule is for {len(self.schedule)} ranks, and the group has {num_ranks}"
                )
        return owners

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:
        """The stages of this rank."""
        return self.hold_along(Axes(), terms, sample)

    def hold_along(
        self,
        axes: Axes,
        terms: Terms,
        sample: Callable[[], Any],
        within: Within | None = None,
    ) -> nn.Module:
        """The same where other ranks may have the same stages; `within`: what divides them."""
        if isinstance(terms.model, Held):
            return terms.model

        def make() -> nn.Module:
            with seeded(terms.seed, torch.device("cpu")):
                return terms.make_module()

        given = terms.model if isinstance(terms.model, nn.Module) else None

        def cut(num_stages: int) -> Held:
            has_counts = is_counts(self.split) and num_stages != self.stages
            place = axes.stages(*place_of_rank())
            how = Cut(
                "auto" if has_counts else self.split,
                self._layout(num_stages, self._num_microbatches(terms), place),
                lambda: sample()[0],
            )
            if within is None:
                held = hold(make, given=given, cut=how)
            else:
                assert isinstance(axes, Grid)
                held = hold_divided(make, given=given, cut=how, within=within, axes=axes)
            held.axes, held.again = axes, again
            return held

        def again(num_parts: int) -> Held:
            """For the present group: so many stages, or of all stages together so many pieces."""
            own = axes.pieces(*place_of_rank()) if isinstance(axes, Grid) else Portion(0, 1)
            return cut(num_parts // own.num_ranks)

        return cut(self.stages)

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Stages:  # noqa: ARG002 - as for all strategies
        """The working half."""
        assert isinstance(module, Held)
        return Stages(
            module,
            self.schedule,
            self._num_microbatches(terms),
            seed=terms.seed,
            precision=terms.precision,
            copy_every=self.copy_every,
        )

    def describe(self) -> str:
        """What it does and what it costs."""
        m = self.microbatches or f"{schedules.DEFAULT_PER_STAGE}·stages"
        if not isinstance(self.schedule, str):
            name = "a schedule of your own"
            idle = f"{actions.idle_share(actions.parse(self.schedule), self.stages):.0%}"
        else:
            name, facts = self.schedule, schedules.named(self.schedule)
            idle = facts.idle
            if facts.per_rank and self.microbatches:
                ranks = self.stages // facts.per_rank
                share = facts.idle_share(ranks, facts.per_rank, self.microbatches)
                idle += f" = {share:.0%}"
        return (
            f"The model is cut into {self.stages} stages, on p ranks v each, which a batch goes "
            f"through as m = {m} micro-batches ({name}); each rank holds 1/p of the model, waits "
            f"for {idle} of a step, and sends for each micro-batch what a stage returns, and a "
            "gradient as large."
        )
