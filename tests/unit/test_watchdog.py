"""Looks at processes: engines that hang or vanish, and the controller."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nbdist.rundir import Owner
from nbdist.supervisor import watchdog as module
from nbdist.supervisor.hang import Observation
from nbdist.supervisor.seats import Seat, SeatState
from nbdist.supervisor.watchdog import PERIOD_S, VANISHED_AFTER_S, Hung, Watchdog, observe

LIMIT_S = 10.0
WELL = Observation(is_stopped=False, is_traced=False, cpu_s=1.0)
STOPPED = Observation(is_stopped=True, is_traced=False, cpu_s=1.0)


@pytest.fixture
def seen(monkeypatch):
    """What a look at a process shows, by pid; one that is missing is gone."""
    seen = {}
    monkeypatch.setattr(module, "observe", seen.get)
    return seen


def controller(pid=7, *, alive=True):
    return SimpleNamespace(pid=pid, is_alive=lambda: alive)


# ---- the controller


@pytest.mark.usefixtures("seen")
def test_nothing_ails_a_controller_that_is_not_there_yet():
    """It is started after the supervisor."""
    assert Watchdog(LIMIT_S).what_ails(None, 5.0) == ""


def test_nothing_ails_a_controller_that_runs(seen):
    """Whatever the time is."""
    seen[7] = WELL
    dog = Watchdog(LIMIT_S)
    assert {dog.what_ails(controller(), now) for now in (1.0, 100.0, 1e6)} == {""}


@pytest.mark.parametrize("alive", [True, False])
def test_a_controller_that_has_ended_is_found_at_once(seen, alive):
    """Gone between two looks, or a zombie, or its pid is in new hands."""
    if not alive:
        seen[7] = WELL  # somebody else's
    assert "has ended; its log says why" in Watchdog(LIMIT_S).what_ails(
        controller(alive=alive), 5.0
    )


def test_a_controller_that_is_stopped_is_given_the_time_of_a_hang(seen):
    """Then it is said for how long."""
    seen[7] = STOPPED
    dog = Watchdog(LIMIT_S)
    assert dog.what_ails(controller(), 5.0) == ""
    assert dog.what_ails(controller(), 5.0 + LIMIT_S) == ""
    assert dog.what_ails(controller(), 5.1 + LIMIT_S) == "is stopped for 10 s"


def test_a_controller_that_goes_on_in_time_is_well_again(seen):
    """The next stop is timed anew."""
    dog = Watchdog(LIMIT_S)
    for start in (5.0, 14.0):
        seen[7] = STOPPED
        assert dog.what_ails(controller(), start) == ""
        assert dog.what_ails(controller(), start + 8.0) == ""
        seen[7] = WELL
        assert dog.what_ails(controller(), start + 8.5) == ""


# ---- engines


def watched(pid=101):
    """A watchdog, and a seat whose engine has just given a sign of life."""
    dog = Watchdog(LIMIT_S)
    dog.beat(pid, 0.0)
    return dog, Seat(0, SeatState.MEMBER, pid)


def looks(dog, seat, until):
    """Look as often as the supervisor does; what was found first, and when."""
    for step in range(int(until / PERIOD_S)):
        if found := dog.look([seat], now := step * PERIOD_S):
            return found, now
    return [], None


def test_an_engine_that_is_stopped_is_found_hung(seen):
    """After the limit, with how it stands; since its last progress."""
    seen[101] = STOPPED
    (hung,), now = looks(*watched(), 60.0)
    assert isinstance(hung, Hung)
    assert (hung.since, hung.how) == (0.0, "hung: stopped for 10 s")
    assert LIMIT_S < now < LIMIT_S + 1.0


def test_an_engine_without_progress_is_found_hung(seen):
    """Not stopped, but without CPU time."""
    seen[101] = WELL
    (hung,), _ = looks(*watched(), 60.0)
    assert hung.how == "hung: without any progress for 10 s"


@pytest.mark.usefixtures("seen")
def test_an_engine_that_vanished_is_reported_when_nobody_else_does():
    """Its parent is faster; where there is none, the look counts, and from the first one."""
    (gone,), now = looks(*watched(), 60.0)
    assert (gone.slot, gone.pid, gone.detector, gone.at) == (0, 101, "process", 0.0)
    assert (gone.signal, gone.exit_code) == (None, None)
    assert VANISHED_AFTER_S < now <= VANISHED_AFTER_S + PERIOD_S


@pytest.mark.usefixtures("seen")
def test_an_engine_that_is_forgotten_is_looked_at_anew():
    """Its seat may hold another one with the same pid."""
    dog, seat = watched()
    dog.look([seat], 0.0)
    dog.forget(101)
    assert dog.look([seat], 5.0) == []


@pytest.mark.usefixtures("seen")
def test_an_empty_seat_is_not_looked_at():
    """Nobody sits there."""
    assert Watchdog(LIMIT_S).look([Seat(0)], 1.0) == []


@pytest.mark.usefixtures("seen")
def test_looks_are_not_too_many():
    """A few times a second, unless one is asked for."""
    dog, seat = watched()
    for number in range(5):
        dog.look([seat], number * PERIOD_S)
    late = 4.9 * PERIOD_S
    assert dog.look([seat], late) == []
    assert dog.look([seat], late, at_once=True)


# ---- processes


def test_a_process_is_observed():
    """This one runs, and has used the CPU."""
    seen = observe(os.getpid())
    assert (seen.is_stopped, seen.is_traced) == (False, False)
    assert seen.cpu_s > 0


def test_a_zombie_is_gone():
    """It has ended, though its parent has not asked for it yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    owner = Owner.of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert observe(process.pid) is None
    assert not owner.is_alive()
    process.wait()
    assert observe(process.pid) is None
