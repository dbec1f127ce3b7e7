"""Looks at replicas: when ranks are looked at, and how a digest of a block is told. Pure.

A *block* is a part of the model, as its names divide it; a *look* is the digests of all blocks of
all ranks at one step boundary.
"""

from __future__ import annotations

EVERY = 100
"""Steps from one look to the next; besides, after a run's first step in a group, and its last."""
MAX_BLOCKS = 48
"""One bit of a float64 for each; a model that has more names has some together."""
DIGEST_BITS = 52
"""Of a digest: as many as a float64 holds exactly."""


def packed(block: int, stride: int) -> int:
    """For a record's `ident`: which block, of which one value in so many was looked at."""
    return block + MAX_BLOCKS * (stride - 1)


def unpacked(ident: int) -> tuple[int, int]:
    """Block and stride."""
    stride, block = divmod(ident, MAX_BLOCKS)
    return block, stride + 1


def is_due(step: int, began: int, last: int | None, until: int) -> bool:
    """Whether to look at this boundary; every rank of a group says the same.

    Args:
        step: committed steps.
        began: with how many the run began in the present group. A look there would make a recovery
            longer; so the first is a step later.
        last: of the last look since then; None: there was none.
        until: so many steps the run has.
    """
    is_one = step == began + 1 or step % EVERY == 0 or step >= until
    return is_one and step > began and step != last
