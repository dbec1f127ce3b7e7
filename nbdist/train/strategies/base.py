"""What every strategy is to the training loop.

A strategy has two halves: the settings, a frozen dataclass that the user writes, and the exchange,
which the settings make for one trainer in one process and which does the communication. The group
is torch's default group, whichever that is at the moment: an exchange keeps no group. Runs in the
engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


class Place(NamedTuple):
    """Which part of a batch a rank takes, of how many."""

    at: int
    num_places: int


class Summed(NamedTuple):
    """What came of a backward pass."""

    ready_ns: int
    """When this rank's own gradients were complete, by `time.perf_counter_ns`."""
    vote: list[float] | None
    """The vote that went along, summed over all ranks; None where none did."""
    is_finite: bool = True
    """False: the gradient is not, on any rank, and is not to be applied. True also where the
    exchange does not look."""


class Exchange(Protocol):
    """The working half of a strategy."""

    place: Place
    """In the present group."""

    def begin(self, rank: int, world_size: int) -> None:
        """An attempt at a step begins, in a group of this size. Does no communication."""

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add the gradients of `loss * weight`.

        Args:
            loss: a tensor with one element.
            weight: what it counts.
            is_last: sum the gradients over all ranks; they are complete when this returns.
            vote: with the last: to be summed too, at little cost.
            meanwhile: may be called while the last sums are on their way.
        """

    def settle(self, *, is_applied: bool, factor: float) -> None:
        """The step that went backward last is committed.

        Args:
            is_applied: its gradients were applied; else all ranks dropped them.
            factor: how many times as large the gradient of the same loss is in the next step.
        """

    def forget(self) -> None:
        """Parameters of another step were loaded: nothing of earlier steps is of use."""

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor on the CPU over all ranks, in place; blocks."""

    def owned(self) -> list[object]:
        """What it holds on to, that the user could see."""

    def end(self) -> None:
        """A run is over. Every rank comes here; the next run begins anew on all of them alike."""


class Strategy(Protocol):
    """The settings."""

    def check(self, global_batch: int) -> None:
        """Raise ValueError where the settings do not fit the trainer."""

    def exchange(self, module: nn.Module, num_votes: int) -> Exchange:
        """The working half, for this module and votes of so many numbers."""
