"""Whether replicas are identical: in which blocks of the model whose differ, and since when. Pure.

For what is drawn from tables in Python; the live view reckons by the same rules (`agreement.js`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.looks import EVERY
from nbdist.views.bars import Bar, Lanes
from nbdist.views.facts import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.protocol.tables import Table

EQUAL_COLOUR, DIFFERS_COLOUR = "#0072B2", "#D55E00"
_EQUAL, _DIFFERS = (0.4, 0.6), (0.15, 0.85)
"""Where in its lane a block is drawn: one that differs is to be seen without its colour."""
MAX_NAMED = 4
"""Slots that differ of which each is told in words."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What all slots' replicas were like at one step boundary."""

    step: int
    """Committed steps."""
    blocks: int
    """How many the model has."""
    stride: int
    """One value in so many was looked at."""
    is_anchor: bool
    """It is what slots that train apart came to at the last outer step."""
    differs: dict[int, tuple[int, ...]]
    """Slot -> blocks that are not as most slots have them; by slot."""

    @property
    def found(self) -> dict[int, tuple[int, ...]]:
        """Those slots that differ."""
        return {slot: blocks for slot, blocks in self.differs.items() if blocks}


def looks(tables: Mapping[str, Table]) -> list[Look]:
    """Oldest first."""
    table = tables.get("agreement")
    if table is None or not len(table["at"]):
        return []
    found = []
    for at in np.unique(table["at"]):
        places = np.flatnonzero(table["at"] == at)
        places = places[np.argsort(table["slot"][places], kind="stable")]
        one = places[0]
        num = int(table["blocks"][one])
        masks = {int(table["slot"][place]): int(table["differs"][place]) for place in places}
        found.append(
            Look(
                step=int(table["step"][one]),
                blocks=num,
                stride=int(table["stride"][one]),
                is_anchor=bool(table["anchors"][one]),
                differs={
                    slot: tuple(block for block in range(num) if mask >> block & 1)
                    for slot, mask in masks.items()
                },
            )
        )
    return found


def sentence(looks: Sequence[Look]) -> str:
    """What they show."""
    if not looks:
        return (
            "No two replicas are known that were compared. They are where ranks hold the whole "
            "model each, as with DataParallel, or what they have agreed on, as with LocalSGD: "
            "after a run's first step and its last, after the first in each new group, and every "
            f"{EVERY} steps."
        )
    newest = looks[-1]
    first = next((look for look in looks if look.found), None)
    num = f"{counted(len(newest.differs), 'replica')} in {counted(newest.blocks, 'block')}"
    how = f"looked at every {EVERY} steps{_share(newest)}"
    if newest.found:
        assert first is not None
        return f"At step {newest.step} {_who(newest)}; first seen at step {first.step}; {how}."
    before = f"; but at step {first.step} {_who(first)}" if first is not None else ""
    what = f"all {num} were"
    if newest.is_anchor:
        what = f"what all {num} had come to at the last outer step was"
    return f"At step {newest.step} {what} identical, bit for bit{before}; {how}."


def drawn(looks: Sequence[Look], max_lanes: int) -> Lanes:
    """The newest as a lane for each slot, with a bar for each block."""
    keys = ((EQUAL_COLOUR, "equal"), (DIFFERS_COLOUR, "differs"))
    unit, said = "blocks of the model", sentence(looks)
    if not looks:
        return Lanes(unit=unit, sentence=said)
    newest = looks[-1]
    shown = list(newest.differs.items())[:max_lanes]
    bars = [
        _bar(lane, block, keys[block in others], _DIFFERS if block in others else _EQUAL)
        for lane, (_, others) in enumerate(shown)
        for block in range(newest.blocks)
    ]
    return Lanes(
        unit=f"{unit}, at step {newest.step}",
        sentence=said,
        names=tuple(f"slot {slot}" for slot, _ in shown),
        bars=bars,
        keys=keys,
        is_measured=False,
    )


def _bar(lane: int, block: int, key: tuple[str, str], place: tuple[float, float]) -> Bar:
    colour, what = key
    top, bottom = place
    return Bar(
        lane=lane,
        top=top,
        bottom=bottom,
        began=block + 0.04,
        ended=block + 0.96,
        colour=colour,
        what=f"block {block} {what}",
    )


def _who(look: Look) -> str:
    named = list(look.found.items())[:MAX_NAMED]
    parts = [
        f"slot {slot} differs in {'block' if len(blocks) == 1 else 'blocks'} "
        f"{', '.join(map(str, blocks))}"
        for slot, blocks in named
    ]
    more = len(look.found) - len(named)
    return ", ".join([*parts, *([f"and {counted(more, 'other')}"] if more else [])])


def _share(look: Look) -> str:
    if look.stride == 1:
        return ""
    return f", one value in {look.stride:,} of each block, others each time"
