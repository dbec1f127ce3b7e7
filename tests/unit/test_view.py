"""The world as the kernel is told it."""

from __future__ import annotations

import msgspec
import pytest

from nbdist.config import ClusterConfig
from nbdist.protocol import events as ev
from nbdist.protocol.orders import WorldView
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import last_words, view_of

NOW = 10.0


@pytest.fixture
def machine():
    """A world of two, running."""
    machine = Machine(ClusterConfig(num_engines=2, max_restarts=2))
    machine.start(NOW)
    for slot in (0, 1):
        come_up(machine, slot, 100 + slot)
    for slot in (0, 1):
        event = ev.GroupFormed(slot=slot, pid=100 + slot, generation=1, cuttable=True)
        machine.formed(event, NOW)
    assert machine.is_healthy
    return machine


def come_up(machine, slot, pid):
    machine.forked(ev.EngineForked(slot=slot, pid=pid))
    hello = ev.EngineHello(
        slot=slot, pid=pid, engine_id=pid, host="h", generation=0, device="cpu", replayed=0
    )
    machine.hello(hello, NOW)
    machine.replayed(ev.JournalReplayed(slot=slot, pid=pid, failed=()), NOW)


def die(machine, slot):
    event = ev.EngineExited(
        slot=slot,
        pid=machine.seats[slot].pid,
        signal="SIGKILL",
        exit_code=None,
        detector="zygote",
        at=NOW,
    )
    machine.exited(event, NOW)


def beat(machine, slot, *, cell=None, waiting=None, step=None):
    event = ev.Beat(
        slot=slot,
        pid=100 + slot,
        number=1,
        generation=1,
        cell=cell,
        waiting=waiting,
        step=step,
        rss_bytes=5_000,
    )
    machine.beat(event, NOW)


WAIT = ev.Where(operation="all_reduce", line="cell line 2: f()", since_s=NOW)


def test_a_running_world_is_told_with_its_seats(machine):
    """Phase, size, health and each seat with rank, engine, place and generation."""
    view = view_of(machine)
    assert (view.phase, view.size, view.num_formed, view.healthy) == ("running", 2, 2, True)
    assert (view.reason, view.incidents) == ("", ())
    assert view.membership == machine.membership
    first, second = view.seats
    assert (first.slot, first.rank, first.state) == (0, 0, "member")
    assert (second.slot, second.rank, second.pid, second.engine_id) == (1, 1, 101, 101)
    assert (second.host, second.device, second.generation) == ("h", "cpu", 1)
    assert second.is_holder


def test_what_changes_all_the_time_is_told_only_if_asked_for(machine):
    """The ledger and the notices are not written anew with every beat."""
    before = view_of(machine)
    beat(machine, 0, cell="c1", waiting=WAIT)
    beat(machine, 1, cell="c1")
    assert view_of(machine) == before
    first, second = view_of(machine, with_beats=True).seats
    assert first.activity == "waits in all_reduce, cell line 2: f()"
    assert second.activity == "runs a cell"
    assert (first.rss_bytes, second.rss_bytes) == (5_000, 5_000)


@pytest.mark.parametrize(
    ("operation", "line", "step", "told"),
    [
        (ev.NATIVE_CODE, ev.OWN_STEP, 4, "trains"),
        (ev.NATIVE_CODE, "cell line 3: step.backward(loss)", 4, "trains"),
        ("all_reduce", ev.OWN_STEP, 4, "trains, in all_reduce"),
        ("barrier", "cell line 2: f()", 4, "trains, in barrier, cell line 2: f()"),
        (None, "", 4, "trains"),
        (ev.NATIVE_CODE, ev.OWN_STEP, None, "trains"),
        (ev.NATIVE_CODE, "cell line 2: f()", None, "waits in native code, cell line 2: f()"),
    ],
)
def test_the_waits_within_each_step_are_not_told_as_news(machine, operation, line, step, told):
    """A rank that trains trains, whether it waits for others just now or not."""
    waiting = ev.Where(operation=operation, line=line, since_s=NOW) if operation else None
    beat(machine, 0, cell="c1", waiting=waiting, step=step)
    assert view_of(machine, with_beats=True).seats[0].activity == told


def test_an_idle_engine_has_no_activity(machine):
    """A beat without a cell: memory alone."""
    beat(machine, 0)
    first, second = view_of(machine, with_beats=True).seats
    assert (first.activity, first.rss_bytes) == ("", 5_000)
    assert (second.activity, second.rss_bytes) == ("", 0)


def test_while_the_group_breaks_it_is_told_who_is_waited_for(machine):
    """The reason names the loss, who is busy and in which line; the lost seat has no rank."""
    beat(machine, 0, cell="c1", waiting=WAIT)
    die(machine, 1)
    view = view_of(machine)
    assert (view.phase, view.num_formed, view.healthy) == ("breaking", 0, False)
    assert "rank 1 (slot 1) is gone: SIGKILL" in view.reason
    assert "slot 0 is busy (cell line 2: f())" in view.reason
    lost = view.seats[1]
    assert (lost.rank, lost.pid, lost.state, lost.generation) == (None, None, "starting", 0)
    assert not lost.is_holder
    assert [i.kind for i in view.incidents] == ["lost"]


def test_a_busy_member_is_named_without_a_line_where_none_is_known(machine):
    """No beat that says more: busy."""
    die(machine, 1)
    assert view_of(machine).reason.endswith("slot 0 is busy")


def test_a_seat_that_was_given_up_is_the_reason(machine):
    """The world runs with fewer, and says why."""
    die(machine, 1)
    machine.forked(ev.EngineForked(slot=1, pid=201))
    die(machine, 1)
    assert "slot 1 was given up: " not in view_of(machine).reason  # still breaking
    machine.broken(ev.GroupBroken(slot=0, pid=100, generation=1), NOW)
    machine.formed(ev.GroupFormed(slot=0, pid=100, generation=2, cuttable=True), NOW)
    view = view_of(machine)
    assert view.phase == "running"
    assert not view.healthy
    assert "slot 1 was given up: " in view.reason
    assert "2 times" in view.reason
    assert view.reason.endswith(". The others go on; %dist_scale 2 tries again")


def test_a_failed_world_says_what_to_do(machine):
    """The reason has the way out in it."""
    machine.fail("the controller ended", NOW)
    view = view_of(machine)
    assert view.phase == "failed"
    assert "the controller ended" in view.reason
    assert "%dist_reset" in view.reason


def test_a_view_survives_the_ledger(machine):
    """Written as JSON and read again it is equal, incidents and all."""
    die(machine, 1)
    view = view_of(machine, with_beats=True)
    assert msgspec.json.decode(msgspec.json.encode(view), type=WorldView) == view


def test_a_view_does_not_change_with_the_world(machine):
    """What was told stays as it was told, while the machine goes on."""
    die(machine, 1)
    view = view_of(machine)
    told = msgspec.json.encode(view)
    machine.seats[1].not_restored["x"] = "later"
    machine.broken(ev.GroupBroken(slot=0, pid=100, generation=1), NOW)
    machine.formed(ev.GroupFormed(slot=0, pid=100, generation=2, cuttable=True), NOW + 1)
    assert view_of(machine) != view
    assert msgspec.json.encode(view) == told


# ---- last words


def test_the_last_words_are_the_end_of_the_log():
    """As many lines as are shown; of a short log all, of an empty one none."""
    log = "".join(f"{n}\n" for n in range(20))
    assert last_words(log, 3) == ("17", "18", "19")
    assert last_words("a\nb") == ("a", "b")
    assert last_words("") == ()


def test_the_last_words_of_a_crash_are_those_of_the_thread_that_crashed():
    """Other threads may stand before it in the log; what was loaded stands after it."""
    log = (
        "Fatal Python error: Segmentation fault\n\n"
        "Thread 0x1 (most recent call first):\n  File poll\n\n"
        "Current thread 0x2 (most recent call first):\n  File culprit\n"
    )
    assert last_words(log, 3) == (
        "Fatal Python error: Segmentation fault",
        "Current thread 0x2 (most recent call first):",
        "  File culprit",
    )


def test_the_last_words_of_a_crash_begin_at_its_stack():
    """What a native library said just before is shown, then the top of the stack."""
    stack = "Fatal Python error: Segmentation fault\n" + "".join(f"  File {n}\n" for n in range(20))
    words = last_words("early\n" * 20 + "the culprit\n" + stack, 4)
    assert words == (
        "early",
        "the culprit",
        "Fatal Python error: Segmentation fault",
        "  File 0",
        "  File 1",
        "  File 2",
        "  File 3",
    )
