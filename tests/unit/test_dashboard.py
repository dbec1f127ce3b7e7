"""The dashboard's Python half: what a page is told, what it may ask for, what a notebook keeps."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bokeh.util.paths import bokehjs_path
from msgspec import structs
from PIL import Image
from stories import synthetic_story
from synthetic import SyntheticRun

from nbdist.errors import WrongState
from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.protocol.story import ROWS, Evaluation, RunStory
from nbdist.views import bundle as bd
from nbdist.views import dashboard as db
from nbdist.views import host as hs
from nbdist.views import pages as pg
from nbdist.views import palette
from nbdist.views import stills as st
from nbdist.views.picture import picture
from nbdist.views.playback import story_frame
from nbdist.views.sheet import WIDTH, Axes, Sheet

LIMIT_S = 10.0


class HandFeed:
    """A feed that a test moves by hand."""

    def __init__(self, snapshot=None):
        self.subscribed, self.acks, self.num_resyncs, self.num_closed = [], [], 0, 0
        self._snapshot = snapshot
        self.error = None
        self.is_over = False

    def subscribe(self, views, take, ended):
        if self.error:
            raise self.error
        self.subscribed.append(views)
        self.take, self.ended = take, ended
        return self

    def snapshot(self):
        return self._snapshot

    def ack(self, seq):
        self.acks.append(seq)

    def resync(self):
        self.num_resyncs += 1

    def close(self):
        self.num_closed += 1


@pytest.fixture(scope="module", autouse=True)
def _code():
    """It is made once in a process."""
    bd.bundle()


@pytest.fixture
def shows(monkeypatch):
    """What would be displayed."""
    shown = []
    monkeypatch.setattr(db, "_show", lambda data, **options: shown.append((data, options)))
    return shown


@pytest.fixture
def made(monkeypatch):
    """A dashboard, its feed, and what its pages were sent; its pictures are made at once."""

    def make(*, viewer=True, **options):
        monkeypatch.setattr(db, "has_viewer", lambda: viewer)
        monkeypatch.setattr(db, "picture", lambda frame, _: b"a picture of " + frame)
        feed = HandFeed(options.pop("snapshot", None))
        dashboard = db.Dashboard(feed, **options)
        sent = []
        if viewer:
            monkeypatch.setattr(
                dashboard.widget, "send", lambda m, buffers=None: sent.append((m, buffers))
            )
        monkeypatch.setattr(dashboard._errands, "do", lambda act: act())
        dashboards.append(dashboard)
        return dashboard, feed, sent

    dashboards = []
    yield make
    for dashboard in dashboards:
        dashboard.close()


def until(holds):
    """Wait until it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kinds(sent):
    return [message["type"] for message, _ in sent]


# ---- code


def test_bokehjs_is_the_installed_packages_own_file():
    """A page is sent the very bytes of the installed package."""
    bokeh, views, figures = map(gzip.decompress, bd.bundle().buffers)
    assert bokeh == (bokehjs_path() / "js" / "bokeh.min.js").read_bytes()
    assert views.endswith(b"export const { pictured, show } = _dashboard;\n")
    assert {"loss", "sync", "membership"} <= set(json.loads(figures))


def test_modules_import_only_what_comes_before_them():
    """The one module that a page gets defines everything before it is used."""
    for number, name in enumerate((*bd.MODULES, *bd.REPORT_MODULES)):
        text = bd._text(f"{name}.js")
        imported = set(re.findall(r'from "\./(\w+)\.js"', text))
        assert imported <= set((*bd.MODULES, *bd.REPORT_MODULES)[:number]), name
    assert not re.search(
        r"^(import|export (?!const \{ pictured, show))", bd.views_module(), re.MULTILINE
    )


def test_views_fill_sources_that_figures_have():
    """Every source that a module fills, with every column, is in a figure."""
    known = {}
    for figure in bd.live_figures().values():
        for source in figure.select({"type": bd.bokeh.models.ColumnDataSource}):
            known[source.name] = set(source.data)
    used = set()
    for name in bd.MODULES:
        used |= set(re.findall(r'\.set\("(\w+)", ', bd._text(f"{name}.js"))) - {
            "step", "loss", "pace", "ranks", "overlap", "slowest", "memory",
        }  # fmt: skip
    assert used | {"loss"} == set(known)


# ---- size


def test_a_saved_dashboard_is_small(made):
    """What a notebook stores of a widget holds no data and no BokehJS."""
    dashboard, _, _ = made()
    assert len(bd.widget_module()) <= 30_000
    assert len(json.dumps(dashboard.widget.get_state())) < 40_000


# ---- pages


def test_a_page_is_sent_code_once_and_frames(made):
    """The first question of a page is answered with code; a page that has it gets frames only."""
    dashboard, feed, sent = made(views=("loss", "sync"))
    dashboard.hear({"type": "hello", "view": "a", "has_code": False})
    assert kinds(sent) == ["code"]
    assert feed.subscribed == [("loss", "sync")]
    dashboard.hear({"type": "hello", "view": "b", "has_code": True})
    assert kinds(sent) == ["code"]
    assert feed.num_resyncs == 1
    feed.take(7, b"unopened")
    assert sent[-1] == ({"type": "frame"}, [b"unopened"])


def test_showing_pushes_code_and_frames_unasked(made, shows):
    """A page need not ask: its question would wait for the cell that shows the view."""
    dashboard, feed, sent = made()
    dashboard._ipython_display_()
    assert kinds(sent) == ["code"]
    assert feed.subscribed == [db.VIEWS]
    ((data, options),) = shows
    assert data["text/plain"] == repr(dashboard) == db.TEXT
    assert data[db.WIDGET_VIEW]["model_id"] == dashboard.widget.own_model_id
    assert options["display_id"]


def test_a_page_that_asks_early_is_answered_once(made, shows):
    """One that is loaded again is; one that is being pushed to, or was heard since, is not."""
    dashboard, feed, sent = made()
    early = {"type": "hello", "view": "a", "is_early": True, "has_code": False}
    dashboard._ipython_display_()
    dashboard.hear(early)
    assert (kinds(sent), feed.num_resyncs) == (["code"], 0)
    dashboard.hear({"type": "ack", "view": "a", "seq": 1}, is_direct=True)
    dashboard.hear(early)  # it had to wait for a cell
    assert (kinds(sent), feed.num_resyncs) == (["code"], 0)
    dashboard.hear({"type": "bye", "view": "a"})
    dashboard.hear(early | {"view": "b", "has_code": True})
    assert (kinds(sent), len(feed.subscribed)) == (["code"], 2)
    assert len(shows) == 1


def test_frames_end_with_the_last_page(made):
    """When the last page says goodbye, nothing more is sent."""
    dashboard, feed, _ = made()
    for view in "ab":
        dashboard.hear({"type": "hello", "view": view, "has_code": True})
    dashboard.hear({"type": "bye", "view": "a"})
    assert feed.num_closed == 0
    dashboard.hear({"type": "bye", "view": "b"})
    assert feed.num_closed == 1
    dashboard.hear({"type": "hello", "view": "c", "has_code": True})
    assert len(feed.subscribed) == 2


def test_a_silent_page_is_forgotten(made, monkeypatch):
    """Frames for a page that has crashed end after a while."""
    dashboard, feed, sent = made()
    now = [100.0]
    monkeypatch.setattr(pg.time, "monotonic", lambda: now[0])
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    now[0] += pg.SILENT_LIMIT_S + 1
    feed.take(1, b"frame")
    assert feed.num_closed == 1
    assert "frame" not in kinds(sent)


def test_acknowledged_by_pages_that_can_be_heard_else_at_once(made):
    """Only a page that is heard while a cell runs holds frames back."""
    dashboard, feed, _ = made()
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    feed.take(1, b"frame")
    assert feed.acks == [1]
    dashboard.hear({"type": "ack", "view": "b", "seq": 1}, is_direct=True)
    feed.take(2, b"frame")
    assert feed.acks == [1, 1]
    dashboard.hear({"type": "ack", "view": "b", "seq": 2}, is_direct=True)
    assert feed.acks == [1, 1, 2]


def test_a_refused_subscription_is_told_to_the_page(made):
    """Why there are no frames is said where they are missed."""
    dashboard, feed, sent = made()
    feed.error = WrongState("16 live views are open")
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    assert sent[-1][0] == {"type": "ended", "text": "16 live views are open"}


# ---- orders


def test_orders_are_taken_at_once_and_done_elsewhere(made):
    """A button's order is acknowledged at once, carried out in a thread, and its end is told."""
    seen, done = [], threading.Event()

    def kill(slot, pid):
        seen.append((slot, pid, threading.current_thread().name))

    dashboard, _, sent = made(actions={"kill": kill, "last": done.set})
    dashboard.hear({"type": "order", "view": "a", "id": "1", "action": "kill", "slot": 2, "pid": 9})
    dashboard.hear({"type": "order", "view": "a", "id": "2", "action": "last"})
    assert done.wait(LIMIT_S)
    assert seen == [(2, 9, "nbdist-dashboard-orders")]
    answers = [(m["id"], m["state"]) for m, _ in sent if m["type"] == "answer"]
    assert ("1", "taken") in answers
    assert ("1", "done") in answers


def test_an_order_that_fails_says_why(made):
    """The page is told what an order failed with, also one that does not exist."""
    done = threading.Event()

    def pause():
        raise WrongState("the run is over")

    dashboard, _, sent = made(actions={"pause": pause, "last": done.set})
    for number, action in enumerate(("pause", "fly", "last")):
        order = {"type": "order", "view": "a", "id": number, "action": action}
        dashboard.hear(order)
    assert done.wait(LIMIT_S)
    texts = {m["id"]: m["text"] for m, _ in sent if m.get("state") == "failed"}
    assert texts == {0: "the run is over", 1: "'fly'"}


def test_only_offered_orders_have_buttons(made):
    """The page is told which orders there are."""
    dashboard, _, _ = made(actions={"kill": print})
    assert dashboard.widget.settings["actions"] == ["kill"]
    assert dashboard.widget.settings["views"] == list(db.VIEWS)


# ---- what a notebook keeps


def test_at_the_end_a_picture_takes_its_place(made, shows):
    """Where the widget stood, there are text and picture; once, and for later pages too."""
    dashboard, feed, sent = made(snapshot=b"a run")
    dashboard._ipython_display_()
    dashboard.freeze()
    dashboard.freeze()
    (live, first), (frozen, last) = shows
    assert frozen["text/plain"] == live["text/plain"]
    assert db.WIDGET_VIEW not in frozen
    assert base64.b64decode(frozen["image/png"]) == b"a picture of a run"
    assert last["update"]
    assert last["display_id"] == first["display_id"]
    assert last["metadata"]["image/png"] == {"width": WIDTH}
    assert kinds(sent) == ["code", "freeze"]
    dashboard.hear({"type": "hello", "view": "later", "has_code": True})
    assert kinds(sent)[-1] == "freeze"
    assert feed.num_resyncs == 0


def test_the_readme_says_what_each_view_answers():
    """Who looks for a view finds its name and its question."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in db.VIEWS if f"| `{name}` | " not in text] == []


def test_a_thaw_puts_the_live_view_back(made, shows):
    """By the name of the display, and to pages that were loaded again by the widget's own mark."""
    dashboard, _, sent = made(snapshot=b"frame")
    dashboard._ipython_display_()
    dashboard.freeze()
    own = dashboard.widget.own_model_id
    assert shows[-1][1]["metadata"]["nbdist"] == {"widget": own}
    dashboard.thaw()
    data, options = shows[-1]
    assert data[db.WIDGET_VIEW]["model_id"] == own
    assert "image/png" not in data
    assert options["update"]
    assert options["display_id"] == shows[0][1]["display_id"]
    assert sent[-1][0] == {"type": "thaw", "view": dashboard.widget.view}
    dashboard.thaw()
    assert shows[-1][0] is data


@pytest.mark.parametrize("freezes", [True, False])
def test_the_end_of_frames_freezes_a_run_that_went_on(made, shows, freezes):
    """A dashboard of a run that was over when it was opened stays, to be looked at."""
    dashboard, feed, sent = made(snapshot=b"a run", freezes=freezes)
    dashboard._ipython_display_()
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    sent.clear()
    feed.is_over = True
    feed.ended("the run is over")
    assert sent[0][0] == {"type": "ended", "text": "the run is over"}
    assert (len(shows) == 2) is freezes


def test_a_run_that_is_over_is_shown_with_its_picture(made, shows):
    """Live view and picture stand together: whoever has no widget any more shows the picture."""
    dashboard, feed, sent = made(snapshot=b"a run", freezes=False)
    feed.is_over = True
    dashboard._ipython_display_()
    ((data, options),) = shows
    assert data[db.WIDGET_VIEW]["model_id"] == dashboard.widget.own_model_id
    assert data["text/plain"] == db.TEXT
    assert base64.b64decode(data["image/png"]) == b"a picture of a run"
    assert options["metadata"] == {"image/png": {"width": WIDTH}}
    assert kinds(sent) == ["code"]
    dashboard.freeze()
    (_, (frozen, _)) = shows
    assert set(frozen) == {"text/plain", "image/png"}


def test_a_page_that_comes_back_is_given_frames_again(made, shows):
    """A subscription that ended for want of answers is no end of the run."""
    dashboard, feed, _ = made(snapshot=b"a run")
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    feed.ended("nothing was acknowledged for 60 s")
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    assert len(feed.subscribed) == 2
    assert shows == []


def test_where_nobody_looks_nothing_is_drawn(made, shows):
    """A dashboard without a page costs no picture; a page that comes later gets it then."""
    dashboard, feed, sent = made(snapshot=b"a run")
    dashboard.freeze()
    assert shows == sent == []
    feed.is_over = True
    dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    assert kinds(sent) == ["freeze"]


def test_a_subscription_that_ends_at_once_is_not_kept(made):
    """The last frame may come before the answer to the question for it."""
    dashboard, feed, _ = made(freezes=False)
    begin = feed.subscribe

    def end_at_once(views, take, ended):
        begun = begin(views, take, ended)
        ended("the run is over")
        return begun

    feed.subscribe = end_at_once
    for _ in range(2):
        dashboard.hear({"type": "hello", "view": "a", "has_code": True})
    assert len(feed.subscribed) == 2
    assert feed.num_resyncs == 0


def test_unseen_notebooks_get_a_picture_and_no_frames(made, shows):
    """A command that runs notebooks is sent no telemetry; what it stores is complete."""
    dashboard, feed, sent = made(viewer=False, snapshot=b"a run")
    dashboard._ipython_display_()
    assert sent == feed.subscribed == []
    ((data, _),) = shows
    assert set(data) == {"text/plain", "image/png"}
    assert dashboard._widget is None


def test_without_anything_to_show_the_text_stands(made, shows):
    """Before the first run there is no picture."""
    dashboard, _, _ = made(viewer=False)
    dashboard._ipython_display_()
    dashboard.freeze()
    assert [data for data, _ in shows] == [{"text/plain": db.TEXT}]


def test_a_viewer_is_a_front_end_that_can_be_asked(monkeypatch):
    """Commands that run notebooks cannot be asked for input."""
    for allowed in (True, False):
        request = {"content": {"allow_stdin": allowed}}
        kernel = SimpleNamespace(get_parent=lambda request=request: request)
        monkeypatch.setattr(hs, "get_ipython", lambda kernel=kernel: SimpleNamespace(kernel=kernel))
        assert db.has_viewer() is allowed
    monkeypatch.setattr(hs, "get_ipython", lambda: None)
    assert not db.has_viewer()


# ---- where no page answers


@pytest.fixture
def quick(monkeypatch):
    """Pictures come at once, and follow one another fast."""
    monkeypatch.setattr(st, "FIRST_WORD_LIMIT_S", 0.0)
    monkeypatch.setattr(st, "PERIOD_S", 0.001)
    monkeypatch.setattr(st, "LATE_PERIOD_S", 0.001)


@pytest.mark.usefixtures("quick")
def test_where_no_page_answers_pictures_say_why(made, shows, monkeypatch):
    """A live view that nobody draws becomes a picture with the reason, until the run is over."""
    monkeypatch.setattr(db, "when_idle", lambda act: act())
    dashboard, feed, _ = made(snapshot=b"0")
    dashboard._ipython_display_()
    until(lambda: len(shows) > 1)
    feed._snapshot = b"1"
    until(lambda: len(shows) > 2)
    time.sleep(0.02)
    assert len(shows) == 3  # the same picture is not sent again
    assert feed.num_closed == 1
    feed.is_over = True
    until(lambda: not [t for t in threading.enumerate() if t.name == "nbdist-stills"])
    dashboard.freeze()
    live, first, second, last = shows
    assert db.WIDGET_VIEW in live[0]
    for data, options in (first, second):
        assert st.REASON in data["text/html"]
        assert st.REASON in data["text/plain"]
        assert options["display_id"] == live[1]["display_id"]
    assert set(last[0]) == {"text/plain", "image/png"}


@pytest.mark.usefixtures("quick")
def test_a_page_that_speaks_gets_no_pictures(made, shows, monkeypatch):
    """Whoever answers, however late the kernel hears it, keeps the live view."""
    asked = []
    monkeypatch.setattr(db, "when_idle", asked.append)
    dashboard, _, _ = made(snapshot=b"a run")
    dashboard._ipython_display_()
    until(lambda: asked)  # a cell runs: nobody can be heard
    dashboard.hear({"type": "ack", "view": "a", "seq": 1})
    asked[0]()
    time.sleep(0.02)
    assert len(shows) == 1


@pytest.mark.usefixtures("quick")
def test_pictures_are_bounded(monkeypatch):
    """However long a run goes on unseen, a notebook gets no more than so many pictures."""
    monkeypatch.setattr(st, "MAX_PICTURES", 7)
    shown = []
    stills = st.Stills(lambda: not shown.append(1), lambda act: act())
    stills.watch()
    stills.watch()
    until(lambda: len(shown) == 7)
    time.sleep(0.02)
    assert len(shown) == 7


# ---- pictures and stories


def test_a_picture_of_a_run_is_small_and_sharp():
    """Two pixels for one, and well under what a notebook may hold."""
    data = picture(SyntheticRun(length_s=40.0).frame(39.0))
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    assert image.width == 2 * WIDTH
    assert len(data) < 80_000


def test_a_picture_is_read_on_any_ground():
    """It has none of its own; its text stands out from white and from black."""
    data = picture(SyntheticRun(num_slots=8, length_s=40.0).frame(39.0))
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"), dtype=float)
    assert (pixels[..., 3] < 10).mean() > 0.3
    solid = pixels[pixels[..., 3] > 250][:, :3]
    assert len(solid)
    assert solid.sum(axis=1).min() > 90
    assert solid.min(axis=1).max() < 200
    for colour in (palette.INK, *map(palette.slot_ink, range(7))):
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.15 < 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 + 0.02 < 0.5


def test_a_line_is_parted_where_a_slot_was_away(monkeypatch):
    """Also where only some steps are sent: what is missing then was not missed."""
    header, tables = fr.unpack(SyntheticRun(length_s=40.0).frame(39.0))
    steps = tables["steps"]
    some = (steps["step"] % 7 == 3) & ~np.isin(steps["generation"], [2])
    tables["steps"] = {column: values[some] for column, values in steps.items()}
    colours = []
    monkeypatch.setattr(Axes, "curve", lambda *args: colours.append(args[-1]))
    picture(fr.pack(structs.replace(header, thinned=("steps",)), tables))
    compute = colours[1:]  # after the loss
    assert compute == [palette.slot_colour(slot) for slot in (0, 1, 2, 2, 3)]


def steps_table(at):
    table = {column: np.full(len(at), np.nan) for column in tb.TABLES["steps"]}
    return table | {"ended_at": at, "compute_s": np.full(len(at), 0.5), "slot": np.zeros(len(at))}


def story(num_steps):
    rows = np.zeros(num_steps, ROWS)
    rows["step"] = np.arange(num_steps)
    rows["at"] = 100.0 + np.arange(num_steps)
    rows["seconds"], rows["samples"], rows["world_size"] = 1.0, 8, 2
    rows["generation"] = 1 + (np.arange(num_steps) >= 3)
    return RunStory(
        title="A run",
        rows=rows,
        evaluations=[Evaluation(step=1, at=101.0, metrics={"loss": 0.5, "odd": float("nan")})],
        tables={"steps": steps_table(rows["at"])} if num_steps else {},
    )


def test_a_picture_says_how_many_incidents_it_does_not_list(monkeypatch):
    """Only the last ones have room."""
    header, tables = fr.unpack(SyntheticRun(length_s=40.0).frame(39.0))
    first = header.incidents[0].incident
    many = tuple(fr.Numbered(number=number, incident=first) for number in range(1, 10))
    texts = []
    monkeypatch.setattr(Sheet, "text", lambda *args, **_: texts.append(args[3]))
    picture(fr.pack(structs.replace(header, incidents=many), tables))
    assert "the last 5 of 9 incidents:" in texts
    assert any("9 incidents, longest stall" in text for text in texts)


def test_a_picture_lists_the_incident_that_cost_most(monkeypatch):
    """Though it is not among the last ones; the headline speaks of it."""
    header, tables = fr.unpack(SyntheticRun(length_s=40.0).frame(39.0))
    cheap = structs.replace(header.incidents[0].incident, stall_s=0.1)
    dear = structs.replace(cheap, stall_s=77.0)
    many = tuple(
        fr.Numbered(number=number, incident=dear if number == 2 else cheap)
        for number in range(1, 10)
    )
    texts = []
    monkeypatch.setattr(Sheet, "text", lambda *args, **_: texts.append(args[3]))
    picture(fr.pack(structs.replace(header, incidents=many), tables))
    (place,) = [i for i, text in enumerate(texts) if text.startswith("the last 4 of 9 incidents")]
    assert texts[place].endswith("and before them the one of the longest stall:")
    listed = texts[place + 1 : place + 6]
    assert [text.split()[0] for text in listed] == ["2", "6", "7", "8", "9"]
    assert "stall 77,000 ms" in listed[0]


@pytest.mark.parametrize(
    ("views", "num_panels", "title"),
    [
        ((), 4, "When is each bucket summed? Step"),
        (("loss",), 1, "Is it learning"),
        (("ranks", "memory", "membership", "throughput"), 2, "Who was in the job"),
        (("memory",), 4, "Is it learning"),
        (("pipeline",), 1, "Where is the bubble?"),
        (db.VIEWS, 4, "When is each bucket summed? Step"),
    ],
)
def test_a_picture_shows_the_views_that_were_chosen(monkeypatch, views, num_panels, title):
    """As far as there are pictures of them; where there are none, it shows all."""
    frame, texts, boxes = SyntheticRun(length_s=40.0).frame(39.0), [], []
    monkeypatch.setattr(Sheet, "text", lambda *args, **_: texts.append(args[3]))
    monkeypatch.setattr(Sheet, "frame", lambda _, box: boxes.append(box))
    picture(frame, views)
    assert len(boxes) == num_panels
    assert all(0 < left < right < WIDTH for left, _, right, _ in boxes)
    assert any(text.startswith(title) for text in texts)


def test_a_picture_of_a_dashboard_shows_its_views(made, monkeypatch):
    """Those that it was opened with."""
    dashboard, _, _ = made(snapshot=b"a run", views=("loss", "membership"))
    asked = []
    monkeypatch.setattr(db, "picture", lambda _, views: asked.append(views) or b"")
    assert dashboard._picture()
    assert asked == [("loss", "membership")]


def test_a_picture_of_one_step_has_a_dot(monkeypatch):
    """A line of one point would be nothing."""
    bars = []
    monkeypatch.setattr(Sheet, "bar", lambda _, box, colour: bars.append((box, colour)))
    picture(story_frame(story(1)), ["loss"])
    (((left, top, right, bottom), colour),) = bars
    assert (right - left, bottom - top, colour) == (5, 5, palette.SLOT_COLOURS[0])


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_story_becomes_one_frame(num_steps):
    """What a story has is in the frame."""
    frame = story_frame(story(num_steps), name="trainer", state="finished", target=9)
    header, tables = fr.unpack(frame)
    assert (header.kind, header.is_live) == ("snapshot", False)
    assert header.evaluations[0].metrics == {"loss": 0.5, "odd": None}
    assert (header.run.state, header.run.step, header.run.target) == ("finished", num_steps, 9)
    assert tables.get("rows", {}).get("step", np.empty(0)).tolist() == list(range(num_steps))
    if num_steps == 6:
        assert tables["phases"]["generation"].tolist() == [1, 2]
        assert tables["steps"]["compute_s"].tolist() == [0.5] * 6


def test_a_long_story_becomes_a_frame_of_bounded_size():
    """Extremes stay, and the frame names the tables that were thinned out."""
    long = story(100_000)
    long.rows["loss"][54_321] = 99.0
    header, tables = fr.unpack(story_frame(long))
    assert set(header.thinned) == {"rows", "steps"}
    assert tables["rows"]["loss"].max() == 99.0
    assert len(tables["rows"]["step"]) <= 4_100
    assert len(tables["steps"]["step"]) <= 24_100


def test_a_storys_frame_tells_who_was_there_at_the_end():
    """The members of the last group, with the memory that they held."""
    whole = synthetic_story(SyntheticRun(length_s=20.5))  # slot 2 was lost, and is not back yet
    memory = {"at": [1.0, 2.0], "slot": [0, 0], "kind": [45, 45], "bytes": [5e8, 6e8]}
    whole.tables["memory"] = {name: np.array(values) for name, values in memory.items()}
    header, tables = fr.unpack(story_frame(whole))
    ranks = {seat.slot: seat.rank for seat in header.world.seats}
    assert (ranks[0], ranks[2]) == (0, None)
    assert header.world.seats[0].memory_bytes == 6e8
    assert {"buckets", "spans", "seats"} <= set(tables)


def test_a_picture_can_be_drawn_before_anything_happened():
    """A run without a step has a picture that says so."""
    assert picture(story_frame(story(0), name="trainer", state="stopped"))


def test_a_worker_survives_what_it_does(caplog):
    """An error is logged, and the next thing is done."""
    worker, done = pg.Worker("test"), threading.Event()
    worker.do(lambda: 1 / 0)
    worker.do(done.set)
    assert done.wait(LIMIT_S)
    assert "ZeroDivisionError" in caplog.text
