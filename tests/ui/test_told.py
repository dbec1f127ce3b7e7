"""What a page says of a run: of one that stands, that goes on from another, that is lost."""

from __future__ import annotations

import numpy as np
import pytest
from bare import VIEW
from msgspec.structs import replace
from synthetic import SyntheticRun

from nbdist.protocol import frames as fr
from nbdist.protocol.story import ROWS, RunStory
from nbdist.views.playback import story_frame

pytestmark = pytest.mark.timeout(120)

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


def lives_of(page):
    """The bars of who was in the job when."""
    return page.page.evaluate(
        f"() => {VIEW}.shown.panels.find((p) => p.name === 'membership')"
        ".charts[0].sources.lives.data"
    )


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
