"""DiLoCo: ranks train apart, and an outer optimizer takes the mean of how far they have come.

With fragments the model is exchanged a part at a time, and with a delay an outer step goes on while
ranks train (streaming DiLoCo). Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from nbdist.train.checks import check_one_of, check_positive, check_whole, shown
from nbdist.train.randomness import seeded
from nbdist.train.strategies.apart import Apart
from nbdist.train.strategies.local_sgd import RELIEF
from nbdist.train.strategies.outer import Calendar, Rule, cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.strategies.base import Terms
    from nbdist.train.strategies.flight import Wire

_WIRES: dict[str | None, Wire] = {
    None: None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": "int8",
}
_SHARES = {None: 2.0, "fp16": 1.0, "bf16": 1.0, "int8": 65 / 128}
"""(n−1)/n times the parameters' bytes, in float32, that a rank sends in a period."""


@dataclass(frozen=True)
class DiLoCo:
    """Ranks train apart; every `period` steps an outer optimizer goes the mean of their ways.

    How far a rank has come from the last outer step is its outer gradient. The mean of these, over
    all ranks, is what SGD takes a step with, from the parameters of the last outer step. Of ranks
    that are lost and that join, the same is true as with `LocalSGD`.
    """

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = RELIEF

    period: int
    """Steps from one outer step of a parameter to the next."""
    outer_lr: float = 0.7
    """Of the outer optimizer; 1 without momentum: the mean of the ranks' parameters."""
    momentum: float = 0.9
    """Of the outer optimizer, 0 or more and less than 1."""
    nesterov: bool = True
    """Whether the momentum, where there is one, is Nesterov's."""
    fragments: int = 1
    """Parts of the model, of about the same size, that are exchanged in turn."""
    delay: int = 0
    """Steps that are trained while an outer step goes on; less than period / fragments."""
    mixing: float = 0.0
    """What part of its own parameters a rank keeps when an outer step ends: from 0, none, to 1."""
    compress: Literal["fp16", "bf16", "int8"] | None = None
    """How outer gradients travel; None: as they are. What rounding to 16 bits leaves out is lost;
    what codes of 8 bits leave out each rank adds to its next outer gradient."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("period", self.period, 1)
        check_positive("outer_lr", self.outer_lr)
        _check_between("momentum", self.momentum, is_below=True)
        check_whole("fragments", self.fragments, 1)
        check_whole("delay", self.delay, 0)
        _check_between("mixing", self.mixing, is_below=False)
        check_one_of("compress", self.compress, tuple(_WIRES))
        if self.period % self.fragments:
            raise ValueError(
                f"period is {self.period} and fragments {self.fragments}; the first must be a "
                "multiple of the second: fragments take turns"
            )
        if self.delay >= self.period // self.fragments:
            raise ValueError(
                f"delay is {self.delay}; it must be less than period / fragments, "
                f"{self.period // self.fragments}: one outer step ends before the next begins"
            )

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The whole model."""
        with seeded(terms.seed, torch.device("cpu")):
            return terms.make_module()

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Apart:  # noqa: ARG002 - as for all strategies
        """The working half."""
        return Apart(
            module,
            Calendar(self.period, self.fragments, self.delay),
            cut(module, self.fragments, Rule(self.outer_lr, self.momentum, self.nesterov)),
            mixing=self.mixing,
            wire=_WIRES[self.compress],
        )

    def describe(self) -> str:
        """What it does and what it costs."""
        parts = "" if self.fragments == 1 else f", in {self.fragments} parts one after the other"
        wait = f" while {self.delay} steps are trained" if self.delay else ""
        share = _SHARES[self.compress]
        kept = " and a momentum" if self.momentum else ""
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return (
            "Every rank holds the whole model and trains it on its part of each batch, with an "
            f"optimizer of its own; every {self.period} steps{parts} the mean of how far ranks "
            f"have come is taken{wait}, and SGD with rate {self.outer_lr:g} and {kind} "
            f"{self.momentum:g} makes a step of it. A rank sends "
            f"{share / self.period:.3g}(n−1)/n times the parameters' bytes a step, and a vote of "
            f"some bytes in every step. It keeps the parameters of the last outer step{kept}."
        )


def _check_between(name: str, value: Any, *, is_below: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1 or (is_below and value == 1):
        end = "less than 1" if is_below else "at most 1"
        raise ValueError(f"{name} is {shown(value)}; it must be a number, 0 or more and {end}")
