"""What ranks send in a step, by collective and between whom, from the tables of frames. Pure.

For what is drawn from tables in Python; the live view reckons by the same rules (`traffic.js`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.traffic import AXES, OPS, SHARES, Axis, Op, Road
from nbdist.views.facts import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.tables import Table

NUM_RECENT = 20
"""Steps over which a mean is taken."""
COLOURS = {
    Op.ALL_REDUCE: "#D55E00",
    Op.ALL_GATHER: "#0072B2",
    Op.REDUCE_SCATTER: "#E69F00",
    Op.ALL_TO_ALL: "#CC79A7",
    Op.BROADCAST: "#8c959f",
    Op.SEND: "#56B4E9",
}
COPIES_COLOUR = "#009E73"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a slot sends by one kind of exchange in a step, on average."""

    slot: int
    road: Road
    calls: float
    payload_bytes: float
    sent_bytes: float
    seconds: float
    """In which it goes on, waiting for others included; NaN: not known."""

    @property
    def name(self) -> str:
        """Of the exchange: "all-reduce, data"."""
        return road_name(self.road)

    @property
    def bytes_per_s(self) -> float:
        """What is sent while it goes on; NaN: not known."""
        return self.sent_bytes / self.seconds if self.seconds > 0 else float("nan")


def road_name(road: Road) -> str:
    """Of an exchange: "all-reduce, data"."""
    return f"{OPS[road.op]}, {AXES[road.axis]}"


def road_colour(road: Road) -> str:
    """Of an exchange."""
    return COPIES_COLOUR if road.axis is Axis.COPIES else COLOURS[road.op]


def share_text(road: Road) -> str:
    """How many times its payload a rank sends: " × 2(n−1)/n with n = 4"; empty: once."""
    times = SHARES[road.op][0]
    return "" if times == "1" else f" × {times} with n = {road.num_ranks}"


def flows(tables: Mapping[str, Table]) -> list[Flow]:
    """Of the newest steps of the newest group, by slot."""
    table = tables.get("traffic")
    if table is None or not len(table["step"]):
        return []
    recent = table["generation"] == table["generation"].max()
    keys = table["step"].astype(np.int64) * 256 + table["attempt"].astype(np.int64)
    recent &= keys >= np.unique(keys[recent])[-NUM_RECENT:][0]
    found = []
    for slot in np.unique(table["slot"][recent]).astype(int).tolist():
        own = recent & (table["slot"] == slot)
        num = len(np.unique(keys[own]))
        whose = np.stack([table[name][own].astype(int) for name in ("op", "axis", "ranks")])
        for op, axis, num_ranks in np.unique(whose, axis=1).T.tolist():
            its = (whose == np.array([[op], [axis], [num_ranks]])).all(axis=0)
            sums = {
                name: float(table[name][own][its].astype(np.float64).sum()) / num
                for name in ("calls", "payload_bytes", "sent_bytes", "seconds")
            }
            road = Road(Op(op), Axis(axis), num_ranks)
            found.append(Flow(slot=slot, road=road, **sums))
    return found


def sentence(shown: list[Flow]) -> str:
    """What they show."""
    sums: dict[int, float] = {}
    for flow in shown:
        sums[flow.slot] = sums.get(flow.slot, 0.0) + flow.sent_bytes
    if not any(sums.values()):
        return "What was sent is not known: one rank trained alone, or what was told is not kept."
    fullest = max(sums, key=lambda slot: sums[slot])
    most = max((f for f in shown if f.slot == fullest), key=lambda f: f.sent_bytes)
    rate = "" if np.isnan(most.bytes_per_s) else f", {size(most.bytes_per_s)}/s"
    return (
        f"Slot {fullest} sends most, {size(sums[fullest])} in a step, the largest part by "
        f"{most.name}: {size(most.payload_bytes)}{share_text(most.road)}{rate}."
    )
