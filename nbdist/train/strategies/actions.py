"""A schedule of the user's own: read, and checked before any rank enters it.

An action is written as torch writes it: stage, kind, micro-batch, so "2F0" is stage 2 going forward
with micro-batch 0. Kinds are F (forward), B (backward), or in its place I (backward to the inputs)
and later W (backward to the weights). Every message names the rank, and the position in its list.
Runs in the engine's main thread. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nbdist.protocol.plans import TAKES, Action, needed_from_others, walk
from nbdist.train.checks import shown

if TYPE_CHECKING:
    from typing import Any

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class _At(NamedTuple):
    rank: int
    position: int

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}"


Actions = dict[int, list[Action]]
"""Rank -> its actions, in order."""


def parse(order: Any) -> Actions:
    """Read a schedule: rank -> list of "2F0" and the like; None stands for nothing.

    Raises:
        TypeError, ValueError: it is something else; the message names rank and position.
    """
    if not isinstance(order, Mapping) or set(order) != set(range(len(order))) or not order:
        raise TypeError(
            f"schedule is {shown(order)}; it must be a name, or a dict from each rank, 0 to the "
            'last, to a list of actions such as "0F0"'
        )
    return {rank: _parse_rank(rank, order[rank]) for rank in range(len(order))}


def _parse_rank(rank: int, listed: Any) -> list[Action]:
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise TypeError(f"schedule[{rank}] is {shown(listed)}; it must be a list of actions")
    actions = []
    for position, text in enumerate(listed):
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is not None:
            actions.append(Action(int(match[1]), match[2], int(match[3])))
        elif text is not None:
            raise ValueError(
                f"schedule, {_At(rank, position)}: {shown(text)} is no action; write stage, "
                'F, B, I or W, and micro-batch, as in "2F0"'
            )
    return actions


def check(actions: Actions, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """See that a schedule trains every micro-batch once, and comes to its end.

    Returns:
        For each stage the rank that has it.

    Raises:
        ValueError: it does not; the message names rank and position.
    """
    owners = _owners(actions, num_stages, num_microbatches)
    places = _places(actions)
    _check_missing(places, actions, owners, num_microbatches)
    _check_deadlock(actions, num_stages)
    return owners


def _owners(actions: Actions, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    owners: dict[int, _At] = {}
    for rank, listed in actions.items():
        for position, action in enumerate(listed):
            at = _At(rank, position)
            if action.stage >= num_stages or action.microbatch >= num_microbatches:
                raise ValueError(
                    f"schedule, {at}: {action} is out of range; there are stages 0 to "
                    f"{num_stages - 1} and micro-batches 0 to {num_microbatches - 1}"
                )
            first = owners.setdefault(action.stage, at)
            if first.rank != rank:
                raise ValueError(
                    f"schedule, {at}: {action} is on another rank than stage {action.stage} at "
                    f"{first}; a stage stays on one rank"
                )
    missing = sorted(set(range(num_stages)) - set(owners))
    if missing:
        raise ValueError(f"schedule: no rank has stage {missing[0]}")
    idle = [rank for rank, listed in actions.items() if not listed]
    if idle:
        raise ValueError(f"schedule, rank {idle[0]}: it has no action; each rank has a stage")
    return tuple(owners[stage].rank for stage in range(num_stages))


def _places(actions: Actions) -> dict[Action, _At]:
    """Where each action stands; doubled ones, and those before what they need, are refused."""
    places: dict[Action, _At] = {}
    for rank, listed in actions.items():
        for position, action in enumerate(listed):
            at = _At(rank, position)
            twin = _twin(action, places)
            if twin is not None:
                raise ValueError(f"schedule, {at}: {action} doubles {twin} at {places[twin]}")
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            needed = action._replace(kind=before) if before else None
            if needed is not None and needed not in places:
                raise ValueError(f"schedule, {at}: {action} comes before {needed}")
            places[action] = at
    return places


def _twin(action: Action, places: dict[Action, _At]) -> Action | None:
    """What has done the same already."""
    same = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}[action.kind]
    twins = (action._replace(kind=kind) for kind in same)
    return next((twin for twin in twins if twin in places), None)


def _check_missing(
    places: dict[Action, _At], actions: Actions, owners: tuple[int, ...], num_microbatches: int
) -> None:
    for stage, rank in enumerate(owners):
        for microbatch in range(num_microbatches):
            has = {kind for kind in "FBIW" if Action(stage, kind, microbatch) in places}
            lacks = "F" if "F" not in has else "B" if not has & {"B", "I"} else ""
            lacks = "W" if not lacks and "I" in has and "W" not in has else lacks
            if lacks:
                action = Action(stage, lacks, microbatch)
                end = _At(rank, len(actions[rank]))
                raise ValueError(f"schedule, {end}: the list ends, and {action} is missing")


def _check_deadlock(actions: Actions, num_stages: int) -> None:
    next_at = walk(actions, num_stages).next_at
    stuck = [rank for rank, listed in actions.items() if next_at[rank] < len(listed)]
    if stuck:
        waits = []
        for rank in stuck:
            action = actions[rank][next_at[rank]]
            needed = needed_from_others(action, num_stages)[0]
            waits.append(f"{_At(rank, next_at[rank])}: {action} waits for {needed}")
        raise ValueError(f"schedule: deadlock. {'; '.join(waits)}")


def idle_share(actions: Actions, num_stages: int) -> float:
    """The share of a step in which ranks wait.

    As if nothing were sent, and a forward took as long as each half of a backward.
    """
    busy = sum(TAKES[action.kind] for listed in actions.values() for action in listed)
    return 1 - busy / (walk(actions, num_stages).makespan * len(actions))
