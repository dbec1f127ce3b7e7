"""What engines hold in memory: now, at most so far, what they can have, from frames' tables. Pure.

For what is drawn from tables in Python; the live view reckons by the same rules (`memory.js`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import Kind
from nbdist.views.facts import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.tables import Table

NAN = float("nan")
PEAK_COLOUR = "#d9dce0"
DEVICE_COLOUR = "#CC79A7"
_FULL = 0.9
"""Of what it can have: more is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One slot's, in bytes; NaN: not known."""

    slot: int
    first: float
    """Resident when the run began."""
    now: float
    peak: float
    limit: float
    device_first: float
    device: float
    device_used: float
    device_limit: float

    @property
    def growth(self) -> float:
        """Since the run began, of what grows on the GPU where there is one."""
        grown = self.device - self.device_first
        return self.now - self.first if np.isnan(grown) else grown

    @property
    def share(self) -> float:
        """How much is taken of what it can have, by whichever is nearer to its end."""
        shares = [self.now / self.limit, self.device / self.device_limit]
        known = [share for share in shares if np.isfinite(share)]
        return max(known, default=NAN)


def holdings(tables: Mapping[str, Table]) -> list[Holding]:
    """By slot."""
    table = tables.get("memory")
    if table is None or not len(table["at"]):
        return []

    def ends(slot: int, kind: Kind) -> tuple[float, float]:
        own = (table["slot"] == slot) & (table["kind"] == kind)
        values = table["bytes"][own][np.argsort(table["at"][own], kind="stable")]
        return (float(values[0]), float(values[-1])) if len(values) else (NAN, NAN)

    found = []
    for slot in np.unique(table["slot"]).astype(int).tolist():
        first, now = ends(slot, Kind.MEMORY_RSS)
        device_first, device = ends(slot, Kind.MEMORY_DEVICE)
        found.append(
            Holding(
                slot=slot,
                first=first,
                now=now,
                peak=ends(slot, Kind.MEMORY_PEAK)[1],
                limit=ends(slot, Kind.MEMORY_LIMIT)[1],
                device_first=device_first,
                device=device,
                device_used=ends(slot, Kind.MEMORY_DEVICE_USED)[1],
                device_limit=ends(slot, Kind.MEMORY_DEVICE_LIMIT)[1],
            )
        )
    return found


def sentence(shown: list[Holding]) -> str:
    """What they show."""
    known = [holding for holding in shown if np.isfinite(holding.now)]
    if not known:
        return "What engines hold is not known: nothing was told of it, or it is not kept."
    most = max(known, key=lambda holding: holding.now)
    grown = max(known, key=lambda holding: holding.growth)
    of = f" of {size(most.limit)} that it can have" if np.isfinite(most.limit) else ""
    end = "" if not most.share >= _FULL else " That is close to the end."
    return (
        f"Slot {most.slot} holds most, {size(most.now)}{of}; all together "
        f"{size(sum(holding.now for holding in known))}. Since the run began slot {grown.slot} "
        f"has grown most, by {size(max(0.0, grown.growth))}.{end}"
    )
