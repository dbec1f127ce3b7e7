"""A parameter server: one rank holds the optimizer, the others send it gradients.

Runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from nbdist.train.checks import check_one_of, check_whole, shown
from nbdist.train.randomness import seeded
from nbdist.train.strategies.roles import Roles
from nbdist.train.strategies.service import Service
from nbdist.train.strategies.serving import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.strategies.base import Terms

MODES = ("sync", "async", "bounded")
_HOW = {
    "sync": "Each step's batch is cut into parts for all workers, and applied when all are there",
    "async": "Each worker trains a whole batch, which is applied as soon as it is there",
    "bounded": (
        "Each worker trains a whole batch, which is applied after at most {staleness} others that "
        "its worker had not seen"
    ),
}


@dataclass(frozen=True)
class ParameterServer:
    """One rank holds parameters and optimizer; the others, its workers, send it gradients.

    The server deals the steps: a step's number says which samples it trains on, and each is applied
    once. A worker that is lost costs nothing but time: its step is dealt again, unless it had been
    applied. The server's state lives on in its replica, which applies what the server applies,
    before a worker is told that it was applied.
    """

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = (
        "Every rank holds the whole model, the server its optimizer's state too: "
        "strategy=Sharded() has each rank hold some rows of each parameter. Where it is the batch "
        "that is too large, accumulate=n goes through it in n parts"
    )

    mode: Literal["sync", "async", "bounded"] = "sync"
    """"sync": all workers train a part of the same batch. "async": each trains a batch of its own
    and waits for none. "bounded": likewise, but none may fall behind by more than `staleness`."""
    staleness: int | None = None
    """With "bounded": after how many updates that its worker had not seen one may be applied."""
    server: int = 0
    """The rank that is the server; the last one where there are fewer."""
    replica: bool = True
    """Whether the next rank keeps a copy of the server, with three ranks or more. It trains
    nothing. Without it, a run ends with its server."""
    scale_lr: bool = False
    """Whether an update that comes after t others that its worker had not seen is applied with the
    rate divided by 1 + t; in synchronous mode a late part counts that much less."""
    quorum: int | None = None
    """With "sync": of how many parts a step is applied without waiting for the others. A part that
    comes later goes into the next step; where its worker is lost, or all come to stand before, it
    is dropped (`Trainer.late_parts`). None: all."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_one_of("mode", self.mode, MODES)
        check_whole("server", self.server, 0)
        if (self.mode == "bounded") != (self.staleness is not None):
            raise ValueError(
                f"mode is {shown(self.mode)} and staleness {shown(self.staleness)}; the second is "
                'given with mode="bounded", and only there'
            )
        if self.staleness is not None:
            check_whole("staleness", self.staleness, 0)
        if self.quorum is not None:
            check_whole("quorum", self.quorum, 1)
            if self.mode != "sync":
                raise ValueError(
                    f"mode is {shown(self.mode)} and quorum {self.quorum}; the second goes with "
                    'mode="sync" alone: elsewhere no worker waits for another'
                )

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The whole model."""
        with seeded(terms.seed, torch.device("cpu")):
            return terms.make_module()

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Service:  # noqa: ARG002 - as for all strategies
        """The working half."""
        return Service(
            module,
            lambda num_ranks: Roles.of(num_ranks, self.server, has_replica=self.replica),
            Rules(self.mode == "sync", self.staleness, self.scale_lr, self.quorum),
        )

    def describe(self) -> str:
        """What it does and what it costs."""
        how = _HOW[self.mode].format(staleness=self.staleness)
        if self.quorum is not None:
            how = (
                "Each step's batch is cut into parts for all workers that owe none, and applied "
                f"when {self.quorum} are there; later ones go into the next step"
            )
        copy = (
            " The next rank keeps a copy of the server, with three ranks or more; it is sent each "
            "gradient too, and trains nothing."
            if self.replica
            else ""
        )
        return (
            f"Rank {self.server} holds the optimizer and trains nothing; the others are its "
            f"workers. {how}. For each part or batch a worker sends the gradients' bytes once, and "
            f"is sent the parameters' bytes.{copy}"
        )
