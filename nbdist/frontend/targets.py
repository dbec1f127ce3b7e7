"""Rank selections as users write them: `0,2`, `1-3`, `::2`, `all`, `!2`. Pure, and without `eval`.

Used by the magics in the kernel, which hand the session ranks only.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from nbdist.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["format_ranks", "name_ranks", "parse_targets"]

_RANK = re.compile(r"(\d{1,9})", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})\s*-\s*(\d{1,9})", re.ASCII)
_BOUND = r"\s*(-?\d{1,9})?\s*"
_SPELLINGS = "write 0,2 or 1-3 or ::2 or -1: (the last) or all or !2 (all but 2)"
_SLICE = re.compile(f"{_BOUND}:{_BOUND}(?::{_BOUND})?", re.ASCII)


def parse_targets(text: str, world_size: int) -> tuple[int, ...]:
    """Read a selection of ranks and return them in rank order, each once.

    Parts are separated by commas: `2`, `1-3` (3 included), a slice as in Python (`1:3` is 1 and 2;
    also `::2` and `-2:`), `all`. From the first `!` on, parts are taken away instead; where nothing
    stands before it, from all ranks.

    Args:
        text: what the user wrote.
        world_size: number of ranks in the present world.

    Raises:
        TargetError: a part cannot be read or names a rank that the world does not have, or no
            rank is left.
    """
    kept: set[int] = set()
    dropped: set[int] = set()
    takes_away = False
    for index, raw in enumerate(text.split(",")):
        part = raw.strip()
        if part.startswith("!"):
            if index == 0:
                kept.update(range(world_size))
            takes_away = True
            part = part[1:].strip()
        (dropped if takes_away else kept).update(_ranks_of(part, world_size, whole=text))
    ranks = tuple(sorted(kept - dropped))
    if not ranks:
        message = f"{text.strip()!r} selects none of the {name_ranks(range(world_size))}; name one"
        raise TargetError(message)
    return ranks


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks shortly, neighbours as a range: 0, 1, 2, 5 is `0-2,5`."""
    places = enumerate(sorted(set(ranks)))
    runs = [[rank for _, rank in run] for _, run in groupby(places, key=lambda p: p[1] - p[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence or heading: `rank 2`, `ranks 0-3`, `no ranks`."""
    chosen = set(ranks)
    if not chosen:
        return "no ranks"
    return f"{'rank' if len(chosen) == 1 else 'ranks'} {format_ranks(chosen)}"


def _ranks_of(part: str, world_size: int, *, whole: str) -> range:
    """The ranks of one part, without its `!`."""
    if part == "all":
        return range(world_size)
    if found := _RANK.fullmatch(part) or _RANGE.fullmatch(part):
        first, last = int(found[1]), int(found[found.lastindex or 1])
        if first > last:
            raise _unreadable(part, whole, f"it runs backwards; write {last}-{first}")
        if last >= world_size:
            raise _missing(max(first, world_size), last, world_size)
        return range(first, last + 1)
    if found := _SLICE.fullmatch(part):
        start, stop, step = (int(bound) if bound else None for bound in found.groups())
        if step == 0:
            raise _unreadable(part, whole, "the step of a slice cannot be 0")
        return range(world_size)[start:stop:step]
    if not part:
        raise _unreadable(part, whole, "name a rank there, or take the comma or ! away")
    raise _unreadable(part, whole, _SPELLINGS)


def _unreadable(part: str, whole: str, advice: str) -> TargetError:
    return TargetError(f"cannot read {part!r} in the ranks {whole.strip()!r}: {advice}")


def _missing(first: int, last: int, world_size: int) -> TargetError:
    wanted = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return TargetError(
        f"there is no {wanted} in this world, which has {name_ranks(range(world_size))}; "
        f"name ranks that it has (%dist_status lists them), or grow it with %dist_scale {last + 1}"
    )
