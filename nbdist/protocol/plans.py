"""Orders of a pipeline: what each rank is to do with which micro-batch, and when at the earliest.

Checked by the trainer, told by engines as telemetry, drawn beside what was measured. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nbdist.protocol.telemetry import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAKES = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long each kind of action takes, in forwards."""
KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}
_LETTERS = {kind: letter for letter, kind in KINDS.items()}
_KIND_DIGITS, _BATCH_DIGITS, _STAGE_DIGITS = 10**2, 10**5, 10**4


class Action(NamedTuple):
    """What a rank does with one micro-batch on one of its stages."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Walk(NamedTuple):
    """How far each rank gets when all go through their lists at once."""

    ends: dict[int, list[int]]
    """Rank -> for each action that it comes to when it is done, in the units of `TAKES`."""

    @property
    def next_at(self) -> dict[int, int]:
        """Rank -> position of the first action that it does not come to."""
        return {rank: len(ends) for rank, ends in self.ends.items()}

    @property
    def makespan(self) -> int:
        """From the first beginning to the last end."""
        return max((end for ends in self.ends.values() for end in ends), default=0)


def needed_from_others(action: Action, num_stages: int) -> list[Action]:
    """What must be done before, on whichever rank: one of these; empty: nothing."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind in "BI":
        behind = stage + 1
        return [Action(behind, k, microbatch) for k in "BI"] if behind < num_stages else []
    return []


def walk(actions: Mapping[int, Sequence[Action]], num_stages: int) -> Walk:
    """As if nothing were sent, and a forward took as long as each half of a backward."""
    done: dict[Action, int] = {}
    walked = Walk({rank: [] for rank in actions})
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, listed in actions.items():
            ends = walked.ends[rank]
            while len(ends) < len(listed):
                action = listed[len(ends)]
                needed = needed_from_others(action, num_stages)
                there = [done[other] for other in needed if other in done]
                if needed and not there:
                    break
                begins = max(ends[-1] if ends else 0, *there, 0)
                done[action] = begins + TAKES[action.kind]
                ends.append(done[action])
                is_moving = True
    return walked


def packed(action: Action, num_stages: int) -> float:
    """An action as the value of a record: how many stages there are, stage, micro-batch, kind."""
    number = num_stages * _STAGE_DIGITS + action.stage
    number = number * _BATCH_DIGITS + action.microbatch
    return float(number * _KIND_DIGITS + KINDS[action.kind])


def unpacked(value: float) -> tuple[Action, int]:
    """Action and number of stages.

    Raises:
        ValueError: it is the value of something else.
    """
    number, kind = divmod(int(value), _KIND_DIGITS)
    number, microbatch = divmod(number, _BATCH_DIGITS)
    num_stages, stage = divmod(number, _STAGE_DIGITS)
    if kind not in _LETTERS or stage >= num_stages:
        raise ValueError(f"{value:g} is no action of a pipeline")
    return Action(stage, _LETTERS[Kind(kind)], microbatch), num_stages
