"""A batch's way through a pipeline, as figures and pictures show it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from made_frames import HEADER
from PIL import Image
from piped import DELAY_S, FORWARD_S, PipedRun
from stories import synthetic_story

from nbdist.protocol.frames import pack
from nbdist.protocol.tables import TABLES
from nbdist.views.chart import Chart
from nbdist.views.lanes import lanes
from nbdist.views.passages import COLOURS, is_pipeline, newest_passage
from nbdist.views.picture import picture


@pytest.fixture(scope="module")
def story():
    """Four ranks, 1F1B, eight micro-batches; the second rank is slow."""
    return synthetic_story(PipedRun(length_s=4.0))


@pytest.fixture
def passage(story):
    return newest_passage(story.tables)


def spans(*rows, step=3, generation=1):
    """Of one attempt: (slot, kind, micro-batch, stage, from, to)."""
    table = {column: np.zeros(len(rows)) for column in TABLES["spans"]}
    for column, values in zip(
        ("slot", "kind", "ident", "value", "began_at", "ended_at"),
        zip(*rows, strict=True),
        strict=True,
    ):
        table[column] = np.array(values, float)
    return table | {"step": np.full(len(rows), step), "generation": np.full(len(rows), generation)}


TWO = (
    (0, 3, 0, 0, 10.0, 11.0),
    (1, 3, 0, 1, 11.5, 12.5),
    (1, 4, 0, 1, 12.5, 14.5),
    (0, 4, 0, 0, 15.0, 17.0),
    (0, 23, 1, 64.0, 11.0, 11.0),
)


def test_the_bubble_is_the_time_in_which_ranks_do_not_compute():
    """Of two ranks in seven seconds, six of which somebody computes."""
    passage = newest_passage({"spans": spans(*TWO)})
    assert (passage.step, passage.end) == (3, 7.0)
    assert passage.idle == pytest.approx(1 - 6 / 14)
    assert passage.forward_s == pytest.approx(1.0)
    assert np.isnan(passage.idle_planned)
    assert "what was planned is not known" in passage.sentence


def test_a_wait_is_a_gap_before_what_another_slot_sends():
    """From when the slot had nothing else to do, or since the batch began."""
    waits = newest_passage({"spans": spans(*TWO)}).waits
    found = [(wait.slot, wait.whom, wait.began, wait.ended) for wait in waits]
    assert found == [(1, 0, 0.0, 1.5), (0, 1, 1.0, 5.0)]


def test_a_gap_before_ones_own_work_is_no_wait():
    """Weights, or the next stage on the same slot: nobody else is to blame."""
    rows = (
        (0, 3, 0, 0, 0.0, 1.0),
        (0, 3, 0, 1, 2.0, 3.0),
        (0, 10, 0, 1, 4.0, 5.0),
        (0, 10, 0, 0, 6.0, 7.0),
        (0, 11, 0, 0, 8.0, 9.0),
        (0, 23, 1, 64.0, 1.0, 1.0),
    )
    passage = newest_passage({"spans": spans(*rows)})
    assert passage.waits == []
    assert passage.stages(0) == [0, 1]
    assert "nobody waits" in passage.sentence


def test_pipelines_side_by_side_wait_for_their_own(story):
    """What comes from the stage before comes from the same pipeline's; the formula is of one."""
    one = [(2 * slot, *rest) for slot, *rest in TWO[:4]]
    late = [(slot + 1, *what, began + 1, ended + 1) for slot, *what, began, ended in one]
    rows = [*one, *late, TWO[4]]
    passage = newest_passage({"spans": spans(*rows)})
    assert passage.slots == [0, 1, 2, 3]
    assert [(w.slot, w.whom, w.began, w.ended) for w in passage.waits if w.slot > 1] == [
        (2, 0, 0.0, 1.5),
        (3, 1, 0.0, 2.5),
    ]
    plans = {name: np.tile(values, 2) for name, values in story.tables["plans"].items()}
    plans["slot"][len(plans["slot"]) // 2 :] += 4
    found = newest_passage(story.tables | {"plans": plans})
    assert found.formula == "(p−1)/(m+p−1) with p = 4 of 8 ranks, m = 8"


def test_measured_and_planned_stand_beside_one_another(passage):
    """The plan's share by its formula; what was measured is more, by what sending takes."""
    assert passage.slots == [0, 1, 2, 3]
    assert passage.idle_planned == pytest.approx(3 / 11)
    assert passage.formula == "(p−1)/(m+p−1) with p = 4, m = 8"
    assert passage.idle > passage.idle_planned
    assert FORWARD_S < passage.forward_s < 1.25 * FORWARD_S
    assert f"the bubble is {passage.idle:.0%}" in passage.sentence
    assert "planned are 27% = (p−1)/(m+p−1) with p = 4, m = 8" in passage.sentence
    assert passage.most_at_once(0) == 4
    assert passage.most_at_once(3) == 1
    assert min(wait.ended - wait.began for wait in passage.waits) > 0
    first = next(wait for wait in passage.waits if wait.slot == 1)
    assert (first.began, first.ended) == pytest.approx((0, FORWARD_S + DELAY_S))


def test_a_plan_that_no_formula_gives_has_none(story):
    """Ranks that go through their micro-batches one by one."""
    plans = {name: values.copy() for name, values in story.tables["plans"].items()}
    plans["began"], plans["ended"] = plans["began"] * 2, plans["ended"] * 2 - 1
    found = newest_passage(story.tables | {"plans": plans})
    assert found.formula == ""
    assert "with equal forwards" in found.sentence


def test_halves_of_a_backward_and_several_stages_have_a_formula_of_their_own(story):
    """As `describe` says of such schedules."""
    rows = [
        *((slot, 3, 0, slot, 0, 1) for slot in (0, 1)),
        *(
            (slot, kind, 0, stage, 4, 5)
            for slot in (0, 1)
            for kind in (10, 11)
            for stage in (slot, slot + 2)
        ),
    ]
    plans = {name: np.zeros(len(rows)) for name in TABLES["plans"]}
    for name, values in zip(
        ("slot", "kind", "ident", "stage", "began", "ended"), zip(*rows, strict=True), strict=True
    ):
        plans[name] = np.array(values, float)
    plans["generation"] += story.tables["spans"]["generation"][0]
    share = 1 / (3 * 2 * 1 + 1)
    busy = 10 / 2 / (1 - share)
    plans["began"][-1], plans["ended"][-1] = busy - 1, busy
    found = newest_passage(story.tables | {"plans": plans})
    assert found.formula == "(p−1)/(3·v·m+p−1) with p = 2, v = 2, m = 1"


def test_a_step_that_broke_is_shown_only_where_there_is_no_other(story):
    """It says nothing of the schedule."""
    table = story.tables["spans"]
    last = table["step"].max()
    is_broken = (table["step"] == last) & (table["kind"] == 4) & (table["ident"] == 7)
    kept = {name: values[~is_broken] for name, values in table.items()}
    assert newest_passage(story.tables | {"spans": kept}).step == last - 1
    only = {name: values[kept["step"] == last] for name, values in kept.items()}
    assert newest_passage(story.tables | {"spans": only}).step == last


def test_who_passes_nothing_on_is_no_pipeline():
    """Spans of forward and backward have others too; a plan alone says it."""
    others = synthetic_story().tables
    assert not is_pipeline(others)
    assert newest_passage(others) is None
    assert not is_pipeline({})
    assert is_pipeline({"plans": {"slot": np.zeros(1)}})
    assert newest_passage({"plans": {"slot": np.zeros(1)}}) is None


def test_its_lanes_have_the_plan_below(story):
    """Measured above, planned below, waits beneath what is computed."""
    shown = lanes(story, "pipeline")
    assert shown.names == ("slot 0", "slot 1", "slot 2", "slot 3")
    planned = [bar for bar in shown.bars if bar.what.startswith("planned")]
    waits = [bar for bar in shown.bars if bar.what.startswith("waits for micro-batch")]
    assert len(planned) == 4 * 16
    assert len(shown.bars) - len(planned) - len(waits) == 4 * 16
    assert min(bar.top for bar in planned) > max(b.bottom for b in shown.bars if b not in planned)
    assert [what for _, what in shown.keys] == ["forward", "backward", "waits", "planned"]
    chart = Chart(story, "pipeline")
    assert "the bubble is" in chart.text
    assert len(chart.svg) < 40_000
    assert len(chart.bokeh.renderers[0].data_source.data["left"]) == len(shown.bars)


def test_a_picture_of_a_pipeline_shows_its_passage(story):
    """In the place of gradient sync; without a step it says so."""
    blue = tuple(bytes.fromhex(COLOURS["B"][1:]))

    def colours(tables):
        image = Image.open(io.BytesIO(picture(pack(HEADER, tables)))).convert("RGBA")
        return {colour for _, colour in image.getcolors(1 << 20)}

    near = [
        c
        for c in colours(story.tables)
        if sum(abs(a - b) for a, b in zip(c[:3], blue, strict=True)) < 24
    ]
    assert near
    assert colours({"plans": story.tables["plans"]})
