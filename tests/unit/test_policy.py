"""Failure to decision: refill or shrink, go on or give up, each with its reason."""

from __future__ import annotations

import pytest

from nbdist.config import ClusterConfig
from nbdist.supervisor.policy import decide_seat, decide_world


def config(**settings):
    return ClusterConfig(num_engines=4, **settings)


@pytest.mark.parametrize(
    ("policy", "was_started", "restarts", "action"),
    [
        ("refill", True, 1, "start"),
        ("refill", False, 1, "start"),
        ("refill", True, 2, "start"),
        ("refill", True, 3, "give up"),
        ("refill", True, 4, "give up"),
        ("shrink", True, 1, "leave empty"),
        ("shrink", False, 1, "start"),
        ("shrink", False, 3, "give up"),
        ("shrink", True, 3, "give up"),
    ],
)
def test_what_becomes_of_a_seat(policy, was_started, restarts, action):
    """Refill starts anew, shrink does so only before the first group, and the limit ends both."""
    settings = config(policy=policy, max_restarts=3)
    decision = decide_seat(settings, restarts=restarts, was_started=was_started, last="SIGKILL")
    assert decision.action == action
    assert decision.reason


def test_a_seat_is_given_up_with_its_count_and_last_end():
    """The reason says how often and how the engine ended last."""
    decision = decide_seat(config(max_restarts=2), restarts=2, was_started=True, last="SIGSEGV")
    assert "2 times" in decision.reason
    assert "SIGSEGV" in decision.reason


@pytest.mark.parametrize(
    ("min_world", "survivors", "ready", "starting", "action"),
    [
        (1, 1, 0, 0, "form"),
        (1, 0, 0, 0, "fail"),
        (1, 0, 3, 1, "fail"),  # newcomers hold nothing
        (3, 2, 1, 0, "form"),
        (3, 2, 0, 1, "wait"),
        (3, 1, 1, 1, "wait"),
        (3, 2, 0, 0, "fail"),
        (3, 3, 0, 1, "form"),
    ],
)
def test_what_becomes_of_the_world(min_world, survivors, ready, starting, action):
    """A group needs a holder of the variables and `min_world` members, some still to come."""
    decision = decide_world(
        config(min_world=min_world),
        num_survivors=survivors,
        num_ready=ready,
        num_starting=starting,
    )
    assert decision.action == action
    assert bool(decision.reason) == (action != "form")


def test_the_reason_of_a_failed_world_names_the_numbers():
    """Too few left: how many there are and how many are needed."""
    decision = decide_world(config(min_world=3), num_survivors=2, num_ready=0, num_starting=0)
    assert "2 left" in decision.reason
    assert "min_world=3" in decision.reason
