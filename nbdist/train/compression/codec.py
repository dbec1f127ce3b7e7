"""What every codec is to the courier. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator

    from nbdist.train.compression.parcel import Parcel
    from nbdist.train.compression.residual import Residual
    from nbdist.train.compression.rounds import Wait


class Codec(Protocol):
    """One way to sum gradients in fewer bytes than they have."""

    residual: Residual
    """Of this rank. Empty for ever where a codec has no error feedback."""

    def rounds(self, parcel: Parcel) -> Generator[Wait, None, None]:
        """Sum a parcel over all ranks: `parcel.put` the same bits on each.

        Yields what to wait for whenever it has begun a collective. What an attempt leaves is noted
        before the last one begins: who has not come that far cannot have been of use to the others.
        """
