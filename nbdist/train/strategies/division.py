"""The pieces that one rank has of the parameters of layers that it computes with.

What a rank holds of a model has a division, which says how the layers and the trainer's parameters
go together: the layers compute with torch's own, or with whole ones that come and go. This one is
that of layers which the rank has whole. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.train.strategies.axes import Portion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from nbdist.train.parting import Origin


class Division:
    """Layers that a rank has whole; those of other kinds derive from it.

    Args:
        portion: which pieces are this rank's, of how many; None: all.
    """

    def __init__(self, portion: Portion | None = None) -> None:
        self.portion = portion or Portion(0, 1)
        self.own: dict[str, nn.Parameter] = {}
        """Name -> this rank's piece, as the trainer has it."""
        self.origins: dict[str, Origin] = {}
        """Where each begins in the whole parameter."""

    @property
    def is_first(self) -> bool:
        """Whether what it comes to counts: others may come to the same, which is not to count."""
        return True

    def counts(self, name: str) -> bool:
        """Whether its piece of a parameter counts, where something is summed over the model."""
        del name
        return True

    def layer(self, name: str, old: nn.Parameter, value: Tensor) -> nn.Parameter:
        """Keep a piece of a parameter; what its layer is to compute with.

        Args:
            name: in the whole model.
            old: as the layer has it, without memory.
            value: of the whole; it stays as it is.
        """
        raise NotImplementedError

    def bind(self, *, is_new: bool) -> None:
        """An attempt begins, with nothing left of the one before; `is_new`: in a new group."""

    def come(self) -> None:
        """Layers are about to compute."""

    def go(self) -> None:
        """They do so no longer."""

    def take_gradients(self) -> None:
        """Backward passes are over: what they gave is added to the gradients of the pieces."""

    def check(self, order: Mapping[str, int], sum_: Callable[[Tensor], None]) -> None:
        """In the first step in a group: see that ranks agree where they should.

        Args:
            order: places of all names of the whole model.
            sum_: sums a tensor over all ranks that hold it.

        Raises:
            ValueError: they do not; on all of them alike.
        """

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have pieces of, as of this parameter."""
        del name
        return piece.clone()
