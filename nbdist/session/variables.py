"""The engines' variables side by side: which are equal on all ranks, and how far others are apart.

Runs in the kernel, in the thread that calls; loads no torch. No values come here but the numbers of
small variables that differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol import calls
from nbdist.protocol.variables import MAX_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.protocol.variables import Described
    from nbdist.session.engine_calls import EngineCalls

MAX_ASKED = 1 << 20
"""So many numbers a rank is asked for, over all variables."""


@dataclass(frozen=True)
class Variable:
    """One name on the engines."""

    name: str
    ranks: Mapping[int, Described]
    """Rank -> what it has under this name."""
    missing: tuple[int, ...] = ()
    """Ranks that have nothing under it."""
    is_equal: bool | None = None
    """On all ranks; None: they were not compared."""
    why_not_compared: str = ""
    differing: tuple[int, ...] = ()
    """Ranks with another value than `like`."""
    like: int = 0
    """The lowest of those ranks whose value most of them have."""
    distance: Mapping[int, float] = field(default_factory=dict)
    """Differing rank -> largest absolute difference from `like`, where it was worked out."""


def variables_of(engine_calls: EngineCalls, names: Sequence[str]) -> list[Variable]:
    """Ask all ranks, between two steps where a run goes on.

    Args:
        engine_calls: to the engines.
        names: which variables, however large; none: all.

    Raises:
        ValueError: no rank has one of these names.
    """
    with engine_calls.between(None) as run:
        told: dict[int, dict[str, Described]] = engine_calls.call(calls.VARIABLES, run, names)
        found = compare(told)
        if missing := sorted(set(names) - {one.name for one in found}):
            text = f"no rank has a variable {', '.join(missing)} (private names are not looked at)"
            raise ValueError(text)
        if asked := _to_be_asked(found):
            answers: dict[int, dict[str, bytes]] = engine_calls.call(calls.NUMBERS, run, asked)
            found = [_with_distance(one, answers) for one in found]
    return found


def compare(told: Mapping[int, Mapping[str, Described]]) -> list[Variable]:
    """What each rank tells of its variables, name by name."""
    names = sorted({name for of_rank in told.values() for name in of_rank})
    if any(len(of_rank) == MAX_NAMES for of_rank in told.values()):
        # Where one rank stopped early, what another has beyond that is not missing there.
        names = names[:MAX_NAMES]
    return [
        _compared(name, {r: of[name] for r, of in told.items() if name in of}, told)
        for name in names
    ]


def _compared(name: str, ranks: dict[int, Described], everyone: Iterable[int]) -> Variable:
    missing = tuple(sorted(set(everyone) - set(ranks)))
    form = _apart({rank: one.form for rank, one in ranks.items()})
    why = next((one.not_compared for one in ranks.values() if one.not_compared), "")
    like, differing = form
    if not differing and not why:
        like, differing = _apart({rank: one.digest for rank, one in ranks.items()})
    is_equal = False if missing or differing else None if why else True
    return Variable(
        name, ranks, missing, is_equal, "" if differing else why, differing=differing, like=like
    )


def _apart(of_ranks: Mapping[int, object]) -> tuple[int, tuple[int, ...]]:
    """The lowest rank of the largest group with the same, and the ranks that are not in it."""
    groups: dict[object, list[int]] = {}
    for rank, one in sorted(of_ranks.items()):
        groups.setdefault(one, []).append(rank)
    largest = max(groups.values(), key=len)
    return largest[0], tuple(rank for rank in sorted(of_ranks) if rank not in largest)


def _to_be_asked(found: Iterable[Variable]) -> list[str]:
    """Names of which it is worked out how far ranks are apart: what differs in value alone."""
    asked, left = [], MAX_ASKED
    for one in found:
        forms = {of_rank.form for of_rank in one.ranks.values()}
        num = one.ranks[one.like].num_numbers
        if one.differing and len(forms) == 1 and 0 < num <= left:
            asked.append(one.name)
            left -= num
    return asked


def _with_distance(one: Variable, answers: Mapping[int, Mapping[str, bytes]]) -> Variable:
    held = {
        rank: np.frombuffer(answers[rank][one.name])
        for rank in (one.like, *one.differing)
        if one.name in answers[rank]
    }
    like = held.get(one.like)
    if like is None:
        return one
    far = {r: _largest(like, held[r]) for r in one.differing if r in held}
    return replace(one, distance={r: d for r, d in far.items() if d is not None})


def _largest(a: np.ndarray, b: np.ndarray) -> float | None:
    """The largest absolute difference: nan where one alone is not a number."""
    if a.shape != b.shape or not a.size:
        return None
    with np.errstate(invalid="ignore"):
        is_same = (a == b) | (np.isnan(a) & np.isnan(b))
        return float(np.max(np.where(is_same, 0.0, np.abs(a - b))))
