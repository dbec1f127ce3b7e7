"""What ranks are estimated to need, and how that is shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.train.strategies import Strategy

_MB = 1e6
_COLUMNS = ("parameters", "gradients", "optimizer", "gathered", "copies", "together", "sent")


class Need(NamedTuple):
    """What one rank needs, in bytes."""

    parameters: int
    """Those that it keeps."""
    gradients: int
    """Of those that are trained."""
    optimizer: int
    """What the optimizer keeps for each of them."""
    gathered: int = 0
    """Parameters and gradients that are there as a whole for a time, at most; not the buffers in
    which they travel."""
    copies: int = 0
    """Its own state and the neighbour's, kept for a loss (`copy_every`), at most; of ranks that
    train apart, the parameters of the last outer step and the outer momentum."""
    sent: int | None = None
    """Payload that it hands to collectives and sends in a step, on the average where it does not
    in each; None: not known."""

    @property
    def together(self) -> int:
        """Of memory."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.copies


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a strategy costs. Activations and buffers are not counted, nor what a process needs."""

    strategy: Strategy
    ranks: tuple[Need, ...]
    """Each rank's."""
    idle_share: float | None = None
    """The part of a step in which a rank waits, as far as the strategy has it so by nature."""

    def __repr__(self) -> str:
        """As a table; ranks that need the same are one row."""
        rows: list[tuple[str, ...]] = [("MB on rank", *_COLUMNS)]
        for first, last, need in _alike(self.ranks):
            numbers = [getattr(need, name) for name in _COLUMNS]
            cells = ["?" if number is None else f"{number / _MB:.3g}" for number in numbers]
            rows.append((f"{first}" if first == last else f"{first}-{last}", *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        idle = "" if self.idle_share is None else f"; idle {self.idle_share:.0%} of a step"
        return "\n".join([f"{self.strategy!r}{idle}", *lines])


def _alike(needs: Sequence[Need]) -> list[tuple[int, int, Need]]:
    runs: list[tuple[int, int, Need]] = []
    for rank, need in enumerate(needs):
        if runs and runs[-1][2] == need:
            runs[-1] = (runs[-1][0], rank, need)
        else:
            runs.append((rank, rank, need))
    return runs
