"""How far apart ranks are: how late updates come to a server, how far replicas drift. Pure.

For what is drawn from tables in Python; the live view reckons by the same rules (`distance.js`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import Kind
from nbdist.views.facts import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from nbdist.protocol.tables import Table

COLOUR = "#0072B2"
"""Of numbers of updates."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far one slot's parameters were from the mean of all, as a share of their length."""

    slot: int
    last: float
    """At the last outer step."""
    most: float


def ages(tables: Mapping[str, Table]) -> dict[int, int]:
    """How many updates came after so many others that their worker had not seen."""
    values = _values(tables, Kind.STALENESS)[1].astype(int)
    found, nums = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), nums.tolist(), strict=True))


def counts(ages: Mapping[int, int], max_lanes: int) -> list[tuple[str, int]]:
    """A lane for each age from 0 on, and one for all that are older than have room."""
    oldest = max(ages)
    last = min(oldest, max_lanes - 1)
    lanes = [(f"{age} between", ages.get(age, 0)) for age in range(last)]
    rest = sum(num for age, num in ages.items() if age >= last)
    return [*lanes, (f"{last}{'' if oldest == last else ' and more'} between", rest)]


def drifts(tables: Mapping[str, Table]) -> list[Drift]:
    """By slot."""
    slots, values = _values(tables, Kind.DRIFT)
    found = []
    for slot in np.unique(slots).astype(int).tolist():
        own = values[slots == slot]
        found.append(Drift(slot=slot, last=float(own[-1]), most=float(own.max())))
    return found


def sentence(ages: Mapping[int, int], drifts: Sequence[Drift]) -> str:
    """What they show."""
    if ages:
        total, at_once = sum(ages.values()), ages.get(0, 0)
        middle = np.repeat(list(ages), list(ages.values()))
        middle.sort()
        return (
            f"Of {counted(total, 'update')} {100 * at_once / total:.0f}% came at once; half after "
            f"at most {counted(int(middle[(total - 1) // 2]), 'other')} that their worker had not "
            f"seen, and none after more than {max(ages)}."
        )
    if drifts:
        farthest = max(drifts, key=lambda drift: drift.last)
        most = max(drift.most for drift in drifts)
        return (
            f"At the last outer step slot {farthest.slot} was farthest from the mean of all, by "
            f"{100 * farthest.last:.2f}% of the parameters' length; at most it was "
            f"{100 * most:.2f}% for any."
        )
    return "Nothing is known of ranks that are apart: all had the same parameters in each step."


def _values(
    tables: Mapping[str, Table], kind: Kind
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Slots and values of one kind, oldest first."""
    table = tables.get("distance")
    if table is None or not len(table["at"]):
        return np.empty(0), np.empty(0)
    own = np.flatnonzero(table["kind"] == kind)
    own = own[np.argsort(table["at"][own], kind="stable")]
    return table["slot"][own].astype(float), table["value"][own].astype(float)
