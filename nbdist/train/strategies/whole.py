"""What exchanges have in common where every rank holds the whole model.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from nbdist.train.strategies.base import Turn


class OfWhole:
    """Computes with the whole model.

    Args:
        module: the model.
    """

    is_lockstep = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def fits(self, rank: int, world_size: int) -> bool:  # noqa: ARG002 - any will do
        """Any group will do."""
        return True

    def train(self, batch: Any, turn: Turn) -> None:
        """Forward and backward."""
        turn.backward(turn.objective(turn.module, batch))

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """A gradient is on one rank as a whole."""
        return nn.utils.get_total_norm(gradients)

    def predict(self, inputs: Any) -> Any:
        """What the model returns."""
        return self._module(inputs)

    def owned(self) -> list[object]:
        """Nothing that the user could see."""
        return []
