"""What every rank says at the end of a step, and how it travels with the gradients.

A vote is a few numbers that are summed over the ranks. A sum of its own would cost a round through
all of them, so a vote may go along with the gradients, whose type is float32: each number is split
into two of them, which together hold 48 bits. Runs in the engine's main thread. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LOSS, COUNT, HOLD, FIRST_BUFFER = range(4)
"""Places in the vote; one for each buffer follows."""


def split(vote: Sequence[float]) -> NDArray[np.float32]:
    """Two numbers for each; what is not finite stays so."""
    wide = np.array(vote)
    pairs = np.empty((2, len(wide)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs[0] = wide
        pairs[1] = wide - pairs[0]
    return pairs


def join(pairs: Sequence[float]) -> list[float]:
    """The numbers that sums of pairs stand for; the first halves come first."""
    num = len(pairs) // 2
    return [high + low for high, low in zip(pairs[:num], pairs[num:], strict=True)]
