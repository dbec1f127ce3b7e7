"""When an engine that sends no beats is taken for dead."""

from __future__ import annotations

import pytest

from nbdist.supervisor.hang import HangWatch, Observation

LIMIT_S = 10.0
LOOK_S = 0.25


def first_verdict(look, *, until=60.0, limit_s=LIMIT_S):
    """When a process that is looked at every quarter of a second is called hung; None: never.

    `look`: seconds of silence -> observation.
    """
    watch = HangWatch(limit_s, last_beat=0.0, last_progress=0.0)
    for step in range(1, int(until / LOOK_S)):
        now = step * LOOK_S
        if watch.is_silent(now) and watch.is_hung(look(now), now):
            return now
    return None


def test_a_stopped_process_is_hung_after_the_limit():
    """No beat and stopped for the whole limit: taken for dead, and not before."""
    at = first_verdict(lambda _: Observation(is_stopped=True, is_traced=False, cpu_s=3.0))
    assert LIMIT_S < at <= LIMIT_S + 2 * LOOK_S


def test_a_process_that_uses_no_cpu_is_hung_after_the_limit():
    """Not stopped, but without any CPU time: no progress either."""
    at = first_verdict(lambda _: Observation(is_stopped=False, is_traced=False, cpu_s=3.0))
    assert LIMIT_S < at <= LIMIT_S + 2 * LOOK_S


def test_a_short_limit_is_kept():
    """Tests use one second: silence is looked at early enough for it."""
    look = Observation(is_stopped=True, is_traced=False, cpu_s=3.0)
    at = first_verdict(lambda _: look, limit_s=1.0)
    assert 1.0 < at <= 1.0 + 2 * LOOK_S


def test_a_busy_process_is_left_alone():
    """Native code that holds the interpreter sends no beat and uses CPU time."""
    busy = first_verdict(lambda now: Observation(is_stopped=False, is_traced=False, cpu_s=now))
    assert busy is None


def test_a_process_that_uses_cpu_now_and_then_is_left_alone():
    """A little progress within each limit is progress."""
    look = first_verdict(lambda now: Observation(is_stopped=False, is_traced=False, cpu_s=now // 8))
    assert look is None


def test_a_process_in_a_debugger_is_left_alone():
    """A traced process stands still on purpose."""
    traced = Observation(is_stopped=True, is_traced=True, cpu_s=3.0)
    assert first_verdict(lambda _: traced) is None


def test_the_clock_starts_anew_when_progress_ends():
    """Busy for a while, then stopped: the limit counts from the last progress."""
    at = first_verdict(
        lambda now: Observation(is_stopped=now > 20.0, is_traced=False, cpu_s=min(now, 20.0))
    )
    assert 20.0 + LIMIT_S - LOOK_S <= at <= 20.0 + LIMIT_S + 2 * LOOK_S


def test_time_that_was_used_before_the_stop_is_no_progress_of_a_stopped_process():
    """CPU time between the last look and the stop does not count once it is stopped."""
    watch = HangWatch(LIMIT_S, last_beat=0.0, last_progress=0.0)
    watch.is_hung(Observation(is_stopped=False, is_traced=False, cpu_s=1.0), 2.0)
    watch.is_hung(Observation(is_stopped=True, is_traced=False, cpu_s=1.2), 9.0)
    assert watch.last_progress == 0.0


def test_a_beat_ends_the_silence():
    """After a beat nothing is looked at, and both clocks start anew."""
    watch = HangWatch(LIMIT_S, last_beat=0.0, last_progress=0.0)
    stopped = Observation(is_stopped=True, is_traced=False, cpu_s=3.0)
    assert not watch.is_hung(stopped, 9.0)
    watch.beat(9.5)
    assert not watch.is_silent(10.0)
    assert watch.is_silent(10.75)
    assert not watch.is_hung(stopped, 19.0)


@pytest.mark.parametrize("stopped", [True, False])
def test_one_look_convicts_nobody(stopped):
    """After a pause of the supervisor itself the first look has nothing to compare with."""
    watch = HangWatch(LIMIT_S, last_beat=0.0, last_progress=0.0)
    look = Observation(is_stopped=stopped, is_traced=False, cpu_s=3.0)
    assert not watch.is_hung(look, 60.0)
