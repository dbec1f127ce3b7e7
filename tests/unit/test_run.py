"""The handle of a training run, on a supervisor that is made up: nothing is sent anywhere."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
from made_frames import HEADER
from msgspec.structs import replace

from nbdist.errors import CellFailed, NbdistError, RecoveryFailed, WrongState
from nbdist.protocol import feed as fd
from nbdist.protocol import runs as rn
from nbdist.protocol.events import Incident
from nbdist.protocol.frames import pack
from nbdist.protocol.story import ROWS, Evaluation
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.topology import EMPTY
from nbdist.session import run as module
from nbdist.session.run import Detached, Run
from nbdist.session.run_record import RunRecord
from nbdist.session.runs import Runs

SOON_S = 3.0
SPEC = rn.RunSpec(run="r1", name="trainer")


def rows(first, last, **columns):
    """Committed steps `first` … `last - 1`, 60 samples in half a second each."""
    made = np.zeros(last - first, ROWS)
    made["step"] = np.arange(first, last)
    made["samples"], made["seconds"], made["world_size"] = 60, 0.5, 4
    made["loss"] = 10.0 - made["step"]
    for name, value in columns.items():
        made[name] = value
    return made


def view(state="running", spec=SPEC, target=10, fault=None):
    return rn.RunView(spec=spec, state=state, target=target, fault=fault)


def report(first, made, state="running", evaluations=(), fault=None):
    return rn.RunReport(
        view=view(state, fault=fault),
        first=first,
        rows=made.tobytes(),
        durable=0,
        evaluations=evaluations,
    )


def incident(generation=5, slot=2, kind="lost", **more):
    return Incident(
        kind=kind, slots=(slot,), ranks=(slot,), cause="c", generation_before=generation, **more
    )


class Supervisor:
    """Answers orders: with a run's rows, or as a test says."""

    def __init__(self):
        self.rows, self.state, self.fault = rows(0, 0), "running", None
        self.evaluations, self.num_again = (), 1
        self.heard, self.error, self.snapshot = [], None, pack(HEADER, {})

    def ask(self, order, timeout):
        assert timeout is None or timeout > 0
        self.heard.append(order)
        if self.error:
            raise self.error
        if isinstance(order, rn.BeginRun):
            return rn.RunBegun(run="r1", step=7)
        if isinstance(order, fd.QuerySnapshot):
            return fd.Frame(name="", seq=1, is_snapshot=True, data=self.snapshot)
        if isinstance(order, rn.QueryRun):
            first = max(0, order.num_known - self.num_again)
            return report(first, self.rows[first:], self.state, self.evaluations, self.fault)
        return None

    def of(self, kind):
        return [order for order in self.heard if isinstance(order, kind)]


@pytest.fixture
def supervisor():
    return Supervisor()


@pytest.fixture
def run(supervisor):
    """A run that was begun in generation 5."""
    return Run(SPEC, supervisor.ask, 5)


def world(*views, incidents=(), phase="running", reason=""):
    return SimpleNamespace(
        membership=EMPTY, runs=views, incidents=incidents, phase=phase, reason=reason
    )


# ---- its steps


def test_rows_are_added_and_those_that_ran_again_replaced():
    """A report begins where something is new, or where what was known has changed."""
    record = RunRecord()
    record.take(report(0, rows(0, 3)))
    record.take(report(2, rows(2, 5, loss=0.5)))
    assert record.rows["step"].tolist() == [0, 1, 2, 3, 4]
    assert record.rows["loss"].tolist() == [10, 9, 0.5, 0.5, 0.5]
    assert (record.num_known, record.num_missing, record.num_committed()) == (5, 0, 5)


def test_rows_that_a_new_supervisor_lacks_stay_until_they_are_committed_again():
    """A report of a later generation ends where the run stands now."""
    record = RunRecord()
    record.take(report(0, rows(0, 6, generation=1)))
    record.take(report(1, rows(1, 4, generation=1)))
    assert (record.rows["step"].tolist(), record.num_known) == ([0, 1, 2, 3, 4, 5], 6)
    record.take(report(3, rows(3, 5, generation=2)))
    assert record.rows["step"].tolist() == [0, 1, 2, 3, 4]
    assert record.rows["generation"].tolist() == [1, 1, 1, 2, 2]
    assert record.num_known == 5


def test_rows_that_were_dropped_before_they_were_read_are_counted():
    """Places are counted from the run's first step, whatever the supervisor still has."""
    record = RunRecord()
    record.take(report(0, rows(0, 2)))
    record.take(report(6, rows(6, 8)))
    assert record.rows["step"].tolist() == [0, 1, 6, 7]
    assert (record.num_known, record.num_missing) == (8, 4)


def test_the_pace_is_that_of_the_last_steps_and_absent_where_nothing_is_known():
    """No division by a time that is zero, and no pace of a run without steps."""
    record = RunRecord()
    assert (record.loss(), record.samples_per_second(), record.num_committed()) == (None,) * 3
    record.take(report(0, np.concatenate([rows(0, 100, seconds=9.0), rows(100, 120)])))
    assert record.samples_per_second() == pytest.approx(120)
    record.take(report(0, rows(0, 2, seconds=[0.0, 0.25])))
    pace = record.history()["samples_per_second"]
    assert np.isnan(pace[0])
    assert pace[1] == pytest.approx(240)


def test_the_history_asks_for_what_is_not_known_and_no_more(run, supervisor):
    """Once the run is over and all is known, nobody is asked."""
    supervisor.rows = rows(0, 3)
    history = run.history
    columns = "step loss samples seconds generation world_size lr samples_per_second"
    assert " ".join(history) == columns
    assert history["step"].tolist() == [0, 1, 2]
    assert history["samples_per_second"].tolist() == [120, 120, 120]
    supervisor.rows, supervisor.state = rows(0, 5), "finished"
    assert run.history["loss"].tolist() == [10, 9, 8, 7, 6]
    assert run.history["step"].tolist() == [0, 1, 2, 3, 4]
    assert [order.num_known for order in supervisor.heard] == [0, 3]


def test_a_look_shows_how_it_stands_now_and_asks_seldom(run, supervisor, monkeypatch):
    """Also after an order; and where nobody answers, what was known before."""
    monkeypatch.setattr(module, "LOOK_LIMIT_S", 60.0)
    run.hear(view(), ())
    supervisor.rows = rows(0, 3)
    assert (run.num_committed, str(run)) == (
        3,
        "trainer: running, 3 of 10 steps, loss 8, 120 samples/s",
    )
    assert len(supervisor.of(rn.QueryRun)) == 1
    supervisor.rows = rows(0, 4)
    run.pause()
    assert (run.num_committed, run.samples_per_second) == (4, 120)
    assert len(supervisor.of(rn.QueryRun)) == 2
    run.resume()
    known = "trainer: running, 4 of 10 steps, loss 7, 120 samples/s"
    waits = f"{known}, as known before: the supervisor has not answered yet"
    for error, line in ((TimeoutError(), waits), (NbdistError("gone"), known)):
        supervisor.error, run._fresh_until = error, 0.0
        assert repr(run) == f"<run of {line}>"


def test_while_the_supervisor_is_replaced_the_last_known_step_is_shown(run, supervisor):
    """Also where nobody has looked before: what the old one has told, and that it may be old; the
    new one may know fewer rows at first."""
    supervisor.error = TimeoutError("no answer")
    run.hear(replace(view("recovering"), step=7), ())
    assert run.num_committed == 7
    assert run.summary() == (
        "trainer: recovering, 7 of 10 steps, as known before: the supervisor has not answered yet"
    )
    supervisor.error, supervisor.rows = None, rows(0, 8)
    assert run.summary().startswith("trainer: recovering, 8 of 10 steps, loss")
    supervisor.rows = rows(0, 0)
    assert run.summary().startswith("trainer: recovering, 8 of 10 steps, loss")


def test_steps_that_nobody_has_reported_are_told_apart(run, supervisor):
    """They are counted, and are no losses that are not finite; a story has the others only."""
    lost = np.nan
    supervisor.rows = rows(0, 6)
    supervisor.rows[2:4] = [(s, lost, 0, lost, 0, 0, lost, lost) for s in (2, 3)]
    run.refresh()
    assert "no engine has reported: 2" in run.summary()
    assert "finite" not in run.summary()
    story = run.story()
    assert story.rows["step"].tolist() == [0, 1, 4, 5]
    assert "steps that were committed, and that no engine has reported: 2" in story.notes


def test_steps_without_a_finite_loss_are_counted(run, supervisor):
    """A loss that is no number any more does not end quietly."""
    supervisor.rows = rows(0, 3, loss=[1.0, np.nan, np.inf])
    assert "2 steps without a finite loss" in run.summary()
    supervisor.rows = rows(0, 3, loss=[1.0, 2.0, np.inf])
    supervisor.num_again = 3
    run.refresh()
    assert "1 step without a finite loss" in str(run)


def test_a_history_is_a_copy(run, supervisor):
    """Whoever changes it changes nobody else's."""
    supervisor.rows = rows(0, 2)
    run.history["loss"][0] = -1
    assert run.history["loss"][0] == 10


def test_a_run_that_failed_is_asked_again(run, supervisor):
    """Engines may report steps that they had applied when it failed."""
    supervisor.rows, supervisor.state = rows(0, 2), "failed"
    supervisor.fault = rn.RunFault(kind="ValueError", message="no")
    assert len(run.history["step"]) == 2
    supervisor.rows = rows(0, 3)
    assert len(run.history["step"]) == 3


def test_what_is_known_is_told_when_the_cluster_is_gone(run, supervisor):
    """And the story notes what is missing, and why."""
    supervisor.rows = rows(0, 3)
    run.refresh()
    supervisor.error = WrongState("the cluster is shut down")
    assert run.history["step"].tolist() == [0, 1, 2]
    assert run.story().notes == [
        "steps after the last one here are not known: the cluster is shut down"
    ]


def test_a_history_that_cannot_be_fetched_in_time_says_so(run, supervisor):
    """Rows that are old are not passed off as new; a line about the run makes do with them."""
    supervisor.rows = rows(0, 3)
    run.refresh()
    supervisor.error = TimeoutError("no answer")
    with pytest.raises(TimeoutError):
        run.history  # noqa: B018
    known = "trainer: running, 3 steps, loss 8, 120 samples/s"
    assert run.summary() == f"{known}, as known before: the supervisor has not answered yet"


def test_two_threads_take_reports_in_order(run, supervisor):
    """Rows come out once each, however many ask at the same time."""
    supervisor.rows = rows(0, 200)
    answer = supervisor.ask

    def ask(order, timeout):
        time.sleep(0.001)
        return answer(order, timeout)

    run._ask = ask
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: run.history["step"].tolist(), range(8)))
    assert found == [list(range(200))] * 8


def test_nobody_waits_for_ever_for_another_thread(run):
    """It is told that another has asked."""
    asked, go_on = threading.Event(), threading.Event()

    def ask(*_):
        asked.set()
        go_on.wait(SOON_S)
        return report(0, rows(0, 1))

    run._ask = ask
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run.refresh)
        assert asked.wait(SOON_S)
        with pytest.raises(TimeoutError, match="another thread has asked"):
            run.refresh(0.01)
        go_on.set()
        first.result(SOON_S)


def test_evaluations_come_with_the_steps(run, supervisor):
    """Oldest first, as the supervisor has them."""
    done = Evaluation(step=2, at=1.0, metrics={"loss": 0.5})
    supervisor.evaluations = (done,)
    assert run.evaluations == [done]


def test_incidents_are_those_from_its_beginning_to_its_end(run):
    """Not those before; what became of them later is told, what came later is not."""
    before, first, second = incident(4), incident(5), incident(6, slot=3)
    run.hear(view(), [before, first])
    run.hear(view("finished"), [before, first, second])
    closed = incident(6, slot=3, generation_after=7)
    run.hear(view("finished"), [before, first, closed, incident(7)])
    assert run.incidents == [first, closed]


# ---- its state and its end


@pytest.mark.parametrize(
    ("told", "state", "is_over"),
    [
        ("binding", "running", False),
        ("running", "running", False),
        ("paused", "paused", False),
        ("recovering", "recovering", False),
        ("finished", "finished", True),
        ("stopped", "stopped", True),
        ("failed", "failed", True),
    ],
)
def test_its_state_is_what_was_heard_last(run, told, state, is_over):
    """A run of which nothing was heard yet has just been begun."""
    assert run.state == "running"
    run.hear(view(told), ())
    assert (run.state, run.is_over) == (state, is_over)


def test_a_run_that_is_over_stays_so(run):
    """A late notice changes nothing."""
    run.hear(view("finished"), ())
    run.hear(view("running"), ())
    run.cluster_gone("RecoveryFailed", "all is gone")
    assert run.state == "finished"
    assert run.wait(0) is run


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_waiting_ends_when_the_run_does(run, state):
    """In the thread that waits, at once."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run.wait)
        run.hear(view("paused"), ())
        time.sleep(0.02)
        assert not waiting.done()
        run.hear(view(state), ())
        assert waiting.result(SOON_S) is run


def test_after_a_wait_the_last_step_is_known(run, supervisor):
    """Whoever shows the run then shows its end; what is finished has come to its target."""
    supervisor.rows, supervisor.state = rows(0, 10), "finished"
    run.hear(view("finished"), ())
    assert (run.num_committed, str(run)) == (10, "trainer: finished, 10 of 10 steps, loss 1")
    assert run.wait() is run


def test_a_wait_that_is_too_short_says_how_far_it_is(run, supervisor):
    """And the run goes on."""
    supervisor.rows = rows(0, 4)
    run.hear(view(), ())
    with pytest.raises(TimeoutError, match=r"after 0\.01 s, trainer: running, 4 of 10 steps.*goes"):
        run.wait(0.01)


def test_a_wait_that_is_no_number_of_seconds_is_named(run):
    """Before anything is waited for."""
    with pytest.raises(TypeError, match="timeout='5': seconds, or None for no limit"):
        run.wait("5")


def test_a_run_that_failed_raises_what_the_engine_raised(run):
    """With the engine's traceback, by rank."""
    fault = rn.RunFault(kind="ValueError", message="no", rank=2, traceback=("line 1", "line 2"))
    run.hear(view("failed", fault=fault), ())
    with pytest.raises(CellFailed, match=r"^ValueError: no \(rank 2\)$") as caught:
        run.wait()
    error = caught.value.errors[2]
    assert (error.rank, error.ename, error.evalue) == (2, "ValueError", "no")
    assert error.traceback == ["line 1", "line 2"]
    assert "On rank 2:" in caught.value._render_traceback_()
    assert "failed (ValueError: no)" in str(run)


def test_a_run_without_a_world_raises_why(run):
    """It is no fault of the user's code."""
    fault = rn.RunFault(kind="RecoveryFailed", message="no engine survived")
    run.hear(view("failed", fault=fault), ())
    with pytest.raises(RecoveryFailed, match="no engine survived"):
        run.wait()


def test_a_run_that_failed_without_a_word_failed_all_the_same(run):
    """The log may say more."""
    run.hear(view("failed"), ())
    with pytest.raises(CellFailed, match="log"):
        run.wait()


@pytest.mark.parametrize(
    ("kind", "error", "state"),
    [("WrongState", WrongState, "stopped"), ("RecoveryFailed", RecoveryFailed, "failed")],
)
def test_whoever_waits_is_told_when_the_cluster_ends(run, kind, error, state):
    """At once; and so is whoever waits later."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run.wait)
        time.sleep(0.02)
        run.cluster_gone(kind, "the end")
        with pytest.raises(error, match="the end"):
            waiting.result(SOON_S)
    with pytest.raises(error, match="the end"):
        run.wait(0)
    assert run.state == state


def test_an_interrupt_ends_the_wait_and_not_the_run(run, supervisor, monkeypatch):
    """It is a KeyboardInterrupt of one line, which says that the run goes on."""

    def press(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._changed, "wait", press)
    with pytest.raises(KeyboardInterrupt) as caught:
        run.wait()
    assert isinstance(caught.value, Detached)
    (line,) = caught.value._render_traceback_()
    assert line.startswith("Detached: the run goes on (trainer: running")
    assert supervisor.heard == []
    run.hear(view("finished"), ())
    assert run.wait() is run


def test_a_run_can_be_awaited(run):
    """The event loop goes on meanwhile; a run that is over is not waited for."""

    async def main():
        asyncio.get_running_loop().call_later(
            0.01, lambda: threading.Thread(target=run.hear, args=(view("finished"), ())).start()
        )
        first = await asyncio.wait_for(run, SOON_S)
        return first, await run

    assert asyncio.run(main()) == (run, run)
    assert run._wakers == []


def test_an_awaited_run_that_fails_raises():
    """As `wait` does; one whose await was given up disturbs nobody."""
    run = Run(SPEC, Supervisor().ask, 5)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.01)
        run.cluster_gone("RecoveryFailed", "all is gone")
        await run

    with pytest.raises(RecoveryFailed, match="all is gone"):
        asyncio.run(main())


def test_a_loop_that_is_closed_holds_nobody_up(run):
    """What waited there is gone with it."""
    loop = asyncio.new_event_loop()
    loop.close()
    run._wakers.append(lambda: loop.call_soon_threadsafe(print))
    run.hear(view("finished"), ())
    assert run.wait() is run


# ---- orders


def test_orders_go_to_the_supervisor(run, supervisor):
    """Each as it was given; they return when they are answered."""
    run.step()
    run.step(np.int64(3))
    run.pause()
    run.resume()
    run.stop()
    run.set(lr=np.float32(0.5))
    assert supervisor.heard == [
        rn.SteerRun(run="r1", action="step", steps=1),
        rn.SteerRun(run="r1", action="step", steps=3),
        rn.SteerRun(run="r1", action="pause"),
        rn.SteerRun(run="r1", action="resume"),
        rn.SteerRun(run="r1", action="stop"),
        rn.SetRun(run="r1", lr=0.5),
    ]


def test_an_order_that_is_refused_raises(run, supervisor):
    """A run that is over takes none."""
    supervisor.error = WrongState("the run is finished; it takes no orders any more")
    for order in (run.step, run.pause, run.resume, run.stop, lambda: run.set(lr=1)):
        with pytest.raises(WrongState, match="no orders any more"):
            order()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_steps_are_whole_and_at_least_one(run, supervisor, steps):
    """Nothing is sent otherwise, and the message names the argument."""
    with pytest.raises(ValueError, match=r"n=.*: an integer, at least 1"):
        run.step(steps)
    with pytest.raises(ValueError, match=r"steps=.*: an integer, at least 1"):
        Runs(supervisor.ask).begin("trainer", steps)
    assert supervisor.heard == []


@pytest.mark.parametrize(
    ("lr", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), (True, ValueError),
     ("1", ValueError), (10**400, ValueError), ("x", TypeError), (None, TypeError),
     ([1], TypeError)],
)  # fmt: skip
def test_a_rate_is_a_finite_number(run, supervisor, lr, error):
    """Nothing is sent otherwise."""
    with pytest.raises(error, match="lr="):
        run.set(lr=lr)
    assert supervisor.heard == []


# ---- to show and keep


def test_a_run_is_shown_as_one_line(run, supervisor):
    """With the newest step."""
    supervisor.rows = rows(0, 4)
    run.hear(view("paused"), ())
    shown = run._repr_mimebundle_(include=None, exclude=None)
    line = "<run of trainer: paused, 4 of 10 steps, loss 7, 120 samples/s>"
    assert (shown, repr(run)) == ({"text/plain": line}, line)
    own = Run(rn.RunSpec(run="c1.0", name="", cell="c1"), supervisor.ask, 5)
    supervisor.rows = rows(0, 0)
    assert repr(own) == "<run of a cell's own loop: running, 0 steps>"


def test_a_story_holds_all_that_a_report_needs(run, supervisor):
    """Rows, incidents, evaluations, and what the reader should know."""
    supervisor.rows, supervisor.state = rows(0, 3), "finished"
    supervisor.evaluations = (Evaluation(step=2, at=1.0, metrics={}),)
    run.hear(view("finished"), [incident()])
    story = run.story()
    assert (story.title, story.notes) == ("Run of trainer", [])
    assert story.rows["step"].tolist() == [0, 1, 2]
    assert (story.incidents, len(story.evaluations)) == ([incident()], 1)
    supervisor.rows, supervisor.state, supervisor.num_again = rows(0, 4), "running", 0
    going = Run(SPEC, supervisor.ask, 5)
    going._record.take(report(3, rows(3, 4)))
    assert going.story().notes == [
        "3 steps were dropped before they were read",
        "the run was running when this was written",
    ]


def attempts(**columns):
    """Three attempts of slot 0, two of slot 2."""
    table = {"slot": np.array([0, 2, 0, 2, 0]), "ended_at": 10.0 + np.arange(5)}
    others = "step ready_at generation attempt samples step_s compute_s exposed_s wait_s data_s"
    table |= {name: np.full(5, np.nan) for name in [*others.split(), "optimizer_s"]}
    return table | columns


def memory():
    """Two slots, one of which has a GPU."""
    return {
        "at": np.array([1.0, 2.0, 2.0]),
        "slot": np.array([0, 2, 2]),
        "kind": np.array([Kind.MEMORY_RSS, Kind.MEMORY_RSS, Kind.MEMORY_DEVICE]),
        "bytes": np.array([5e8, 6e8, 7e9]),
    }


def test_a_story_has_what_each_slot_did(run, supervisor):
    """Named and measured as a record has it; what is not known is no point of a curve."""
    compute = np.array([0.1, 0.2, np.nan, 0.4, 0.5])
    tables = {"steps": attempts(compute_s=compute), "memory": memory()}
    supervisor.snapshot = pack(replace(HEADER, thinned=("steps",)), tables)
    supervisor.rows, supervisor.state = rows(0, 3), "finished"
    run.hear(view("finished"), [])
    story = run.story()
    assert story.notes == ["of each rank's steps the extremes are shown"]
    at, values = story.series[0]["compute_s"]
    assert at.tolist() == [10, 14]
    np.testing.assert_allclose(values, [0.1, 0.5], rtol=1e-6)
    assert set(story.series[0]) == {"compute_s", "memory_rss_bytes"}
    assert set(story.tables) == {"steps", "memory"}
    assert story.state == "finished"
    assert story.series[2]["memory_device_bytes"][1].tolist() == [7e9]


def test_what_each_slot_did_is_kept(run, supervisor):
    """Of a run that is over it is fetched once, and is there when the cluster is gone."""
    supervisor.snapshot = pack(HEADER, {"memory": memory()})
    run.hear(view("finished"), [])
    run.refresh_curves()
    supervisor.error = WrongState("the cluster is shut down")
    assert sorted(run.story().series) == [0, 2]
    assert len(supervisor.of(fd.QuerySnapshot)) == 1


def test_a_run_of_which_nothing_is_kept_says_so(run, supervisor):
    """The supervisor keeps the last ones only."""
    supervisor.rows, supervisor.state = rows(0, 3), "finished"
    run.hear(view("finished"), [])
    run.refresh()
    supervisor.error = WrongState("nothing is kept of this run")
    run.refresh_curves()
    assert run.story().notes == ["what each rank did is not known: nothing is kept of this run"]


# ---- the runs of a cluster


def test_a_run_is_begun_and_heard_of(supervisor):
    """One handle, whichever comes first: the answer, or the world with the run in it."""
    runs = Runs(supervisor.ask)
    run = runs.begin("trainer", 3)
    assert supervisor.heard == [rn.BeginRun(name="trainer", steps=3)]
    assert (run.id, run.name, run.first_step, run.target) == ("r1", "trainer", 7, 10)
    assert run.num_committed == 7
    runs.hear(world(view("paused")))
    assert (runs.all(), run.state) == ([run], "paused")
    earlier = Runs(supervisor.ask)
    earlier.hear(world(view("running", target=12)))
    assert earlier.begin("trainer", 3) is earlier.all()[0]
    assert earlier.all()[0].target == 12


def test_a_refused_run_leaves_no_handle(supervisor):
    """Whatever the reason: another one goes on, or the name is bound to something else."""
    runs = Runs(supervisor.ask)
    supervisor.error = NbdistError("TypeError: rank 1: x is a Linear, not a nbdist.train.Trainer")
    with pytest.raises(NbdistError, match="rank 1: x is a Linear"):
        runs.begin("x", 3)
    assert runs.all() == []


@pytest.mark.parametrize("name", ["", "a.b", "1x", None, 3, object()])
def test_a_trainer_is_named_by_a_variable(supervisor, name):
    """Nothing is sent otherwise."""
    with pytest.raises(ValueError, match="the engines' variable that holds the trainer"):
        Runs(supervisor.ask).begin(name, 3)
    assert supervisor.heard == []


def test_a_cells_own_loop_is_a_run_too(supervisor):
    """It is known by what the supervisor says of it."""
    runs = Runs(supervisor.ask)
    runs.hear(world(view(spec=rn.RunSpec(run="c1.0", name="", cell="c1"))))
    (run,) = runs.all()
    assert (run.id, run.name, run.target) == ("c1.0", "", 10)


def test_the_pace_of_the_run_that_goes_on(supervisor):
    """Steps, and samples per second of all ranks; None where none does."""
    runs = Runs(supervisor.ask)
    assert runs.pace() == (None, None)
    runs.begin("trainer", 3)
    assert runs.pace() == (7, None)
    supervisor.rows = rows(7, 9)
    step, pace = runs.pace()
    assert step == 9
    assert pace == runs.all()[-1].samples_per_second > 0
    assert runs.usual_s() == 0.5
    supervisor.error = TimeoutError("no answer")
    assert (runs.pace()[0], runs.usual_s()) == (9, 0.5)
    runs.hear(world(view("finished")))
    assert (runs.pace(), runs.usual_s()) == ((None, None), None)


def test_before_a_run_begins_the_last_one_is_read_to_its_end(supervisor):
    """The supervisor forgets old ones."""
    runs = Runs(supervisor.ask)
    first = runs.begin("trainer", 3)
    supervisor.rows, supervisor.state = rows(7, 10), "finished"
    supervisor.num_again = 0
    runs.begin("trainer", 3)
    supervisor.error = WrongState("this run is not known here")
    assert first.history["step"].tolist() == [7, 8, 9]


def test_a_shutdown_keeps_what_there_is_to_know(supervisor):
    """Who waits is told at once; the steps of all runs are fetched, and can be read afterwards."""
    runs = Runs(supervisor.ask)
    run = runs.begin("trainer", 3)
    supervisor.rows = rows(0, 5)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run.wait)
        runs.shut_down()
        with pytest.raises(WrongState, match="shut down before the run was over"):
            waiting.result(SOON_S)
    supervisor.error = WrongState("the cluster is shut down")
    assert run.history["step"].tolist() == [0, 1, 2, 3, 4]
    assert run.state == "stopped"


def test_a_shutdown_is_not_held_up_by_a_supervisor_that_does_not_answer(supervisor, monkeypatch):
    """It asks for the rest, for a moment in all, and goes on without it."""
    monkeypatch.setattr("nbdist.session.runs.LAST_LOOK_S", 0.05)
    runs = Runs(supervisor.ask)
    for name in ("a", "b", "c"):
        runs.hear(world(view(spec=rn.RunSpec(run=name, name=name))))

    def ask(_order, timeout):
        time.sleep(timeout)
        raise TimeoutError

    for run in runs.all():
        run._ask = ask
    began = time.monotonic()
    runs.shut_down()
    assert time.monotonic() - began < 4 * 0.05


def test_a_world_that_failed_ends_its_runs(supervisor):
    """With its reason."""
    runs = Runs(supervisor.ask)
    run = runs.begin("trainer", 3)
    runs.hear(world(view(), phase="failed", reason="no engine survived"))
    with pytest.raises(RecoveryFailed, match="no engine survived"):
        run.wait(0)


def test_a_wait_goes_on_while_the_supervisor_is_replaced(run, supervisor):
    """What the next one says counts."""
    supervisor.error = TimeoutError("no answer")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run.wait)
        run.hear(view("recovering"), ())
        run.hear(view("running"), ())
        assert not waiting.done()
        run.hear(view("finished"), ())
        assert waiting.result(SOON_S) is run


def test_a_line_does_not_wait_long(run, supervisor):
    """A busy supervisor delays nobody's display."""
    limits = []
    run._ask = lambda order, timeout: limits.append(timeout) or supervisor.ask(order, timeout)
    run.summary()
    assert limits == [module.GLANCE_LIMIT_S]


def test_a_story_tells_when_it_began_and_what_was_done_to_it(run, supervisor):
    """The record of a report names the day; notes say that engines were made slow."""
    supervisor.rows = rows(7, 9, at=time.monotonic() - 60.0)
    run.first_step = 7
    run.hear(view(), ())
    story = run.story()
    began = datetime.fromisoformat(story.started)
    assert 50 < (datetime.now(tz=UTC) - began).total_seconds() < 120
    assert (story.first, story.target) == (7, 10)
    slowed = replace(report(0, rows(0, 1)), remarks=("slot 1: made 5 times as slow",))
    record = RunRecord()
    record.take(slowed)
    assert record.notes([], "", "running")[0] == "slot 1: made 5 times as slow"
