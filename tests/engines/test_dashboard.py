"""A dashboard of real engines, with a made-up page: frames, orders, the picture at the end."""

from __future__ import annotations

import base64
import contextlib
import os
import signal

import training

from nbdist.protocol.frames import unpack


class Page:
    """What a page is sent, and says."""

    def __init__(self, dashboard, monkeypatch):
        self.sent = []
        self.dashboard = dashboard
        monkeypatch.setattr(dashboard.widget, "send", self._take)
        self.say(type="hello", has_code=True)

    def _take(self, message, buffers=None):
        self.sent.append((message, buffers))

    def say(self, **message):
        self.dashboard.hear({"view": "page"} | message)

    @property
    def headers(self):
        return [unpack(b[0])[0] for message, b in list(self.sent) if message["type"] == "frame"]

    def shows(self, run, holds):
        """The newest frame's header, once it is about `run` and the condition holds (else None)."""
        header = (self.headers or [None])[-1]
        is_its = header is not None and header.run is not None and header.run.run == run.id
        return header if is_its and holds(header) else None

    @property
    def pictures(self):
        return [m["picture"] for m, _ in list(self.sent) if m["type"] == "freeze"]

    def answers(self, number):
        return [m["state"] for m, _ in list(self.sent) if m.get("id") == number]


def test_a_kill_from_the_page_and_the_picture_at_the_end(cluster, until, monkeypatch):
    """The button's engine dies and is replaced, an old one's button does nothing; the run's last
    steps are seen, and then a picture takes the dashboard's place."""
    engines = cluster(2)
    engines.run(training.CELL)
    run = engines.train("trainer", steps=100_000)
    page = Page(run.dashboard("overview", "loss", "ranks"), monkeypatch)
    seen = until(lambda: page.shows(run, lambda h: h.run.step > 20), 60, "steps are seen")
    seat = seen.world.seats[1]
    order = {"type": "order", "action": "kill", "slot": seat.slot, "pid": seat.pid, "factor": 5}
    page.say(id=1, **order)
    until(lambda: "done" in page.answers(1), 60, "the kill is done")
    healed = lambda h: h.world.healthy and h.world.generation > 1  # noqa: E731
    until(lambda: page.shows(run, healed), 60, "a new engine has its place")
    page.say(id=2, **order)
    until(lambda: "failed" in page.answers(2), 60, "nobody else is killed")
    page.say(type="order", id=3, action="pause")
    until(lambda: "done" in page.answers(3), 60, "the run stands")
    assert run.state == "paused"
    page.say(type="order", id=4, action="resume")
    page.say(type="order", id=5, action="stop_run")
    run.wait(60)
    last = run.num_committed
    until(lambda: page.shows(run, lambda h: h.run.step == last), 60, "the last step is seen")
    until(lambda: page.pictures, 60, "a picture comes")
    assert len(page.pictures) == 1
    assert base64.b64decode(page.pictures[0]).startswith(b"\x89PNG")
    incidents = {n.number: n.incident.kind for h in page.headers for n in h.incidents}
    assert sorted(incidents.values()) == ["joined", "lost"]


def test_who_follows_the_newest_run_thaws_with_it_and_is_told_who_is_silent(
    cluster, until, monkeypatch
):
    """A picture after the first run, frames of the second, which counts its own steps; a rank that
    is stopped is named long before it is found hung."""
    engines = cluster(2)
    engines.run(training.CELL)
    page = Page(engines.dashboards.open("overview", "loss"), monkeypatch)
    engines.train("trainer", steps=30).wait(60)
    until(lambda: page.pictures, 60, "a picture comes")
    run = engines.train("trainer", steps=100_000)
    until(lambda: any(m["type"] == "thaw" for m, _ in list(page.sent)), 60, "it is live again")
    page.say(type="hello", has_code=True)
    seen = until(lambda: page.shows(run, lambda h: h.run.step > 40), 60, "steps are seen")
    assert seen.run.first == 30
    pid = seen.world.seats[1].pid
    engines.kill(1, signal="STOP")
    try:
        until(lambda: page.shows(run, lambda h: h.world.seats[1].silent_s), 60, "it is silent")
    finally:
        with contextlib.suppress(ProcessLookupError):  # found hung, where all takes very long
            os.kill(pid, signal.SIGCONT)
    heard = lambda h: not h.world.seats[1].silent_s  # noqa: E731
    until(lambda: page.shows(run, heard), 60, "it is heard again")
    run.stop()
