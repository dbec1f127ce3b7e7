"""What kernels are answered about training runs, and when."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from nbdist.config import ClusterConfig
from nbdist.protocol import events as ev
from nbdist.protocol import feed as fd
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.story import ROWS
from nbdist.supervisor.desk import NUM_AGAIN, Desk
from nbdist.supervisor.instructions import Tell
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.progress import Progress
from nbdist.supervisor.run import Run
from nbdist.supervisor.state import Machine


class NoJournal:
    """A journal without entries."""

    length = 0


class Counter:
    """A desk, and the bodies of the answers that it gave."""

    def __init__(self):
        self.machine = Machine(ClusterConfig(num_engines=2))
        self.machine.phase, self.machine.awaited = Phase.BREAKING, {0}  # nothing goes by itself
        self.answers = []
        self.desk = Desk(
            self.machine,
            NoJournal(),
            None,
            send=lambda _, message: self.answers.append(message.body),
            signal_engine=lambda *_: None,
        )

    def ask(self, order):
        self.answers.clear()
        self.desk.take(b"kernel", od.Request(number=1, order=order), 1.0)
        return self.settle()

    def settle(self):
        self.desk.settle()
        return self.answers[-1] if self.answers else None

    def run(self, **changes):
        """A run is under way."""
        spec = rn.RunSpec(run="r", name="trainer")
        run = Run(spec, 9, state="running", target=9, progress=Progress(0))
        for name, value in changes.items():
            setattr(run, name, value)
        self.machine.runs.present = run
        return run

    def steer(self, action, steps=0, run="r"):
        return self.ask(rn.SteerRun(run=run, action=action, steps=steps))


def test_a_run_that_is_wanted_is_answered_when_it_has_begun():
    """Not before; then with the answer that the machine has."""
    counter = Counter()
    assert counter.ask(rn.BeginRun(name="trainer", steps=3)) is None
    run = counter.machine.runs.present.spec.run
    counter.desk.begun(run, rn.RunBegun(run=run, step=0))
    assert counter.answers == [rn.RunBegun(run=run, step=0)]


def test_slow_is_answered_when_the_engines_say_so():
    """By their beats; an engine that is gone is slow no more."""
    counter = Counter()
    counter.machine.start(1.0)
    order = od.SlowEngines(slots=(0, 1), factor=3.0)
    first, second = (counter.machine.seats[slot] for slot in (0, 1))
    beat = ev.Beat(slot=0, pid=1, number=1, generation=1, cell=None, waiting=None, rss_bytes=0)
    first.beat = second.beat = beat
    assert counter.ask(order) is None
    told = [i for i in counter.machine.take() if isinstance(i, Tell)]
    assert told == [Tell(slot, od.SlowDown(factor=3.0)) for slot in (0, 1)]
    first.beat = msgspec.structs.replace(beat, slow_factor=3.0)
    assert counter.settle() is None
    second.clear()
    assert counter.settle() == od.Done()


def test_a_view_that_is_refused_is_told_so_in_any_case():
    """By the answer, or where none is wanted by a notice: after a gap, or to another supervisor."""
    counter = Counter()
    sent = []
    counter.desk._send = lambda _, message: sent.append(message)
    refusal = od.Refused(kind="WrongState", message="not known here")
    counter.desk._feeds = SimpleNamespace(take=lambda *_: refusal)
    order = fd.Subscribe(name="v", views=("loss",), run="r")
    counter.desk.take(b"kernel", od.Request(number=4, order=order), 1.0)
    counter.desk.take(b"kernel", od.Request(number=0, order=order), 1.0)
    attach = od.Attach(pid=1, subscriptions=(order,))
    counter.desk.take(b"kernel", od.Request(number=0, order=attach), 1.0)
    ended = fd.SubscriptionEnded(name="v", reason="not known here")
    assert sent == [od.Answer(number=4, body=refusal), ended, ended]


def test_a_run_that_cannot_be_is_refused_at_once():
    """One goes on already; the world has failed."""
    counter = Counter()
    counter.run()
    assert counter.ask(rn.BeginRun(name="trainer", steps=3)).kind == "WrongState"
    counter.machine.fail("the controller ended", 1.0)
    assert counter.ask(rn.BeginRun(name="trainer", steps=3)).kind == "RecoveryFailed"


def test_orders_to_a_run_that_is_not_there_are_refused():
    """Steering and settings alike; a report is not known."""
    counter = Counter()
    for order in (
        rn.SteerRun(run="x", action="pause"),
        rn.SetRun(run="x", lr=0.1),
        rn.QueryRun(run="x"),
    ):
        assert counter.ask(order).kind == "WrongState"


def test_a_setting_is_answered_when_it_is_ordered():
    """It does not wait for the boundary."""
    counter = Counter()
    counter.run(is_going=True)
    assert counter.ask(rn.SetRun(run="r", lr=0.1)) == od.Done()


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("pause", {"is_going": True}, {"is_going": False, "state": "paused"}),
        ("resume", {"is_paused": True, "state": "paused"}, {"is_going": True}),
        ("stop", {"is_going": True}, {"state": "stopped"}),
        (
            "step",
            {"is_paused": True, "state": "paused"},
            {"is_paused": True, "until": None, "state": "paused"},
        ),
    ],
)
def test_an_order_is_answered_when_it_is_so(action, before, after):
    """It stands, goes or is over."""
    counter = Counter()
    run = counter.run(**before)
    assert counter.steer(action, 2) is None
    assert counter.settle() is None
    for name, value in after.items():
        setattr(run, name, value)
    assert counter.settle() == od.Done()


@pytest.mark.parametrize("action", ["pause", "resume", "step"])
def test_an_order_to_a_run_that_ends_is_answered(action):
    """Nobody waits for what cannot be any more."""
    counter = Counter()
    run = counter.run(is_going=action == "pause", is_paused=action != "pause")
    assert counter.steer(action, 1) is None
    run.state = "finished"
    assert counter.settle() == od.Done()


@pytest.mark.parametrize(("first", "then"), [("pause", "resume"), ("resume", "pause")])
def test_an_order_that_another_overtakes_is_refused(first, then):
    """Two kernels steer one run: the first is told that it is not so."""
    counter = Counter()
    counter.run(is_going=first == "pause", is_paused=first == "resume")
    assert counter.steer(first) is None
    counter.machine.runs.steer(rn.SteerRun(run="r", action=then))
    assert counter.settle().kind == "WrongState"


@pytest.mark.parametrize(
    ("num_rows", "num_known", "first"),
    [(10, 0, 0), (100, 50, 0), (100, 100, 36), (200, 150, 86), (98, 100, 34), (10, 500, 0)],
)
def test_a_report_sends_the_last_rows_again(num_rows, num_known, first):
    """Those that may have run once more; from there on without a gap."""
    counter = Counter()
    run = counter.run()
    rows = np.array([(s, 0.5, 60, 0.1, 1, 2, 0.1, 1.0) for s in range(num_rows)], ROWS)
    run.progress.add(0, rows.tobytes())
    report = counter.ask(rn.QueryRun(run="r", num_known=num_known))
    sent = np.frombuffer(report.rows, ROWS)
    assert report.first == first == max(0, min(num_known, num_rows) - NUM_AGAIN)
    assert sent["step"].tolist() == list(range(first, num_rows))
    assert report.view.state == "recovering"


def test_a_report_begins_after_what_was_dropped():
    """Places count from the run's first step, also when old rows are gone."""
    counter = Counter()
    run = counter.run(progress=Progress(1_000))
    run.progress.num_dropped = 90
    run.progress.add(0, np.array([(1_000, 0.5, 60, 0.1, 1, 2, 0.1, 1.0)], ROWS).tobytes())
    report = counter.ask(rn.QueryRun(run="r", num_known=5))
    assert (report.first, report.num_dropped) == (90, 90)
    assert np.frombuffer(report.rows, ROWS)["step"].tolist() == [1_000]
