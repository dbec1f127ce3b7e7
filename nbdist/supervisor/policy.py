"""Failure to decision: refill or shrink, go on or give up.

Pure: values in, a decision with its reason out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbdist.config import ClusterConfig


@dataclass(frozen=True)
class SeatDecision:
    """What becomes of a seat whose engine ended."""

    action: Literal["start", "leave empty", "give up"]
    reason: str


@dataclass(frozen=True)
class WorldDecision:
    """What becomes of the world when the old group is broken."""

    action: Literal["form", "wait", "fail"]
    reason: str


def decide_seat(
    config: ClusterConfig, *, restarts: int, was_started: bool, last: str
) -> SeatDecision:
    """After an engine ended.

    Args:
        config: settings.
        restarts: how often in a row this seat's engine ended before it was in a group, this time
            included.
        was_started: whether the world had been formed at least once.
        last: how the engine ended, in words.
    """
    if restarts >= config.max_restarts:
        return SeatDecision(
            "give up",
            f"its engine ended {restarts} times in a row before it joined a group, last: {last}",
        )
    if config.policy == "shrink" and was_started:
        return SeatDecision("leave empty", "policy shrink: the seat stays empty")
    return SeatDecision("start", "policy refill: the survivors go on, the seat is filled again")


def decide_world(
    config: ClusterConfig, *, num_survivors: int, num_ready: int, num_starting: int
) -> WorldDecision:
    """When the old group is gone.

    Args:
        config: settings.
        num_survivors: members of the last group that are alive.
        num_ready: newcomers that can be admitted now.
        num_starting: seats that are being filled.
    """
    if num_survivors == 0:
        return WorldDecision(
            "fail", "no engine of the last group is left, so nobody holds the variables"
        )
    if num_survivors + num_ready >= config.min_world:
        return WorldDecision("form", "")
    if num_starting:
        return WorldDecision(
            "wait",
            f"fewer than min_world={config.min_world} engines; waiting for seats being filled",
        )
    return WorldDecision(
        "fail",
        f"only {num_survivors} left, min_world={config.min_world}, and no seat is being filled",
    )
