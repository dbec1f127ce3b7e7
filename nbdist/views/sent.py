"""Loss against the bytes that all ranks have sent since a run began, from tables of frames. Pure.

For what is drawn from a story in Python; the live view reckons by the same rules (`sent.js`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.views.facts import loss_text, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nbdist.protocol.story import RunStory
    from nbdist.protocol.tables import Table

NOTHING = (
    "What a byte buys is not known: nothing was sent, as where one rank trains alone, or what was "
    "told of it is not kept, as in records of earlier versions."
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Committed steps of which it is known what was sent until then."""

    places: NDArray[np.intp]
    """In the story's rows."""
    sent_bytes: NDArray[np.float64]
    """By all ranks together, attempts that were given up included."""
    steps: NDArray[np.float64]
    losses: NDArray[np.float64]

    def at(self, step: float) -> float:
        """What was sent until then."""
        return float(np.interp(step, self.steps, self.sent_bytes))


def curve(story: RunStory) -> Curve:
    """Of a run; empty where nothing is known."""
    steps = story.rows["step"].astype(np.float64)
    told = _told(story.tables)
    last = max((float(its_steps[-1]) for its_steps, _ in told), default=-np.inf)
    places = np.flatnonzero(steps <= last)
    sums = np.zeros(len(places))
    for its_steps, its_bytes in told:
        sums += np.interp(steps[places], its_steps, its_bytes, left=0.0)
    losses = story.rows["loss"][places].astype(np.float64)
    return Curve(places=places, sent_bytes=sums, steps=steps[places], losses=losses)


def sentence(shown: Curve) -> str:
    """What it shows."""
    known = np.flatnonzero(np.isfinite(shown.losses))
    if not len(known):
        return NOTHING
    sent, losses = shown.sent_bytes[known], shown.losses[known]
    num = shown.steps[known[-1]] - shown.steps[known[0]]
    each = (sent[-1] - sent[0]) / num if num else sent[-1]
    first, last = losses[0], losses[-1]
    half = sent[int(np.argmax(losses <= (first + last) / 2))]
    way = f", half of the way with the first {size(half)}" if last < first else ""
    return (
        f"All ranks together have sent {size(sent[-1])}, {size(each)} in a step; "
        f"the loss went from {loss_text(first)} to {loss_text(last)}{way}."
    )


def _told(tables: Mapping[str, Table]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of each slot: steps, rising, and what was sent by the last attempt at each or at one before.

    Where steps are trained again, what they had cost before counts, too.
    """
    table = tables.get("sent")
    if table is None:
        return []
    found = []
    for slot in np.unique(table["slot"]):
        own = table["slot"] == slot
        steps, sent = (table[name][own].astype(np.float64) for name in ("step", "sent_bytes"))
        order = np.argsort(steps, kind="stable")
        steps, sent = steps[order], np.maximum.accumulate(sent[order])
        is_last = np.append(np.diff(steps) > 0, [True])
        found.append((steps[is_last], sent[is_last]))
    return found
