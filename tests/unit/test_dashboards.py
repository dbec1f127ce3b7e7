"""Dashboards of a cluster: where their frames come from, what their buttons do."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from nbdist.errors import TargetError, WrongState
from nbdist.protocol import feed as fd
from nbdist.protocol import frames as fr
from nbdist.protocol.story import ROWS, RunStory
from nbdist.session.dashboards import Dashboards, RunFeed
from nbdist.views import dashboard as db
from nbdist.views import host as hs


class FakeRun:
    """Notes what it is told."""

    def __init__(self, *, is_over=False):
        self.id, self.name, self.is_over, self.target = "r1", "trainer", is_over, 3
        self.state = "finished" if is_over else "running"
        self.told = []

    def __getattr__(self, name):
        return lambda *values: self.told.append((name, *values))

    def story(self):
        rows = np.zeros(3, ROWS)
        rows["step"], rows["seconds"] = [0, 1, 2], 1.0
        return RunStory(title="A run", rows=rows)


class FakeFeeds:
    """Subscriptions that are noted, or refused."""

    def __init__(self):
        self.opened, self.closed, self.error = [], [], None

    def open(self, relay, **options):
        if self.error:
            raise self.error
        self.relay = relay
        self.opened.append(options)
        return SimpleNamespace(acknowledge=print, resync=lambda: None)

    def close(self, feed):
        self.closed.append(feed)


class FakeCluster:
    """Two seats, the second one empty."""

    def __init__(self, *runs):
        self.runs, self.told, self.feeds = list(runs), [], FakeFeeds()

    def status(self):
        return [
            SimpleNamespace(slot=0, rank=0, pid=10),
            SimpleNamespace(slot=3, rank=1, pid=13),
            SimpleNamespace(slot=4, rank=None, pid=None),
        ]

    def kill(self, rank, *, signal):
        self.told.append((signal, rank))

    def slow(self, rank, factor):
        self.told.append(("slow", rank, factor))


@pytest.fixture
def opened(monkeypatch):
    """Opens a dashboard of a made-up cluster."""

    def make(cluster, *views, run=None, ask=None):
        dashboards = Dashboards(cluster, ask or print)
        made.append(dashboards.open(*views, run=run))
        return dashboards, made[-1]

    made = []
    monkeypatch.setattr(db, "picture", lambda frame, _: frame)
    monkeypatch.setattr(db, "_show", lambda *_, **__: None)
    yield make
    for dashboard in made:
        dashboard.close()


def test_what_nobody_sees_any_more_is_closed_with_the_next_one(opened, monkeypatch):
    """V19: a cell that is run again and again leaves one widget, not one for each time."""
    cluster = FakeCluster(FakeRun())
    dashboards, first = opened(cluster)
    assert first.widget
    first.hear({"type": "hello", "view": "a", "has_code": True})
    first.hear({"type": "bye", "view": "a"})  # a page that is loaded again
    second = dashboards.open()
    assert first._widget is not None
    first.hear({"type": "hello", "view": "b", "has_code": True})
    first.hear({"type": "bye", "view": "b", "is_removed": True})
    third = dashboards.open()
    assert first._widget is None
    assert [pair[0] for pair in dashboards._open] == [second, third]
    for cell, request, is_left in (("a", "2", True), ("a", "1", False), ("b", "2", False)):
        third._places = {hs.Place("a", "1")}
        monkeypatch.setattr(db, "place", lambda cell=cell, request=request: hs.Place(cell, request))
        assert third.is_left is is_left
    for dashboard in (second, third):
        dashboard.close()


def test_buttons_of_a_seat_reach_the_engine_that_was_seen(opened):
    """An order names slot and process, and becomes one to the rank that has them now."""
    cluster = FakeCluster()
    _, dashboard = opened(cluster)
    actions = dashboard._actions
    actions["kill"](slot=3, pid=13, factor=5)
    actions["stop"](slot=0, pid=10, factor=5)
    actions["slow"](slot=3, pid=13, factor=5)
    assert cluster.told == [("KILL", 1), ("STOP", 0), ("slow", 1, 5)]


@pytest.mark.parametrize(("slot", "pid"), [(3, 99), (4, None), (7, 13)])
def test_an_engine_that_is_gone_takes_no_order(opened, slot, pid):
    """Nobody else is killed in the place of an engine that has ended meanwhile."""
    cluster = FakeCluster()
    _, dashboard = opened(cluster)
    with pytest.raises(TargetError, match="not in the group any more"):
        dashboard._actions["kill"](slot=slot, pid=pid, factor=5)
    assert cluster.told == []


def test_controls_drive_the_newest_run_or_the_one_that_is_shown(opened):
    """A dashboard of the cluster follows its runs; one of a run stays with it."""
    first, second = FakeRun(), FakeRun()
    cluster = FakeCluster(first)
    _, of_cluster = opened(cluster)
    _, of_run = opened(cluster, run=first)
    cluster.runs.append(second)
    of_cluster._actions["pause"]()
    of_run._actions["step"]()
    assert (first.told, second.told) == ([("step",)], [("pause",)])
    cluster.runs.clear()
    with pytest.raises(WrongState, match="no run"):
        of_cluster._actions["pause"]()


def test_an_unknown_view_is_refused(opened):
    """The message names the views that there are."""
    with pytest.raises(ValueError, match="no view 'map': there are overview"):
        opened(FakeCluster(), "loss", "map")


def test_frames_are_passed_on_as_they_come():
    """A subscription names run and views; number and bytes of a frame reach the dashboard."""
    feeds, taken = FakeFeeds(), []
    run = FakeRun()
    feed = RunFeed(feeds, None, lambda: run, run)
    subscribed = feed.subscribe(("loss",), lambda *frame: taken.append(frame), print)
    options = feeds.opened[0]
    assert (options["run"], options["views"]) == ("r1", ("loss",))
    assert options["window"] == fr.MAX_WINDOW
    feeds.relay(None, fd.Frame(name="v", seq=4, is_snapshot=True, data=b"frame"))
    assert taken == [(4, b"frame")]
    subscribed.close()
    assert len(feeds.closed) == 1


def test_only_an_end_that_was_not_wanted_is_told():
    """A dashboard that closes its subscription itself is not told that it ended."""
    feeds, ends = FakeFeeds(), []
    feed = RunFeed(feeds, None, lambda: None, None)
    for closes in (True, False):
        subscribed = feed.subscribe((), print, ends.append)
        if closes:
            subscribed.close()
        feeds.opened[-1]["ended"]("it ended")
    assert ends == ["it ended"]


def test_a_run_that_the_supervisor_has_forgotten_is_told_by_its_story():
    """What this kernel knows of a run is shown where nobody else knows it."""
    feeds, taken = FakeFeeds(), []
    feeds.error = WrongState("this run is not known here")
    over = FakeRun(is_over=True)
    feed = RunFeed(feeds, None, lambda: over, over)
    feed.subscribe(("loss",), lambda *frame: taken.append(frame), print).resync()
    ((_, frame),) = taken
    assert fr.unpack(frame)[0].run.step == 3
    with pytest.raises(WrongState):
        RunFeed(feeds, None, lambda: None, FakeRun()).subscribe((), print, print)


def test_a_snapshot_is_the_supervisors_or_the_story():
    """A picture at the end shows all that the supervisor has, or what is known here."""
    run, frame = FakeRun(is_over=True), fd.Frame(name="", seq=1, is_snapshot=True, data=b"all")
    assert RunFeed(FakeFeeds(), lambda *_: frame, lambda: run, run).snapshot() == b"all"

    def gone(*_):
        raise WrongState("the supervisor has ended")

    told = RunFeed(FakeFeeds(), gone, lambda: run, run).snapshot()
    assert fr.unpack(told)[0].run.state == "finished"
    assert RunFeed(FakeFeeds(), gone, lambda: None, None).snapshot() is None


def test_at_its_end_a_runs_dashboards_become_pictures(opened):
    """Those that show it, but for one that was opened after it; at the cluster's end all."""
    run = FakeRun()
    cluster = FakeCluster(run)
    frame = fd.Frame(name="", seq=1, is_snapshot=True, data=b"all")
    dashboards, of_run = opened(cluster, run=run, ask=lambda *_: frame)
    of_cluster = dashboards.open()
    run.is_over = True
    later = dashboards.open(run=run)
    for dashboard in (of_run, of_cluster, later):
        dashboard._pages.expect()
    dashboards.settle(run)
    assert [d._frozen is not None for d in (of_run, of_cluster, later)] == [True, True, False]
    dashboards.settle()
    assert all(d._frozen is not None for d in (of_cluster, later))
    of_cluster.close()
    later.close()


def test_who_follows_the_newest_run_freezes_at_its_end_and_thaws_with_the_next(opened):
    """%dist_dashboard leaves a picture of each run, and is live again while there is one."""
    first = FakeRun()
    cluster = FakeCluster(first)
    frame = fd.Frame(name="", seq=1, is_snapshot=True, data=b"all")
    dashboards, follower = opened(cluster, ask=lambda *_: frame)
    follower._pages.expect()
    follower._errands.do = lambda act: act()
    follower._freeze_if_over()
    assert follower._frozen is None
    first.is_over = True
    follower.hear({"type": "bye", "view": "a"})
    follower._pages.expect()
    dashboards.settle(first)
    assert follower._frozen is not None
    cluster.runs.append(FakeRun())
    dashboards.begun()
    assert follower._frozen is None
    cluster.runs[-1].is_over = True
    follower._pages.expect()
    follower._freeze_if_over()
    assert follower._frozen is not None
    follower.hear({"type": "bye", "view": "a", "is_removed": True})
    assert not follower.is_left


def test_who_follows_and_is_opened_after_a_run_waits_for_the_next(opened):
    """Between two runs the views stay live, so that there is something to press."""
    cluster = FakeCluster(FakeRun(is_over=True))
    dashboards, follower = opened(cluster)
    assert not follower.freezes
    cluster.runs.append(FakeRun())
    dashboards.begun()
    assert follower.freezes


def test_the_end_of_a_run_is_told_to_those_who_follow_it(opened, monkeypatch):
    """They freeze a moment later, when what was told of it last has come."""
    monkeypatch.setattr(db, "LINGER_S", 0.0)
    run = FakeRun(is_over=True)
    frame = fd.Frame(name="", seq=1, is_snapshot=True, data=b"all")
    dashboards, follower = opened(FakeCluster(run), ask=lambda *_: frame)
    follower.freezes = True
    follower._pages.expect()
    dashboards.ended()
    deadline = time.monotonic() + 10
    while follower._frozen is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
