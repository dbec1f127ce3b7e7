"""Looks at replicas: when ranks are looked at, and how a digest of a block is told. Pure.

A *block* is a part of the model, as its names divide it; a *look* is the digests of all blocks of
all ranks at one step boundary.
"""

from __future__ import annotations

from typing import NamedTuple

EVERY = 100
"""Steps from one look to the next; besides, after a run's first step in a group, and its last."""
MAX_BLOCKS = 48
"""One bit of a float64 for each; a model that has more names has some together."""
DIGEST_BITS = 52
"""Of a digest: as many as a float64 holds exactly."""


class Of(NamedTuple):
    """What a digest is of."""

    block: int
    stride: int = 1
    """One value in so many was looked at."""
    is_anchor: bool = False
    """Ranks train apart: not what the rank has now, but what all came to at the last outer step."""


def packed(of: Of) -> int:
    """For a record's `ident`."""
    return of.block + MAX_BLOCKS * (2 * (of.stride - 1) + of.is_anchor)


def unpacked(ident: int) -> Of:
    """What `packed` was given."""
    rest, block = divmod(ident, MAX_BLOCKS)
    return Of(block, rest // 2 + 1, is_anchor=bool(rest % 2))


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
