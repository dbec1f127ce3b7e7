"""Local SGD: every rank trains a replica of its own, and every so many steps all take the mean.

Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist.train.checks import check_whole
from nbdist.train.randomness import seeded
from nbdist.train.strategies.apart import Apart
from nbdist.train.strategies.outer import Calendar, cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.strategies.base import Terms

RELIEF = (
    "Every rank holds the whole model, and the parameters of the last outer step beside it: "
    "strategy=DataParallel() keeps none of these, strategy=Sharded() has each rank hold some rows "
    "of each parameter. Where it is the batch that is too large, accumulate=n goes through it in n "
    "parts"
)
"""What would need less memory on a rank."""


@dataclass(frozen=True)
class LocalSGD:
    """Ranks train apart, each on its part of a batch, and every `period` steps take the mean.

    A step is still one of all ranks: each commits its own update when all votes are in. Between
    outer steps the ranks' parameters differ. A rank that is lost takes along what it has trained
    since the last outer step (`trainer.num_lost_steps`); the others lose nothing, and who joins
    begins with the parameters of the last outer step.
    """

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = RELIEF

    period: int
    """Steps from one outer step to the next."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("period", self.period, 1)

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The whole model."""
        with seeded(terms.seed, torch.device("cpu")):
            return terms.make_module()

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Apart:  # noqa: ARG002 - as for all strategies
        """The working half."""
        return Apart(module, Calendar(self.period), cut(module, 1, None))

    def describe(self) -> str:
        """What it does and what it costs."""
        return (
            "Every rank holds the whole model and trains it on its part of each batch, with an "
            f"optimizer of its own; every {self.period} steps all take the mean of their "
            "parameters, weighted by what each has trained on. A rank sends "
            f"{2 / self.period:.3g}(n−1)/n times the parameters' bytes a step, and a vote of some "
            "bytes in every step. It keeps the parameters of the last outer step."
        )
