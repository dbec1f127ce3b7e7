"""What a page says of a run: of one that stands, that goes on from another, that is lost."""

from __future__ import annotations

import numpy as np
import pytest
from bare import LIMIT_MS, VIEW
from msgspec.structs import replace
from synthetic import SyntheticRun

from nbdist.protocol import frames as fr
from nbdist.protocol.story import ROWS, RunStory
from nbdist.protocol.tables import TABLES
from nbdist.views.playback import story_frame

pytestmark = pytest.mark.timeout(300)

NOW = 28.0
"""Nobody is slow, and the rank that was lost is back."""


@pytest.fixture(scope="module")
def run():
    """Four ranks."""
    return SyntheticRun(length_s=29.0)


def changed(frame, *, run=None, seats=None, **header):
    """A frame with another header; `seats`: slot -> what is other."""
    told, tables = fr.unpack(frame)
    if run:
        header["run"] = replace(told.run, **run)
    if seats:
        others = tuple(replace(seat, **seats.get(seat.slot, {})) for seat in told.world.seats)
        header["world"] = replace(told.world, seats=others)
    return fr.pack(replace(told, **header), tables)


def card(page, name):
    """A tile's value and what is said of it."""
    tile = page.page.locator(f".nbdist-card-{name}")
    return (
        tile.locator(".nbdist-value").inner_text(),
        tile.locator(".nbdist-detail").inner_text(),
    )


def chip(page):
    return page.page.locator(".nbdist-chip").inner_text()


def said(page, panel):
    return page.page.locator(f".nbdist-{panel} .nbdist-said").inner_text()


def drawn_in(page, panel, source, chart=0):
    """What a chart draws, by column."""
    return page.page.evaluate(
        f"([panel, source, chart]) => {VIEW}.shown.panels.find((p) => p.name === panel)"
        ".charts[chart].sources[source].data",
        [panel, source, chart],
    )


def lives_of(page):
    """The bars of who was in the job when."""
    return drawn_in(page, "membership", "lives")


def gaps_of_compute(page):
    """Slot -> how often its line is parted."""
    lines = drawn_in(page, "throughput", "compute", 1)
    gaps = [sum(y is None or not np.isfinite(y) for y in ys) for ys in lines["ys"]]
    return dict(zip(lines["slot"], gaps, strict=True))


def no_later(page):
    """However long the browser takes: what is shown does not grow old."""
    page.page.evaluate(f"() => {{ {VIEW}.seen = Infinity; {VIEW}.tick(); }}")


def test_a_rank_that_is_silent_is_named_before_it_is_found_hung(bare, run):
    """Since when no step came, who is silent, and that all others wait for it."""
    page = bare()
    last = fr.unpack(run.frame(NOW))[1]["rows"]["at"][-1]
    stands = changed(run.frame(NOW), clock_s=float(last) + 6.2, seats={1: {"silent_s": 6.0}})
    page.show(stands)
    assert chip(page) == ("running · the group is whole · no step for 6 s; rank 1 silent for 6 s")
    assert card(page, "slowest") == ("slot 1", "nothing was heard of it for 6 s")
    assert "no step for 6 s" in card(page, "pace")[1]
    row = page.page.locator(".nbdist-ranks tbody tr").nth(1)
    assert "member · silent for 6 s" in row.inner_text()
    assert said(page, "throughput").startswith("Slot 1 holds the others up: nothing was heard")
    lives = lives_of(page)
    place = lives["state"].index("silent, until it was ended")
    assert lives["right"][place] - lives["left"][place] == pytest.approx(6.0)
    page.give_frame(run.frame(NOW, seq=2))
    page.drawn()
    assert chip(page) == "running · the group is whole"


def test_a_rank_that_hung_stays_marked(bare, run):
    """The membership bar shows from when to when nothing was heard of it."""
    told, _ = fr.unpack(run.frame(NOW))
    hung = replace(told.incidents[0].incident, kind="hung", began_at=20.0, detect_s=9.0)
    numbered = (replace(told.incidents[0], incident=hung), *told.incidents[1:])
    page = bare()
    page.show(changed(run.frame(NOW), incidents=numbered))
    lives = lives_of(page)
    place = lives["state"].index("silent, until it was ended")
    assert lives["slot"][place] == hung.slots[0]
    assert lives["right"][place] - lives["left"][place] == pytest.approx(9.0)


def test_a_run_that_is_paused_says_so_everywhere(bare, run):
    """It is neither live nor stale nor slow; when it goes on, the pause was no stall."""
    page = bare()
    page.show(run.frame(NOW))
    before = card(page, "pace")[0]
    clock = fr.unpack(run.frame(NOW))[0].clock_s
    stands = run.frame(NOW, after=NOW, seq=2)
    page.give_frame(changed(stands, clock_s=clock + 60.0, run={"state": "paused"}))
    page.drawn()
    no_later(page)
    assert chip(page) == "paused · the group is whole"
    assert card(page, "pace") == ("paused", f"until then {before} samples/s, last 20 steps")
    assert said(page, "throughput").startswith("The run is paused after step ")
    assert set(page.page.locator(".nbdist-age").all_inner_texts()) == {"paused"}
    assert page.page.locator(".nbdist > [role=status]").inner_text() == "paused"
    page.give_frame(changed(run.frame(NOW, after=NOW, seq=3), clock_s=clock + 60.3))
    page.drawn()
    no_later(page)
    assert chip(page) == "running · the group is whole"
    assert card(page, "pace")[0] == before
    assert set(page.page.locator(".nbdist-age").all_inner_texts()) == {"live"}


def test_no_bucket_is_drawn_over_another(bare):
    """Where some wait for a slower slot they overlap in time: they stand below one another."""
    page = bare()
    page.show(SyntheticRun(length_s=45.0).frame(40.0))
    bars = drawn_in(page, "sync", "bars")
    edges = list(zip(*(bars[edge] for edge in ("left", "right", "top", "bottom")), strict=True))
    places = [i for i, what in enumerate(bars["what"]) if what.startswith("bucket")]
    assert len(places) == 16
    for i in places:
        left, right, top, bottom = edges[i]
        assert bottom - top > 0.04
        for other in edges[:i]:
            is_beside = other[1] <= left or right <= other[0]
            assert is_beside or other[3] <= top + 1e-9 or bottom <= other[2] + 1e-9


def test_short_phases_of_an_incident_are_seen_beside_long_ones(bare, run):
    """A hang of ten seconds does not hide that its restore took half a millisecond."""
    told, _ = fr.unpack(run.frame(NOW))
    hung = replace(told.incidents[0].incident, detect_s=10.0, restore_s=0.0005)
    numbered = (replace(told.incidents[0], incident=hung), *told.incidents[1:])
    page = bare()
    page.show(changed(run.frame(NOW), incidents=numbered))
    parts = drawn_in(page, "membership", "parts", 1)
    panel = f"{VIEW}.shown.panels.find((p) => p.name === 'membership')"
    widths = page.page.evaluate(
        f"""([left, right]) => {{
          const [view] = {panel}.charts[1].figureViews;
          const at = (x) => view.frame.x_scale.compute(x);
          return left.map((x, i) => at(right[i]) - at(x));
        }}""",
        [parts["left"], parts["right"]],
    )
    known = dict(zip(zip(parts["number"], parts["part"], strict=True), widths, strict=True))
    assert known["1", "restore"] > 20
    assert known["1", "detect"] > known["1", "regroup"] > known["1", "restore"]


def test_of_a_long_run_the_lines_have_no_gaps_but_where_a_slot_was_away(bare, run):
    """A page that is opened late is sent some steps only: what is missing was not missed."""
    told, tables = fr.unpack(run.frame(NOW))
    some = tables["steps"]["step"] % 7 == 3
    tables["steps"] = {column: values[some] for column, values in tables["steps"].items()}
    page = bare()
    page.show(fr.pack(replace(told, thinned=("steps",)), tables))
    assert gaps_of_compute(page) == {0: 0, 1: 0, 2: 1, 3: 0}
    page.give_frame(run.frame(NOW))
    page.drawn()
    assert gaps_of_compute(page) == {0: 0, 1: 0, 2: 1, 3: 0}


def test_what_was_done_is_said_for_a_while(bare, run):
    """And leaves; what failed stays until something else is said."""
    page = bare()
    page.show(run.frame(NOW))
    quicker = "own = setTimeout; window.setTimeout = (act, ms) => own(act, ms / 20)"
    page.page.evaluate(f"() => {{ const {quicker}; }}")
    kill = page.page.locator(".nbdist-actions button", has_text="Kill")
    words = "() => document.querySelector('.nbdist-answer').textContent"
    kill.first.click()
    (order,) = page.sent("order")
    page.give({"type": "answer", "id": order["id"], "state": "done", "text": ""})
    page.page.wait_for_function(f"{words} === ''", timeout=LIMIT_MS)
    kill.nth(1).click()
    _, order = page.sent("order")
    page.give({"type": "answer", "id": order["id"], "state": "failed", "text": "it is gone"})
    page.page.evaluate("() => new Promise((done) => setTimeout(done, 9000))")
    assert page.page.evaluate(words) == "Kill rank 1: it is gone"


@pytest.mark.parametrize("is_dark", [False, True])
def test_what_hovers_has_the_colours_of_the_page(bare, run, is_dark):
    """No white slab on a dark page: what is told where the pointer is hangs outside of the view."""
    page = bare(is_dark=is_dark)
    page.show(run.frame(NOW))
    box = page.page.locator(".nbdist-loss .nbdist-chart").bounding_box()
    for by in (0, 5):  # it is told when the pointer moves
        page.page.mouse.move(box["x"] + box["width"] / 2 + by, box["y"] + box["height"] / 2)
    tip = page.page.locator(".bk-Tooltip").first
    tip.wait_for(timeout=LIMIT_MS)
    ground, ink = tip.evaluate(
        "(tip) => [getComputedStyle(tip).backgroundColor, getComputedStyle(tip).color]"
    )
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ground, ink)]
    assert (bright[0] < bright[1]) == is_dark
    assert abs(bright[0] - bright[1]) > 400


def test_steps_are_those_of_the_run_that_is_shown(bare, run):
    """A run that goes on where another ended says so; one whose end is not known claims none."""
    page = bare()
    page.show(changed(run.frame(NOW), run={"first": 441, "step": 993, "target": 1041}))
    assert card(page, "step") == ("552", "of 600 steps, from step 441 on")
    page.give_frame(changed(run.frame(NOW, seq=2), run={"step": 3813, "target": 0}))
    page.drawn()
    assert card(page, "step") == ("3,813", "steps")


def test_of_a_long_run_the_steps_are_counted_and_not_the_rows(bare):
    """What is said of a run does not depend on how many of its rows fit into a frame."""
    num = 20_000
    rows = np.zeros(num, ROWS)
    rows["step"], rows["at"] = np.arange(num), np.arange(num) * 0.1
    rows["loss"], rows["seconds"] = np.random.default_rng(0).random((2, num))
    rows["samples"], rows["generation"], rows["world_size"] = 16, 1, 2
    page = bare(views=("overview", "loss"))
    page.show(story_frame(RunStory(title="long", rows=rows, state="stopped", target=100_000)))
    assert "in 20,000 steps;" in said(page, "loss")
    assert card(page, "step") == ("20,000", "of 100,000 steps")
    pace = float(rows["samples"].sum() / rows["seconds"].sum())
    assert card(page, "pace") == (f"{pace:,.0f}", "samples/s over the run, stalls included")


def test_a_page_that_watches_a_long_run_keeps_its_beginning(bare, run):
    """Rows are thinned out, as in a snapshot: the first, the last and the extremes stay."""
    told, _ = fr.unpack(run.frame(NOW))
    num, each = 20_000, 1000
    rows = np.zeros(num, ROWS)
    rows["step"], rows["at"] = np.arange(num), np.arange(num) * 0.1
    rows["loss"], rows["seconds"], rows["samples"] = 5 - 4 * np.arange(num) / num, 0.1, 16
    rows["generation"], rows["world_size"] = 1, 2
    rows["loss"][1234] = 9.5
    page = bare(views=("overview", "loss", "throughput"))
    for seq, first in enumerate(range(0, num, each), 1):
        header = replace(
            told,
            seq=seq,
            kind="delta" if first else "snapshot",
            run=replace(told.run, first=0, step=first + each, target=num),
        )
        new = rows[first : first + each]
        steps = {
            "step": np.repeat(new["step"], 2),
            "slot": np.tile([0, 1], each),
            "ended_at": np.repeat(new["at"], 2),
            "compute_s": np.tile([0.05, 0.06], each),
            "generation": np.ones(2 * each),
        }
        steps = {name: steps.get(name, np.zeros(2 * each)) for name in TABLES["steps"]}
        tables = {"rows": {name: new[name] for name in TABLES["rows"]}, "steps": steps}
        (page.give_frame if first else page.show)(fr.pack(header, tables))
    page.drawn()
    assert "in 20,000 steps;" in said(page, "loss")
    assert card(page, "loss") == ("1.00", "from 5.00")
    drawn = drawn_in(page, "loss", "loss")
    assert (drawn["step"][0], drawn["step"][-1], max(drawn["loss"])) == (0, num - 1, 9.5)
    assert drawn["step"][-each:] == list(range(num - each, num))
    assert len(drawn["step"]) <= 8000
    assert gaps_of_compute(page) == {0: 0, 1: 0}


def test_after_the_end_of_its_frames_nothing_can_be_pressed(bare, run):
    """A cluster that is shut down is no whole group; frames that come again make all as before."""
    page = bare()
    page.show(run.frame(NOW, has_run=False))
    page.give({"type": "ended", "text": "the cluster is shut down"})
    page.drawn()
    assert chip(page) == "the cluster is shut down"
    enabled = page.page.locator(".nbdist-ranks button:enabled")
    assert enabled.count() == 0
    page.page.evaluate(f"() => {VIEW}.shown.draw()")
    assert enabled.count() == 0
    status = page.page.locator(".nbdist > [role=status]").inner_text()
    assert status == "the cluster is shut down; these are the last values"
    page.give_frame(run.frame(NOW, seq=2))
    page.drawn()
    assert enabled.count() > 4


def test_where_frames_are_refused_nothing_can_be_pressed(bare):
    """As of one dashboard more than a cluster serves: it says why, and takes no orders."""
    page = bare()
    page.give_code()
    page.page.locator(".nbdist-ranks button").first.wait_for(timeout=LIMIT_MS)
    assert page.page.locator(".nbdist-ranks button:enabled").count() == 0
    page.give({"type": "ended", "text": "17 views are too many"})
    page.page.wait_for_function(f"() => {VIEW}.shown?.store.lost", timeout=LIMIT_MS)
    assert page.page.locator(".nbdist-ranks button:enabled").count() == 0
    status = page.page.locator(".nbdist > [role=status]").inner_text()
    assert status == "17 views are too many"


PROCESSES = """() => {
  const signal = () => {
    const slots = new Set();
    return { connect: (act) => slots.add(act), disconnect: (act) => slots.delete(act), slots };
  };
  const [statusChanged, kernelChanged, iopubMessage] = [signal(), signal(), signal()];
  const sessionContext = { statusChanged, kernelChanged, iopubMessage };
  window.model.widget_manager = { context: { sessionContext } };
  window.say = (msg_type, session, execution_state) => {
    const message = { header: { msg_type, session }, content: { execution_state } };
    for (const act of iopubMessage.slots) act(null, message);
  };
  window.closeView();
  window.view();
}"""
"""Another view, in an application that passes on what its kernel says."""


def test_a_kernel_that_somebody_else_restarts_is_lost(bare, run):
    """Known by what the new process says; what the server says of it is not taken for its own."""
    page = bare()
    page.page.evaluate(PROCESSES)
    page.show(run.frame(NOW))
    said = [("comm_msg", "a", ""), ("status", "server", "restarting"), ("stream", "server", "")]
    for words in (*said, ("status", "a", "idle")):
        page.page.evaluate("(words) => say(...words)", words)
    assert chip(page) == "running · the group is whole"
    page.page.evaluate("() => say('status', 'b', 'busy')")
    assert chip(page) == "the kernel was restarted"
    assert page.page.locator(".nbdist-ranks button:enabled").count() == 0
    status = page.page.locator(".nbdist > [role=status]").inner_text()
    assert status == "the kernel was restarted; these are the last values"


def told_rows(num_steps):
    """A run of which nothing but its committed steps is known."""
    rows = np.zeros(num_steps, ROWS)
    rows["step"], rows["at"] = np.arange(num_steps), np.arange(num_steps)
    rows["loss"], rows["seconds"], rows["samples"] = 2.5, 0.5, 8
    rows["generation"], rows["world_size"] = 1, 2
    return story_frame(RunStory(title="a run", rows=rows), name="trainer", state="stopped")


def test_a_run_of_one_step_is_drawn(bare):
    """A line of one point would be nothing."""
    page = bare()
    page.show(told_rows(1))
    assert drawn_in(page, "loss", "loss_dots") == {"x": [0], "y": [2.5]}
    assert drawn_in(page, "throughput", "rate_dots") == {"x": [0], "y": [16]}


def test_a_run_that_is_over_without_a_step_says_so(bare):
    """It is in the past tense: none will come."""
    page = bare()
    page.show(told_rows(0))
    for panel in ("loss", "throughput"):
        words = page.page.locator(f".nbdist-{panel}.nbdist-panel .nbdist-empty").inner_text()
        assert words == "No step was committed."
    assert card(page, "loss")[1] == "no step was committed"


def test_a_table_of_some_steps_says_of_how_many(bare):
    """Where it has a row for each, there is nothing to say."""
    page = bare()
    page.show(told_rows(40))
    table = page.page.locator(".nbdist-loss.nbdist-panel .nbdist-table")
    page.page.locator(".nbdist-loss.nbdist-panel").get_by_text("Table", exact=True).click()
    assert table.locator("caption").count() == 0
    page.give_frame(told_rows(200))
    page.drawn()
    page.page.evaluate(
        f"() => {{ {VIEW}.shown.panels.find((p) => p.name === 'loss').fillTwin(true); }}"
    )
    table.locator("caption").wait_for(timeout=LIMIT_MS)
    assert table.locator("caption").inner_text() == "51 of 200 steps"


def test_the_picture_of_a_lost_run_tells_when_it_was_lost(bare, run):
    """In the past tense: nobody knows what became of it."""
    page = bare()
    page.show(run.frame(NOW))
    words = page.page.evaluate(
        f"""() => {{
          const found = [];
          const own = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {{
            found.push(text);
            return own.call(this, text, ...rest);
          }};
          {VIEW}.shown.cut("the kernel was restarted");
          {VIEW}.shown.picture();
          CanvasRenderingContext2D.prototype.fillText = own;
          return found;
        }}"""
    )
    step = fr.unpack(run.frame(NOW))[0].run.step
    (first,) = [text for text in words if text.startswith("trainer: ")]
    assert first.startswith(f"trainer: the kernel was restarted after {step} of ")
    assert "These are the last values." in words
    assert not any("running" in text for text in words)


@pytest.mark.parametrize("width", [800, 1400])
def test_nothing_is_covered_or_cut_off(bare, run, width):
    """Buttons stand beside the columns, values within their tiles, and the incidents are whole."""
    page = bare(size=(width, 2400))
    many = {slot: {"memory_bytes": int(317.7 * 2**20)} for slot in range(4)}
    page.show(changed(run.frame(NOW), seats=many))
    out = page.page.evaluate(
        """() => {
          const out = [];
          for (const value of document.querySelectorAll(".nbdist-value"))
            if (value.scrollWidth > value.clientWidth) out.push(value.textContent);
          for (const scroller of document.querySelectorAll(".nbdist-scroller:not([hidden])"))
            if (scroller.scrollWidth > scroller.clientWidth)
              out.push(`${scroller.parentElement.className} ${scroller.scrollWidth}`);
          return out;
        }"""
    )
    assert out == []
    header = page.page.locator(".nbdist-incidents th").all_inner_texts()
    assert [name for name in header if name.endswith("ms")] == [
        "stall ms",
        "detect ms",
        "regroup ms",
        "restore ms",
    ]
