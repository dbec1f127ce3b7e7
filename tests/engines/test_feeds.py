"""Live views on real engines, with a client that acknowledges: what comes, and what it costs."""

import os
import signal
import statistics
import time
from typing import get_args

import numpy as np
import pytest
import training

import nbdist
from nbdist.protocol.frames import PERIOD_S, WINDOW, unpack
from nbdist.protocol.tables import View
from nbdist.session.dashboards import RunFeed

SLOW = 3
NAMED_S = 4 * 5.0
COST = 4 / 0.98
"""Of a step's median with all views on, of one without, on a machine that others use too."""
ALL = get_args(View)


class Client:
    """Subscribes, acknowledges, and puts the tables together as a page does."""

    def __init__(self, engines, *, acknowledges=True, **wanted):
        self.frames, self.acknowledges = [], acknowledges
        self.ends = []
        wanted.setdefault("views", ALL)
        self.feed = engines.feeds.open(self.take, ended=self.ends.append, **wanted)

    def take(self, feed, frame):
        self.frames.append((time.monotonic(), frame))
        if self.acknowledges:
            feed.acknowledge(frame.seq)

    @property
    def headers(self):
        return [unpack(frame.data)[0] for _, frame in self.frames]

    def table(self, name):
        """All rows since the last snapshot, column by column."""
        parts = []
        for _, frame in list(self.frames):
            _, tables = unpack(frame.data)
            parts = [] if frame.is_snapshot else parts
            parts += [tables[name]] if name in tables else []
        return {c: np.concatenate([part[c] for part in parts]) for c in parts[0]} if parts else {}


def steps_of(client):
    return client.table("rows").get("step", np.empty(0))


def weighings(run):
    """How often the memory of each slot is in the run's story."""
    series = run.story().series
    return [len(series[slot].get("memory_rss_bytes", [()])[0]) for slot in sorted(series)]


def test_frames_of_a_run_with_a_kill(cluster, until):
    """Every committed step comes once and in order, at most four frames a second, no gap; the loss
    of a rank is there as an incident and in the lanes; the run's story has each slot's curves."""
    engines = cluster(3)
    engines.run(training.CELL)
    client = Client(engines)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: len(steps_of(client)) > 40, 60, "forty steps are seen")
    before = engines.generation
    engines.kill(1)
    engines.wait_healthy(60, after=before + 1)
    until(lambda: [i.kind for i in run.incidents] == ["lost", "joined"], 60, "both are told")
    mark = len(steps_of(client)) + 100
    until(lambda: len(steps_of(client)) > mark, 60, "a hundred more are seen")
    until(lambda: all(num > 1 for num in weighings(run)), 60, lambda: weighings(run))
    run.stop()
    num = run.num_committed
    until(lambda: len(steps_of(client)) == num, 60, lambda: steps_of(client))
    until(lambda: client.table("steps")["step"].max() == num - 1, 60, "the last attempts are seen")
    assert steps_of(client).tolist() == list(range(num))
    times = [at for at, _ in client.frames]
    assert len(times) < (times[-1] - times[0]) / PERIOD_S + 3
    assert client.feed.num_gaps == 0
    incidents = {n.number: n.incident for h in client.headers for n in h.incidents}
    assert [i.kind for i in incidents.values()] == ["lost", "joined"]
    assert incidents[1].slots == (1,)
    lanes = client.table("seats")
    assert {*lanes["state"][lanes["slot"] == 1].tolist()} >= {1.0, 4.0}
    assert max(len(frame.data) for _, frame in client.frames) < 65_536
    series = run.story().series
    assert sorted(series) == [0, 1, 2]
    assert all(len(series[slot]["compute_s"][0]) > 100 for slot in series)
    engines.feeds.close(client.feed)
    assert client.ends == ["it was closed"]


def _refuses(*_):
    raise nbdist.WrongState("the cluster is shut down")


def test_a_run_that_is_over_can_be_seen(cluster, until, tmp_path):
    """Who subscribes to it is sent one snapshot with all steps, and no more; after the cluster's
    end the run still has its curves and its gradient sync, for a dashboard, a report, a figure."""
    engines = cluster(2)
    engines.run(training.CELL)
    run = engines.train("trainer", steps=40).wait(60)
    time.sleep(1)  # the next run begins when the last telemetry has come
    engines.train("trainer", steps=10).wait(60)
    client = Client(engines, run=run.id)
    until(lambda: client.ends, 60, "the end is told")
    assert client.ends == ["the run is over"]
    (header,) = client.headers
    assert not header.is_live
    assert header.run.state == "finished"
    assert steps_of(client).tolist() == list(range(40))
    with pytest.raises(nbdist.WrongState, match="not known here"):
        Client(engines, run="another")
    engines.shutdown()
    story = run.story()
    assert len(story.series[0]["compute_s"][0]) == 40
    assert np.unique(story.tables["buckets"]["step"]).tolist() == list(range(40))
    told, tables = unpack(RunFeed(engines.feeds, _refuses, lambda: run, run).snapshot())
    assert told.run.state == "finished"
    assert {seat.rank for seat in told.world.seats} == {0, 1}
    assert len(tables["buckets"]["step"]) == len(story.tables["buckets"]["step"])
    report = run.report(tmp_path / "run.html")
    assert "Gradient sync" in run.figure("sync").text
    assert 1e6 < report.stat().st_size < 3e6


def test_who_acknowledges_nothing_is_sent_no_more(cluster, until):
    """Two frames, then silence; an acknowledgement lets the next one come, with all that is new."""
    engines = cluster(2)
    engines.run(training.CELL)
    client = Client(engines, acknowledges=False)
    run = engines.train("trainer", steps=100_000)
    until(lambda: len(client.frames) == WINDOW, 60, "two frames come")
    first = len(run.history["step"])
    until(
        lambda: run.history["seconds"][first:].sum() > 8 * PERIOD_S,
        20,
        "there is much to send meanwhile",
    )
    assert len(client.frames) == WINDOW
    client.feed.acknowledge(client.frames[-1][1].seq)
    until(lambda: len(client.frames) > WINDOW, 60, "another frame comes")
    steps, is_thinned = steps_of(client), "rows" in client.headers[-1].thinned
    assert is_thinned or steps.tolist() == list(range(len(steps)))
    assert client.headers[-1].run.step == steps[-1] + 1
    assert client.headers[-1].counters.delayed == 1
    run.stop()


def test_another_supervisor_sends_a_snapshot(cluster, until):
    """A supervisor that takes over knows of the subscription, and sends the whole run anew."""
    engines = cluster(2)
    engines.run(training.CELL)
    client = Client(engines)
    run = engines.train("trainer", steps=100_000)
    until(lambda: len(steps_of(client)) > 20, 60, "twenty steps are seen")
    num = len(client.frames)
    os.kill(engines._link._supervisor.pid, signal.SIGKILL)
    until(lambda: any(f.is_snapshot for _, f in client.frames[num:]), 60, "a snapshot comes")
    run.stop()
    last = len(run.history["step"]) - 1
    until(lambda: last in steps_of(client)[-1:], 60, "the last step is seen")
    assert (np.diff(steps_of(client)) > 0).all()
    assert steps_of(client)[0] == 0


def test_a_slow_rank_is_named(cluster, until):
    """The rank that the others wait for is the one that was made slow; the status says so; its
    successor on the seat is as quick as the others."""
    engines = cluster(3)
    engines.run(training.SLEEPING)
    client = Client(engines, views=("throughput",))
    run = engines.train("trainer", steps=100_000)
    until(lambda: len(client.table("steps").get("step", ())) > 30, 60, "steps are seen")
    engines.slow(1, factor=SLOW)
    assert [seat.slow_factor for seat in engines.status()] == [1, SLOW, 1]
    began_at = time.monotonic()

    def waits():
        table = client.table("steps")
        late = table["ended_at"] > began_at + 0.5
        return {s: table["wait_s"][late & (table["slot"] == s)][-20:] for s in range(3)}

    until(lambda: all(len(w) >= 20 for w in waits().values()), NAMED_S, waits)
    medians = {slot: float(np.nanmedian(w)) for slot, w in waits().items()}
    assert min(medians[0], medians[2]) > max(0.02 * (SLOW - 1) / 2, 2 * medians[1])
    before = engines.generation
    engines.kill(1)
    engines.wait_healthy(60, after=before + 1)
    assert [seat.slow_factor for seat in engines.status()] == [1, 1, 1]
    run.stop()


def test_a_rest_ends_when_the_rank_is_quick_again(cluster, until):
    """However long it was to be; that it would have been taken for a hang was warned of."""
    engines = cluster(2, hang_timeout_s=60.0)
    engines.run(training.CELL)
    run = engines.train("trainer", steps=100_000)
    until(lambda: run.num_committed > 20, 60, "steps are committed")
    engines.slow(1, factor=1e9)
    assert any("hang_timeout_s=60" in text for text in engines.warnings)
    engines.slow(1, factor=1)
    assert not any("hang_timeout_s" in text for text in engines.warnings)
    mark = run.num_committed + 10
    until(lambda: run.num_committed > mark, 60, "it goes on")
    assert run.incidents == []
    run.stop()


def test_views_cost_the_run_little(cluster):
    """Training does not wait for a view: steps with all views on take about as long as without."""
    engines = cluster(2)
    engines.run(training.CELL)
    medians = {True: [], False: []}
    for number in range(6):
        is_seen = bool(number % 2)
        client = Client(engines) if is_seen else None
        run = engines.train("trainer", steps=120).wait(120)
        medians[is_seen].append(statistics.median(run.history["seconds"][20:]))
        if client is not None:
            engines.feeds.close(client.feed)
    assert statistics.median(medians[True]) < COST * statistics.median(medians[False]), medians
