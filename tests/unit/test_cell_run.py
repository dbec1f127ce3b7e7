"""One cell from its sending to its end: what arrives for it, when it is over, what it gave."""

from __future__ import annotations

import base64
import itertools
import json
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nbdist.errors import (
    CellFailed,
    CellInterrupted,
    EngineDied,
    RecoveryFailed,
    TargetError,
    WrongState,
)
from nbdist.protocol import orders as od
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.protocol.topology import Member, Membership
from nbdist.session import cells as module
from nbdist.session.cell_run import GRACE_AFTER_DEATH_S, CellRun
from nbdist.session.cells import Cells
from nbdist.session.outputs import CellResult, NotSent, Rich, Text

GROUP = Membership(
    generation=3,
    members=tuple(
        Member(slot=slot, engine_id=10 + slot, pid=100 + slot, host="here") for slot in (0, 2, 5)
    ),
)
"""Slots 0, 2 and 5 are ranks 0, 1 and 2."""


def cell(*ranks):
    return CellRun("c1", od.CellAdmitted(membership=GROUP, ranks=ranks or (0, 1, 2)))


def message(kind, **content):
    return {"header": {"msg_type": kind}, "content": content}


def answer(**ours):
    """A reply of an engine that ran the cell to its end; `ours`: our part of it."""
    return SimpleNamespace(_content={METADATA: ours})


class Remote(Exception):  # noqa: N818 - called as ipyparallel calls it
    """What ipyparallel makes of a reply that says what an engine raised."""

    def __init__(self, ename="ValueError", evalue="no", traceback="line 1\nline 2", **ours):
        super().__init__(evalue)
        self.ename, self.evalue, self.traceback = ename, evalue, traceback
        self.engine_info = {METADATA: {"released": False, **ours}}


def vanished():
    """What ipyparallel makes up when it finds an engine gone."""
    error = Remote("EngineError", "Engine b'1' died while running task 'x'")
    error.engine_info = None
    return error


def reply(run, rank, result=None, *, idle=True):
    future = Future()
    future.set_result(answer() if result is None else result)
    run.on_reply(rank, future)
    if idle:
        run.on_idle(rank, None)


def lost(slot, pid=None, **more):
    about = {"rank": None, "signal": "SIGKILL", "exit_code": None, "guess": "", "last_lines": ()}
    return od.EngineLost(slot=slot, pid=pid or 100 + slot, **about | more)


def is_over(run, later=0.0):
    return run.is_over(time.monotonic() + later)


def states(run):
    return {rank: output.state for rank, output in run.outputs.items()}


# ---- what arrives


def test_a_cell_is_over_when_every_rank_has_answered_and_all_its_output_has_come():
    """Answer and output take different roads: neither alone is the end."""
    run = cell(0, 2)
    reply(run, 0)
    reply(run, 2, idle=False)
    assert not is_over(run, later=3600)
    run.on_idle(2, None)
    assert is_over(run)
    assert states(run) == {0: "ok", 2: "ok"}


def test_output_before_the_answer_is_no_end():
    """The end of the output may come first."""
    run = cell(0)
    run.on_idle(0, None)
    assert not is_over(run, later=3600)
    reply(run, 0)
    assert is_over(run)


def test_what_an_engine_publishes_is_kept_in_order():
    """Streams, displays and results; what else a kernel publishes is nobody's output."""
    run = cell(1)
    run.is_dirty = False
    run.on_iopub(1, message("execute_input", code="f()"))
    run.on_iopub(1, message("stream", name="stdout", text="a"))
    run.on_iopub(1, message("stream", name="stdout", text="b"))
    run.on_iopub(1, message("display_data", data={"text/plain": "p"}, metadata={"w": 1}))
    run.on_iopub(1, message("execute_result", data={"text/plain": "7"}))
    run.on_iopub(1, message("status", execution_state="idle"))
    assert run.outputs[1].items == [
        Text("stdout", "ab"),
        Rich({"text/plain": "p"}, {"w": 1}),
        Rich({"text/plain": "7"}, {}, is_result=True),
    ]
    assert run.is_dirty


def test_a_copy_of_the_progress_does_not_change_any_more():
    """A display may redraw it while more arrives."""
    run = cell(0)
    run.on_iopub(0, message("stream", name="stdout", text="a"))
    shown = run.progress(done=False)
    run.on_iopub(0, message("stream", name="stdout", text="b"))
    reply(run, 0)
    assert (shown.ranks[0].text, shown.ranks[0].state) == ("a", "running")
    assert (shown.cell, shown.generation, shown.done) == ("c1", 3, False)
    assert run.progress(done=True).ranks[0].text == "ab"


def test_nobody_sleeps_when_the_cell_is_over():
    """The caller goes on at once."""
    run = cell(0)
    reply(run, 0)
    began = time.monotonic()
    for _ in range(20):
        run.wait_for_change()
    assert time.monotonic() - began < 0.5


# ---- what it gave


def test_a_cell_that_succeeded_gives_texts_and_values():
    """By rank, in the group in which it ran; a rank without a last expression gives None."""
    run = cell(0, 1, 2)
    run.on_iopub(0, message("stream", name="stdout", text="hello\n"))
    reply(run, 0, answer(value=base64.b64encode(values.pack({"a": 1})).decode()))
    reply(run, 1, answer(not_sent="cannot pickle 'generator' object"))
    reply(run, 2)
    run.raise_if_ended()
    result = run.result()
    assert result.outputs == {0: "hello\n", 1: "", 2: ""}
    assert result.values == {
        0: {"a": 1},
        1: NotSent("cannot pickle 'generator' object"),
        2: None,
    }
    assert result.generation == 3
    assert 0 <= result.seconds < 5


class Awkward:
    """A value that can be packed and not unpacked."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_value_that_cannot_be_unpacked_here_costs_nobody_the_others():
    """It is replaced by the reason."""
    run = cell(0, 1)
    reply(run, 0, answer(value=base64.b64encode(values.pack(Awkward())).decode()))
    reply(run, 1, answer(value=base64.b64encode(values.pack(7)).decode()))
    found = run.result().values
    assert "cannot be unpacked here: ValueError: invalid literal" in found[0].reason
    assert found[1] == 7


# ---- what it raised


def test_a_cell_that_raised_fails_with_the_engines_own_traceback():
    """Which rank, which error, and the lines that the engine made."""
    run = cell(0, 1)
    reply(run, 1, Remote())
    reply(run, 0)
    assert states(run) == {0: "ok", 1: "error"}
    with pytest.raises(CellFailed, match=r"^ValueError: no \(rank 1\)$") as caught:
        run.result()
    (error,) = caught.value.errors.values()
    assert (error.rank, error.ename, error.evalue) == (1, "ValueError", "no")
    assert error.traceback == ["line 1", "line 2"]
    assert caught.value.notes == []


def test_the_first_error_is_the_headline_and_all_ranks_are_named():
    """The one that came first is the likely cause."""
    run = cell(0, 1, 2)
    reply(run, 2, Remote(evalue="first"))
    reply(run, 0, Remote("KeyError", "'x'", []))
    reply(run, 1)
    with pytest.raises(CellFailed, match=r"^ValueError: first \(ranks 0, 2\)$") as caught:
        run.result()
    assert list(caught.value.errors) == [2, 0]


def test_an_error_of_ipyparallel_itself_is_told_too():
    """One that carries none of an engine's words."""
    run = cell(0)
    reply(run, 0, OSError("broken"))
    with pytest.raises(CellFailed, match="OSError"):
        run.result()


def test_a_rank_that_was_released_did_not_fail():
    """It waited for one that raised, and is a note beside its error."""
    run = cell(0, 1)
    waiting = {1: "all_reduce, cell line 2: f()"}
    run.on_released(od.RanksReleased(generation=3, waiting=waiting, reason="rank 0 raised"))
    reply(run, 0, Remote())
    reply(run, 1, Remote("RuntimeError", "Connection closed", released=True))
    assert states(run) == {0: "error", 1: "released"}
    with pytest.raises(CellFailed) as caught:
        run.result()
    assert list(caught.value.errors) == [0]
    assert caught.value.notes == ["rank 1 was released from all_reduce, cell line 2: f()"]


def test_a_rank_to_which_the_cell_came_too_late_is_named():
    """Its group had been broken and left by then; what others wait in says nothing of it."""
    run = cell(0, 1)
    reply(run, 0, Remote("ValueError"))
    run.on_released(od.RanksReleased(generation=3, waiting={1: "barrier"}, reason="rank 0 raised"))
    reply(run, 1, Remote("GroupGone", released=True, is_begun=False))
    with pytest.raises(CellFailed) as caught:
        run.result()
    assert list(caught.value.errors) == [0]
    assert caught.value.notes == ["rank 1 had not begun the cell when its group broke"]


def test_a_cell_whose_ranks_were_all_released_says_why_the_group_was_broken():
    """Nobody raised: another rank was lost, or the user interrupted it."""
    run = cell(0, 1)
    run.on_released(od.RanksReleased(generation=3, waiting={}, reason="rank 2 is gone: SIGKILL"))
    for rank in (0, 1):
        reply(run, rank, Remote(released=True))
    with pytest.raises(CellFailed, match=r"^rank 2 is gone: SIGKILL$") as caught:
        run.result()
    assert caught.value.errors == {}
    assert caught.value.notes[0] == "rank 0 was released from a collective"


def test_what_is_said_of_another_group_is_not_of_this_cell():
    """A break of an earlier or later group released nobody here."""
    run = cell(0)
    run.on_released(od.RanksReleased(generation=2, waiting={0: "barrier"}, reason="old"))
    assert (run.waiting, run.break_reason) == ({}, "")


# ---- engines that end


def test_an_engine_that_dies_ends_the_cell_with_all_that_is_known_of_it():
    """Slot, rank, pid, how and why; what the others did is beside it."""
    run = cell(0, 1)
    reply(run, 0)
    run.on_lost(lost(2, guess="out of memory", last_lines=("last words",)))
    assert is_over(run)
    with pytest.raises(EngineDied, match="out of memory") as caught:
        run.result()
    died = caught.value
    assert (died.slot, died.rank, died.pid, died.signal) == (2, 1, 102, "SIGKILL")
    assert died.last_lines == ["last words"]
    assert died.at.count(":") == 2
    assert died.errors == {1: died}


def test_the_other_ranks_have_a_moment_after_a_death():
    """Those that the break frees say so; those that go on are named."""
    run = cell(0, 1, 2)
    run.on_lost(lost(0))
    assert not is_over(run)
    assert is_over(run, later=GRACE_AFTER_DEATH_S + 0.1)
    reply(run, 1, Remote(released=True))
    assert run.running == (2,)
    with pytest.raises(EngineDied) as caught:
        run.result()
    assert caught.value.notes == [
        "rank 1 was released from a collective",
        "rank 2 still runs the cell",
    ]


def test_the_first_death_is_raised_and_holds_the_others():
    """Deaths before errors, each under its rank."""
    run = cell(0, 1, 2)
    reply(run, 0, Remote())
    run.on_lost(lost(5))
    run.on_lost(lost(2, signal=None, exit_code=3))
    with pytest.raises(EngineDied) as caught:
        run.result()
    assert caught.value.rank == 2
    assert list(caught.value.errors) == [2, 1, 0]
    assert caught.value.errors[1].exit_code == 3


@pytest.mark.parametrize("notice", [lost(2, pid=999), lost(1), lost(0)])
def test_the_end_of_another_engine_is_not_of_this_cell(notice):
    """Another process on the seat, a seat outside the group, a rank that does not run the cell."""
    run = cell(1, 2)
    run.on_lost(notice)
    assert (states(run), run.errors, run.died_at) == ({1: "running", 2: "running"}, {}, None)


def test_what_ipyparallel_makes_up_is_no_answer():
    """It has only noticed the end; how the engine ended the supervisor's notice says."""
    run = cell(0, 1)
    reply(run, 0)
    reply(run, 1, vanished())
    assert states(run)[1] == "running"
    assert not is_over(run, later=3600)
    run.on_lost(lost(2))
    assert is_over(run)
    with pytest.raises(EngineDied):
        run.result()


def test_what_comes_after_the_notice_of_a_death_changes_nothing():
    """A dead rank stays dead, whatever is made up for it or told twice."""
    run = cell(0)
    run.on_lost(lost(0))
    error = run.errors[0]
    reply(run, 0, Remote())
    run.on_lost(lost(0, signal="SIGSEGV"))
    assert (states(run), run.errors) == ({0: "died"}, {0: error})


def test_a_rank_that_was_done_before_its_engine_died_succeeded():
    """The death came after its part of the cell."""
    run = cell(0)
    reply(run, 0)
    run.on_lost(lost(0))
    assert is_over(run)
    assert run.result().values == {0: None}


def test_a_death_between_the_answer_and_the_end_of_the_output_ends_the_cell():
    """What the engine had not published yet never comes: nobody waits for it."""
    run = cell(0, 1)
    reply(run, 0)
    reply(run, 1, idle=False)
    run.on_lost(lost(2))
    assert is_over(run, later=GRACE_AFTER_DEATH_S + 0.1)


# ---- a world that is gone


def test_a_world_that_is_gone_ends_the_cell():
    """No answer will come: ranks that had not ended say why, the others keep what they have."""
    run = cell(0, 1, 2)
    reply(run, 0)
    reply(run, 1, Remote())
    run.on_world_gone("the controller has ended")
    assert is_over(run)
    assert states(run) == {0: "ok", 1: "error", 2: "error"}
    with pytest.raises(CellFailed) as caught:
        run.raise_if_ended()
    errors = caught.value.errors
    assert {rank: error.ename for rank, error in errors.items()} == {
        1: "ValueError",
        2: "RecoveryFailed",
    }
    assert errors[2].evalue == "the controller has ended"


def test_a_world_that_goes_between_the_answer_and_the_end_of_the_output_ends_the_cell():
    """The controller carries the output: what had not come when it ended never comes."""
    run = cell(0, 1)
    reply(run, 0)
    reply(run, 1, idle=False)
    run.on_world_gone("the controller has ended")
    assert is_over(run)
    assert states(run) == {0: "ok", 1: "ok"}


def test_an_engine_that_cannot_be_reached_fails_alone():
    """The others go on; the message says how to get a new one."""
    run = cell(0, 1)
    run.on_unreachable(1)
    assert not is_over(run, later=3600)
    reply(run, 0)
    assert is_over(run)
    with pytest.raises(CellFailed, match=r"%dist_kill 1") as caught:
        run.result()
    assert list(caught.value.errors) == [1]


def test_an_engine_that_died_before_it_could_be_reached_is_dead():
    """The supervisor's word counts, and comes first."""
    run = cell(0)
    run.on_lost(lost(0))
    run.on_unreachable(0)
    with pytest.raises(EngineDied):
        run.raise_if_ended()


def test_a_cell_that_goes_on_raises_nothing():
    """Neither at its beginning nor when a part of it is done."""
    run = cell(0, 1)
    run.raise_if_ended()
    reply(run, 0)
    run.raise_if_ended()


# ---- from the order to the end


class Link:
    """The supervisor, as far as cells need it."""

    def __init__(self, answer=None):
        self.answer = answer or od.CellAdmitted(membership=GROUP, ranks=(0, 1))
        self.heard = []

    def ask(self, order, timeout):
        assert timeout > 0
        self.heard.append(order)
        if isinstance(order, od.BeginCell) and isinstance(self.answer, BaseException):
            raise self.answer
        if isinstance(order, od.QueryView):
            return SimpleNamespace(phase="breaking", reason="rank 1 is gone")
        return self.answer

    def say(self, order):
        self.heard.append(order)

    def of(self, kind):
        return [order for order in self.heard if isinstance(order, kind)]


class Client:
    """The engines: each does with its future what a function says."""

    def __init__(self, engine=lambda _, future: end(future)):
        self.engine, self.sent, self.unknown = engine, [], set()

    def wait_known(self, engine_id, is_gone):
        return engine_id not in self.unknown or is_gone()

    def execute(self, engine_id, code, metadata, hook):
        if engine_id in self.unknown:
            return None
        future = Future()
        future.iopub_callbacks, future.output = [], Future()
        hook(future)
        self.sent.append((engine_id, code, metadata))
        self.engine(engine_id, future)
        return future


def end(future, result=None):
    for callback in future.iopub_callbacks:
        callback(message("stream", name="stdout", text="hello\n"))
    future.output.set_result(None)
    future.set_result(answer() if result is None else result)


@pytest.fixture
def quick(monkeypatch):
    """Limits that a test can wait for."""
    monkeypatch.setattr(module, "KILL_NOTICE_S", 0.05)
    monkeypatch.setattr(module, "KILL_AFTER_S", 0.15)
    monkeypatch.setattr(module, "SHOW_PERIOD_S", 0.01)


def test_a_cell_is_asked_for_sent_and_ended():
    """To the engines of its ranks, with its name; the supervisor hears that it succeeded."""
    link, client, shown = Link(), Client(), []
    runs = Cells(link, client)
    result = runs.run("print('hello')", ranks=(0, 1), once=True, watch=shown.append)
    begin, over = link.heard
    assert (begin.code, begin.ranks, begin.once) == ("print('hello')", (0, 1), True)
    assert client.sent == [
        (
            engine_id,
            "print('hello')",
            {METADATA: {"cell": begin.cell, "generation": 3, "over": None}},
        )
        for engine_id in (10, 12)
    ]
    assert result.outputs == {0: "hello\n", 1: "hello\n"}
    assert (over.cell, over.succeeded) == (begin.cell, True)
    assert over.seconds >= 0
    assert shown[-1].done
    assert runs.open_cells() == []


def test_a_push_is_entered_with_its_values():
    """It runs no code here, and is open until it is ended."""
    link = Link()
    runs = Cells(link, Client())
    run = runs.begin("", ranks=None, once=False, pushed={"x": b"1"})
    assert link.heard[0].values == {"x": b"1"}
    assert runs.open_cells() == [run.cell]
    runs.end(run, succeeded=False)
    assert (runs.open_cells(), link.heard[1].succeeded) == ([], False)


def test_a_cell_that_is_refused_is_taken_back():
    """The supervisor need not wonder whether it runs."""
    link = Link(TargetError("no rank 7"))
    runs = Cells(link, Client())
    with pytest.raises(TargetError, match="no rank 7"):
        runs.run("f()", ranks=(7,))
    begin, over = link.heard
    assert (over.cell, over.succeeded) == (begin.cell, False)
    assert runs.open_cells() == []


def test_a_world_that_does_not_come_to_rest_is_described():
    """A cell that was not admitted in time is taken back, and the message says what holds it up."""
    link = Link(TimeoutError())
    with pytest.raises(WrongState, match=r"breaking for 60 s: rank 1 is gone.*%dist_status"):
        Cells(link, Client()).run("f()")
    assert [type(order) for order in link.heard] == [od.BeginCell, od.EndCell, od.QueryView]


def test_a_cell_that_fails_is_ended_as_failed():
    """It is not replayed to newcomers; the display is told the end too."""
    link, shown = Link(), []
    with pytest.raises(CellFailed, match="ValueError"):
        Cells(link, Client(lambda _, future: end(future, Remote()))).run("f()", watch=shown.append)
    assert not link.heard[-1].succeeded
    assert shown[-1].done


def test_a_cell_whose_engine_ipyparallel_does_not_know_fails():
    """Nothing could be sent there: that is said, and the others' output is kept."""
    client = Client()
    client.unknown = {12}
    with pytest.raises(CellFailed, match="controller does not know") as caught:
        Cells(Link(), client).run("f()")
    assert list(caught.value.errors) == [1]


def test_what_the_link_hears_reaches_the_cells_that_run():
    """A loss, a break, and the end of the world."""
    runs = Cells(Link(), Client())
    first = runs.begin("f()", ranks=None, once=False)
    runs.on_notice(od.RanksReleased(generation=3, waiting={}, reason="rank 0 is gone"))
    runs.on_notice(lost(0))
    assert (first.break_reason, states(first)) == ("rank 0 is gone", {0: "died", 1: "running"})
    runs.on_world_gone("all is gone")
    assert states(first) == {0: "died", 1: "error"}


@pytest.mark.usefixtures("quick")
def test_a_cell_that_runs_too_long_is_interrupted():
    """The message names the limit and who still ran; ranks that react are not killed."""
    link, futures = Link(), {}
    say = link.say

    def say_and_end(order):
        say(order)
        if isinstance(order, od.InterruptCell):
            end(futures[12], Remote("KeyboardInterrupt", ""))

    link.say = say_and_end
    client = Client(lambda e, future: end(future) if e == 10 else futures.update({e: future}))
    with pytest.raises(CellFailed, match=r"limit of 0\.05 s; still running then: rank 1$"):
        Cells(link, client).run("f()", timeout=0.05)
    assert link.of(od.SignalEngines) == []
    assert not link.heard[-1].succeeded


@pytest.mark.usefixtures("quick")
def test_ranks_that_do_not_react_to_an_interrupt_are_announced_and_killed():
    """After a while, only those, and their output says so beforehand."""
    link, shown = Link(), []
    client = Client(lambda engine_id, future: end(future) if engine_id == 10 else None)
    with pytest.raises(CellFailed, match="still running then: rank 1"):
        Cells(link, client).run("f()", timeout=0.02, watch=shown.append)
    assert link.of(od.SignalEngines) == [od.SignalEngines(slots=(2,), signal="KILL")]
    assert "does not react to the interrupt" in shown[-1].ranks[1].text
    assert "does not react" not in shown[-1].ranks[0].text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [TimeoutError("no answer"), RecoveryFailed("all is gone")])
def test_a_kill_that_is_not_answered_keeps_nobody(error):
    """The cell ends all the same, with its own error."""
    link = Link()
    ask = link.ask

    def ask_in_vain(order, timeout):
        if isinstance(order, od.SignalEngines):
            raise error
        return ask(order, timeout)

    link.ask = ask_in_vain
    with pytest.raises(CellFailed, match="longer than its limit"):
        Cells(link, Client(lambda *_: None)).run("f()", timeout=0.02)


@pytest.mark.usefixtures("quick")
def test_ctrl_c_reaches_the_ranks_and_then_the_user(monkeypatch):
    """KeyboardInterrupt is what the caller gets, after the ranks were told."""
    link, futures = Link(), []
    wait, say = CellRun.wait_for_change, link.say

    def press(_):
        monkeypatch.setattr(CellRun, "wait_for_change", wait)
        raise KeyboardInterrupt

    def say_and_end(order):
        say(order)
        if isinstance(order, od.InterruptCell):
            for future in futures:
                end(future, Remote("KeyboardInterrupt", ""))

    monkeypatch.setattr(CellRun, "wait_for_change", press)
    link.say = say_and_end
    runs = Cells(link, Client(lambda _, future: futures.append(future)))
    with pytest.raises(KeyboardInterrupt):
        runs.run("f()")
    (begin,), (order,) = link.of(od.BeginCell), link.of(od.InterruptCell)
    assert order.cell == begin.cell
    assert link.of(od.SignalEngines) == []
    assert not link.heard[-1].succeeded
    assert runs.open_cells() == []


@pytest.mark.usefixtures("quick")
def test_who_presses_twice_waits_no_longer_and_the_kill_comes(monkeypatch):
    """A second Ctrl-C tells the ranks again; those that do not react are killed in time all the
    same, and the error says who stopped where and who was killed."""
    link, presses = Link(), [None, None]
    wait = CellRun.wait_for_change

    def press(run):
        if presses:
            raise presses.pop() or KeyboardInterrupt
        wait(run)

    monkeypatch.setattr(CellRun, "wait_for_change", press)
    client = Client(
        lambda e, future: end(future, Remote("KeyboardInterrupt", "")) if e == 10 else None
    )
    with pytest.raises(CellInterrupted, match="the cell was interrupted") as caught:
        Cells(link, client).run("f()")
    assert len(link.of(od.InterruptCell)) == 2
    assert link.of(od.SignalEngines) == [od.SignalEngines(slots=(2,), signal="KILL")]
    assert list(caught.value.errors) == [0]
    assert caught.value.notes == ["rank 1 did not react and was killed"]
    shown = caught.value._render_traceback_()
    assert shown[0] == "KeyboardInterrupt: the cell was interrupted"
    assert "On rank 0:" in shown


def test_a_display_is_shown_what_has_changed_and_not_too_often(monkeypatch):
    """Between two looks a period passes, and without a change nothing is drawn again."""
    clock, shown = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    run = cell(0)
    show = module._Throttle(run, lambda progress: shown.append((clock.now, progress.done)))
    for moment in range(100):
        clock.now = 100.0 + moment / 100
        run.is_dirty = True
        show(clock.now)
    times = [now for now, _ in shown]
    assert 8 <= len(times) <= 100 * 0.01 / module.SHOW_PERIOD_S
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) > 0.9 * module.SHOW_PERIOD_S
    run.is_dirty = False
    clock.now += 3600
    show(clock.now)
    assert len(shown) == len(times)
    module._Throttle(run, None)(clock.now)


def test_a_cell_says_from_the_first_that_it_lacks_ranks():
    """While it runs, and in what it gives."""
    run = cell()
    run.lack = "began on 3 of 4 ranks"
    assert run.progress(done=False).notes == ("began on 3 of 4 ranks",)
    assert run.progress(done=True).notes == ("began on 3 of 4 ranks",)


def test_a_value_is_unpacked_when_it_is_looked_at(monkeypatch):
    """Each once, and none by a cell that is only shown."""
    unpacked = []
    monkeypatch.setattr(values, "unpack", lambda data: unpacked.append(data) or len(unpacked))
    found = CellResult({}, {0: {"value": "YQ=="}, 2: {"value": "Yg=="}, 3: {}}, 1, 0.1)
    assert unpacked == []
    assert found.values == {0: 1, 2: 2, 3: None}
    assert found.values[2] == 2
    assert json.dumps(found.values) == '{"0": 1, "2": 2, "3": null}'
    assert unpacked == [b"a", b"b"]
