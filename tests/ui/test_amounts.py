"""The page's views of amounts: what ranks send, and what they hold in memory."""

from __future__ import annotations

import re

import pytest
from agreeing import BLOCKS, WHAT, WHO, AgreeingRun
from bare import VIEW
from distant import DriftingRun, ServedRun
from piped import PipedRun
from sending import PAYLOAD_BYTES, SendingRun
from stories import synthetic_story
from synthetic import SyntheticRun

from nbdist.protocol.frames import unpack
from nbdist.views import agreements, distances, sent
from nbdist.views.facts import size
from nbdist.views.traffic import flows, sentence

pytestmark = pytest.mark.timeout(120)

CHARTS = f"{VIEW}.shown.panels.find((p) => p.name === '%s').charts"


def panel(page, name):
    return page.page.locator(f".nbdist-{name}.nbdist-panel")


def said(page, name):
    return panel(page, name).locator(".nbdist-said").inner_text()


def column(page, name, chart, source, column):
    path = f"{CHARTS % name}[{chart}].sources['{source}'].data['{column}']"
    return page.page.evaluate(f"() => [...{path}]")


def table(page, name):
    panel(page, name).locator("button", has_text="Table").click()
    rows = panel(page, name).locator(".nbdist-scroller tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def test_what_is_sent_is_told_as_python_tells_it(bare):
    """The same sentence, a bar for each kind, numbers as a table, a picture."""
    page, frame = bare(views=("traffic", "memory")), PipedRun().frame(12.0)
    page.show(frame)
    shown = flows(unpack(frame)[1])
    assert said(page, "traffic").startswith(sentence(shown))
    assert len(column(page, "traffic", 0, "lengths", "left")) == len(shown)
    assert max(column(page, "traffic", 0, "lengths", "right")) > 1
    rows = table(page, "traffic")
    assert len(rows) == len(shown)
    assert rows[0][:6] == ["0", "send, pipeline", "8", "512 KiB", "512 KiB", "–"]
    with page.page.expect_download() as saved:
        panel(page, "traffic").locator("button", has_text="PNG").click()
    assert saved.value.suggested_filename == "nbdist-traffic.png"
    assert page.errors == []


def test_what_a_byte_buys_is_told_as_python_tells_it(bare):
    """The same sentence and the same curve, with the incidents; numbers as a table, a picture."""
    run = SendingRun()
    page, story = bare(views=("bytes", "memory")), synthetic_story(run)
    page.show(run.frame(run.length_s + 1))
    shown = sent.curve(story)
    assert said(page, "bytes") == sent.sentence(shown)
    drawn = column(page, "bytes", 0, "curve", "x")
    assert drawn == pytest.approx((shown.sent_bytes / 2**30).tolist())
    assert column(page, "bytes", 0, "curve", "loss") == pytest.approx(shown.losses.tolist())
    marks = [shown.at(step) / 2**30 for step in (94, 98)]
    assert column(page, "bytes", 0, "marks", "x") == pytest.approx(marks)
    rows = table(page, "bytes")
    assert rows[0][0] == f"{int(shown.steps[-1])}"
    assert rows[0][2:] == [size(shown.sent_bytes[-1]), size(6 * PAYLOAD_BYTES)]
    with page.page.expect_download() as saved:
        panel(page, "bytes").locator("button", has_text="PNG").click()
    assert saved.value.suggested_filename == "nbdist-bytes.png"
    assert page.errors == []


def test_what_is_held_is_told(bare):
    """Who holds most, of how much, and what grew; over time, and as a table."""
    page = bare(views=("memory",))
    page.show(SyntheticRun().frame(12.0))
    text = said(page, "memory")
    assert text.startswith("Slot 3 holds most, 431 MiB of 8.00 GiB that it can have")
    assert "by 30.0 MiB" in text
    assert max(column(page, "memory", 0, "lengths", "right")) == pytest.approx(443)
    assert [len(x) for x in column(page, "memory", 1, "growth", "xs")] == [12] * 4
    assert column(page, "memory", 1, "moments", "text") == ["generation 1"]
    rows = table(page, "memory")
    assert rows[0][:6] == ["0", "410 MiB", "422 MiB", "8.00 GiB", "5 %", "30.0 MiB"]
    assert page.errors == []


@pytest.mark.parametrize(("run", "num_bars"), [(ServedRun, 8), (DriftingRun, 8)])
def test_how_far_ranks_are_apart_is_told_as_python_tells_it(bare, run, num_bars):
    """The same sentence, a bar for each age or two for each slot, numbers as a table, a picture."""
    page, frame = bare(views=("distance", "memory")), run(length_s=16.0).frame(15.0)
    page.show(frame)
    tables = unpack(frame)[1]
    shown = distances.ages(tables), distances.drifts(tables)
    assert said(page, "distance") == distances.sentence(*shown)
    assert len(column(page, "distance", 0, "lengths", "right")) == num_bars
    updates, drifts = shown
    rows = [[f"{age}", f"{num}"] for age, num in updates.items()] or [
        [f"{drift.slot}", f"{100 * drift.last:.2f}%", f"{100 * drift.most:.2f}%"]
        for drift in drifts
    ]
    assert table(page, "distance") == rows
    with page.page.expect_download() as saved:
        panel(page, "distance").locator("button", has_text="PNG").click()
    assert saved.value.suggested_filename == "nbdist-distance.png"
    assert page.errors == []


def test_whether_replicas_are_identical_is_told_as_python_tells_it(bare):
    """The same sentence as each frame comes, a cell for each block of each slot, a table, a
    picture; the look that found the first difference stays."""
    page, run = bare(views=("agreement", "memory")), AgreeingRun(length_s=16.0)
    page.show(run.frame(3.0))
    assert "identical, bit for bit" in said(page, "agreement")
    frame = run.frame(15.0)
    page.show(frame)
    looks = agreements.looks(unpack(frame)[1])
    assert said(page, "agreement") == agreements.sentence(looks)
    hatches = column(page, "agreement", 0, "lengths", "hatch")
    assert [place for place, hatch in enumerate(hatches) if hatch != " "] == [WHO * BLOCKS + WHAT]
    assert column(page, "agreement", 0, "letters", "letter").count("✗") == 1
    rows = table(page, "agreement")
    assert rows[WHO] == [f"{WHO}", f"{WHAT}", f"{WHAT}"]
    assert rows[0] == ["0", "none", "none"]
    with page.page.expect_download() as saved:
        panel(page, "agreement").locator("button", has_text="PNG").click()
    assert saved.value.suggested_filename == "nbdist-agreement.png"
    assert page.errors == []


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("distance", "Nothing is known"),
        ("agreement", "No two replicas"),
        ("bytes", "Nothing has been sent yet"),
    ],
)
def test_where_ranks_do_not_compare_there_is_no_such_panel(bare, view, words):
    """But where it alone is wanted: then it says so."""
    page = bare(views=(view, "memory"))
    page.show(SyntheticRun().frame(5.0))
    assert panel(page, view).is_hidden()
    page = bare(views=(view,))
    page.show(SyntheticRun().frame(5.0))
    assert words in panel(page, view).inner_text()


def test_before_anything_is_told_they_say_so(bare):
    """And what is to come."""
    page = bare(views=("traffic", "memory"))
    page.show(SyntheticRun().frame(0.9))
    assert "comes with the first steps" in panel(page, "traffic").inner_text()
    assert "told once a second" in panel(page, "memory").inner_text()


def test_many_slots_have_low_lanes(bare):
    """All of them, each with its bars; lines for those that hold most."""
    page = bare(views=("traffic", "memory"))
    page.show(SyntheticRun(num_slots=64, length_s=8.0).frame(6.0))
    assert len(set(column(page, "traffic", 0, "lengths", "slot"))) == 64
    assert len(column(page, "memory", 1, "growth", "slot")) == 16
    assert re.search(r"Slot 63 holds most", said(page, "memory"))
