"""What one rank holds of a model of which the others hold the rest.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.train.strategies.axes import Axes, Portion


class Holding(nn.Module):
    """A part of a model, whose parameters have the names that they have in the whole.

    Args:
        portion: whose it is, of how many.
    """

    def __init__(self, portion: Portion) -> None:
        super().__init__()
        self.portion = portion
        self.axes: Axes
        """How the ranks share the model; said by who has it cut, as is `again`."""
        self.again: Callable[[int], Any]
        """Cuts the same model for the group that there is then, into so many stages; ValueError:
        it cannot be."""
        self.source: list[Any] = []
        """Where the user gave a module: what of it is to be taken from rank 0."""

    @property
    def num_stages(self) -> int:
        """Into how many the model is cut; where there are none, as many as ranks have a part."""
        return self.portion.num_ranks

    def take_from_first(self) -> bool:
        """Have the weights of rank 0, where the user gave a module; whether that is so."""
        raise NotImplementedError
