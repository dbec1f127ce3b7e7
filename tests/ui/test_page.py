"""The widget's page without server and kernel: what it does with what a kernel says."""

from __future__ import annotations

import time

import pytest
from bare import LIMIT_MS, VIEW
from synthetic import SyntheticRun

pytestmark = pytest.mark.timeout(300)

FIRST_DRAWING_LIMIT_S = 3.0
LATENCY_S = 0.1


@pytest.fixture(scope="module")
def run():
    """Four ranks."""
    return SyntheticRun()


@pytest.fixture
def page(bare, run):
    """A page that shows the first 30 s of it."""
    page = bare()
    page.show(run.frame(30.0, seq=1))
    return page


def column(page, table, name):
    """What the view knows."""
    return page.page.evaluate(f"() => [...{VIEW}.shown.store.{table}.get('{name}')]")


def rows_until(run, now):
    """What it has to know: the losses until then."""
    rows = run.tables["rows"]
    return [loss for at, loss in zip(rows["at"], rows["loss"], strict=True) if at <= now]


def test_a_first_reply_that_is_lost_is_asked_for_again(bare, run):
    """V18: what the kernel says first may get lost; the page asks again, and draws."""
    page = bare()
    page.page.wait_for_function(
        "() => sent.filter((m) => m.type === 'hello').length >= 2", timeout=LIMIT_MS
    )
    assert page.sent("hello")[0]["has_code"] is False
    page.show(run.frame(30.0))
    assert column(page, "rows", "loss") == rows_until(run, 30.0)


def test_lost_frames_are_noticed_and_mended_by_a_snapshot(page, run):
    """Frames that get lost leave no hole: the page asks for all, and ignores others until then."""
    page.give_frame(run.frame(31.0, after=30.0, seq=2))
    assert column(page, "rows", "loss") == rows_until(run, 31.0)
    hellos = len(page.sent("hello"))
    page.give_frame(run.frame(34.0, after=33.0, seq=5))
    assert len(page.sent("hello")) == hellos + 1
    page.give_frame(run.frame(35.0, after=34.0, seq=6))
    assert column(page, "rows", "loss") == rows_until(run, 31.0)
    page.give_frame(run.frame(36.0, seq=9))
    page.give_frame(run.frame(37.0, after=36.0, seq=10))
    assert column(page, "rows", "loss") == rows_until(run, 37.0)
    assert page.page.evaluate(f"() => {VIEW}.counts") == {"frames": 4, "gaps": 1, "snapshots": 2}


def test_a_frame_of_another_schema_is_told(page, run):
    """A frame that the page cannot read says so instead of ending the view."""
    frame = run.frame(31.0, after=30.0, seq=2).replace(b'"schema":1', b'"schema":9')
    page.give_frame(frame)
    assert "schema 9" in page.page.locator(".nbdist > [role=status]").inner_text()
    page.give_frame(run.frame(31.0, after=30.0, seq=2))
    assert column(page, "rows", "loss") == rows_until(run, 31.0)


def test_a_second_view_asks_for_itself_and_has_the_same(page, run):
    """Views of one widget share the code, and each has every row."""
    page.page.evaluate("() => { window.second = window.view(); }")
    page.page.wait_for_function("() => sent.at(-1).type === 'hello'", timeout=LIMIT_MS)
    assert page.sent("hello")[-1]["has_code"] is True
    page.give_frame(run.frame(32.0, seq=2))
    page.drawn()
    both = page.page.evaluate(
        "() => [...window[Symbol.for('nbdist')].views]"
        ".map((v) => [...v.shown.store.rows.get('loss')])"
    )
    assert both == [rows_until(run, 32.0)] * 2
    documents = page.page.evaluate(
        "async () => { const [slot] = window[Symbol.for('nbdist')].code.values(); "
        "const { Bokeh } = await slot.ready; const before = Bokeh.documents.length; "
        "window.second(); await 0; return [before, Bokeh.documents.length]; }"
    )
    assert documents == [18, 9]
    assert len(page.sent("bye")) == 1


def test_a_button_pressed_twice_gives_one_order(page):
    """Until it is answered a button gives no second order; then it works, even if it failed."""
    button = page.page.locator(".nbdist-actions button", has_text="Kill").first
    button.evaluate("(b) => { b.click(); b.click(); }")
    (order,) = page.sent("order")
    assert (order["action"], order["slot"], order["pid"]) == ("kill", 0, 4000)
    answer = page.page.locator(".nbdist-answer")
    page.page.wait_for_function(
        "() => document.querySelector('.nbdist-answer').textContent.includes('queued')",
        timeout=LIMIT_MS,
    )
    page.give({"type": "answer", "id": order["id"], "state": "taken", "text": ""})
    assert answer.inner_text() == "Kill rank 0: under way"
    page.give({"type": "answer", "id": order["id"], "state": "failed", "text": "it is gone"})
    assert answer.inner_text() == "Kill rank 0: it is gone"
    assert button.is_enabled()


def test_two_hundred_presses_freeze_nothing(page, run):
    """V23: who hammers Pause gives as many orders as are answered, and the charts go on."""
    press = """([id]) => {
      const buttons = [...document.querySelectorAll(".nbdist-controls button")];
      for (let i = 0; i < 200; i++) {
        buttons[i % 2].disabled = false;
        buttons[i % 2].click();
        const order = sent.at(-1);
        window.give({ type: "answer", id: order.id, state: "taken", text: "" }, []);
        window.give({ type: "answer", id: order.id, state: "done", text: "" }, []);
      }
    }"""
    began = time.monotonic()
    page.page.evaluate(press, [0])
    assert len(page.sent("order")) == 200
    page.give_frame(run.frame(31.0, after=30.0, seq=2))
    assert column(page, "rows", "loss") == rows_until(run, 31.0)
    assert page.page.evaluate(f"() => {VIEW}.shown.ranks.orders.open.size") == 0
    assert time.monotonic() - began < 4 * 2


def test_who_joins_moves_axes_in_steps(bare):
    """V29: as ranks join one by one, rows that are there stay, and an axis moves once for each."""
    run = SyntheticRun(num_slots=16, length_s=4.0)
    page = bare(views=("ranks", "membership"))
    page.show(run.frame(3.0, seq=1, num_slots=4))
    page.page.evaluate(
        f"""() => {{
          window.first = document.querySelector(".nbdist-ranks tbody tr");
          const range = {VIEW}.shown.panels[0].charts[0].figure.y_range;
          window.moves = [];
          range.change.connect(() => window.moves.push(range.start));
        }}"""
    )
    for num_slots in range(5, 17):
        for _ in range(3):
            page.give_frame(run.frame(3.0, seq=1, num_slots=num_slots))
            page.drawn()
    moves = page.page.evaluate("() => [...new Set(moves)]")
    assert moves == list(range(5, 17))
    assert page.page.evaluate("() => first === document.querySelector('.nbdist-ranks tbody tr')")
    assert page.page.locator(".nbdist-ranks tbody tr").count() == 16


def test_many_views_cost_little_and_need_no_frame_of_another_page(bare, run):
    """V43: of ten views on a page only those in sight are drawn; none is an iframe."""
    page = bare(size=(1300, 900))
    page.show(run.frame(30.0, seq=1))
    page.page.evaluate("() => { for (let i = 0; i < 9; i++) window.view(); }")
    page.give_frame(run.frame(30.0, seq=2))
    assert page.page.locator(".nbdist").count() == 10
    assert page.page.locator("iframe").count() == 0
    session = page.page.context.new_cdp_session(page.page)
    session.send("Performance.enable")

    def busy_s():  # of the page's thread on a processor: not while others have it
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "ThreadTime")

    began, before = time.monotonic(), busy_s()
    for number in range(20):
        now = 30.0 + 0.25 * number
        page.give_frame(run.frame(now + 0.25, after=now, seq=3 + number))
        page.page.wait_for_timeout(250)
    share = (busy_s() - before) / (time.monotonic() - began)
    drawn = page.page.evaluate(
        "() => [...window[Symbol.for('nbdist')].views].map((v) => v.shown?.seen.size ?? 0)"
    )
    assert drawn[0] > 0
    assert not any(drawn[1:])
    assert share < 4 * 0.1, f"{share:.0%} of a core"


def test_many_ranks_over_a_slow_network_are_drawn_soon(bare):
    """V45: 64 ranks, each message 100 ms on its way: one widget, drawn within 3 s."""
    frame = SyntheticRun(num_slots=64, length_s=40.0).frame(39.0)
    page = bare()
    began = time.monotonic()
    page.page.wait_for_timeout(1000 * LATENCY_S)  # what is pushed needs no question
    page.give_code()
    page.page.wait_for_timeout(1000 * LATENCY_S)
    page.give_frame(frame)
    page.drawn()
    took_s = time.monotonic() - began
    assert page.page.locator(".nbdist-ranks tbody tr").count() == 64
    assert took_s < 4 * FIRST_DRAWING_LIMIT_S, f"{took_s:.1f} s"


def test_empty_views_say_why(bare):
    """Before a run, and with one rank, each panel says why it shows nothing, and what would."""
    page = bare()
    page.give_code()
    page.give_frame(SyntheticRun(num_slots=1, length_s=3.0).frame(0.9, has_run=False))
    page.drawn()

    def words(name):
        return page.page.locator(f".nbdist-{name}.nbdist-panel").inner_text()

    assert "%dist_train begins one" in words("loss")
    assert "Throughput comes with the first steps" in words("throughput")
    assert "there is no gradient sync" in words("sync")
    assert "No incident so far" in words("membership")
    assert "no run" in page.page.locator(".nbdist-chip").inner_text()
    assert page.page.locator(".nbdist-card-overlap").inner_text().endswith("nothing to sum")


def test_who_comes_last_without_computing_longer_is_not_blamed(bare):
    """As the first stage of a pipeline does, whose gradients come through all others."""
    run = SyntheticRun(length_s=26.0)
    run.delay(0, 0.03)
    page = bare()
    page.show(run.frame(25.0))
    said = page.page.locator(".nbdist-throughput.nbdist-panel").inner_text()
    assert "neither its computing nor its data takes longer" in said
    assert "holds the others up" not in said
    assert "nobody alone" in page.page.locator(".nbdist-card-slowest").inner_text()


def test_after_a_zoom_all_can_be_seen_again(page):
    """The button Whole undoes a zoom."""
    loss = f"{VIEW}.shown.panels.find((p) => p.name === 'loss')"
    x_range = f"{loss}.charts[0].figure.x_range"
    whole = page.page.evaluate(f"() => {x_range}.end")
    page.page.evaluate(f"() => {x_range}.setv({{ start: 10, end: 20 }})")
    page.page.locator(".nbdist-loss button", has_text="Whole").click()
    page.drawn()
    assert page.page.evaluate(f"() => {x_range}.end") == whole
