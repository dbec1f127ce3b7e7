"""A run as figures, tables and a page that needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from agreeing import AgreeingRun
from bokeh.models import Scatter
from distant import DriftingRun
from msgspec import structs
from piped import PipedRun
from stories import synthetic_story

from nbdist._version import __version__
from nbdist.protocol import frames as fr
from nbdist.protocol.events import Incident
from nbdist.protocol.record import story_lines
from nbdist.protocol.story import ROWS, Evaluation, RunStory
from nbdist.views import facts, figures, palette
from nbdist.views.bundle import bokehjs, report_module
from nbdist.views.chart import Chart
from nbdist.views.figures import figure
from nbdist.views.lanes import LANE_NAMES, lanes
from nbdist.views.playback import story_frame
from nbdist.views.report import Check, page, write_report

NUM_STEPS = 30
OVER_STEPS = [name for name in figures.NAMES if name not in ("bytes", *LANE_NAMES)]


def incident(kind="lost", slot=2, step=10, before=1, after=2, **more):
    fields = {"kind": kind, "slots": (slot,), "ranks": (slot,), "cause": "SIGKILL", "step": step}
    fields |= {"generation_before": before, "generation_after": after}
    return Incident(**(fields | more))


def make_story(num_steps=NUM_STEPS, **fields):
    rows = np.zeros(num_steps, ROWS)
    rows["step"] = np.arange(num_steps)
    rows["loss"] = 5.0 - 0.1 * rows["step"]
    rows["samples"], rows["seconds"], rows["lr"] = 16, 0.2, 1e-3
    rows["generation"], rows["world_size"] = 1, 4
    rows["generation"][10:], rows["world_size"][10:12] = 2, 3
    rows["generation"][12:] = 3
    rows["seconds"][10:11] = 0.8
    rows["at"] = 100 + np.cumsum(rows["seconds"])
    incidents = [
        incident(detect_s=0.004, regroup_s=0.03, stall_s=0.6, steps_repeated=1),
        incident("joined", step=None, before=2, after=3, cause="refill", restore_s=0.05),
    ]
    return RunStory(**{"title": "a run", "rows": rows, "incidents": incidents, **fields})


def with_rows(**columns):
    story = make_story()
    for name, (index, number) in columns.items():
        story.rows[name][index] = number
    return story


def empty_story():
    return RunStory(title="nothing", rows=np.empty(0, ROWS))


def checks_of(story):
    return {check.name: check for check in facts.story_checks(story)}


# ---- facts


def test_headlines_are_those_of_the_rows():
    """Steps, loss, throughput, worlds, incidents and samples."""
    values = {fact.label: (fact.value, fact.detail) for fact in facts.headlines(make_story())}
    assert values["steps committed"] == ("30", "in 6.6 s")
    assert values["loss"] == ("2.10", "from 5.00")
    assert values["samples a second"] == ("73", "over the run, stalls included; 480 samples")
    assert values["ranks"] == ("4", "3 to 4; 3 generations")
    assert values["incidents"] == ("2", "longest stall 600 ms")
    assert values["samples lost / repeated"] == ("0 / 0", "")


def test_steps_are_those_of_the_run():
    """Of a trainer that had committed some before, from where it began; of how many, if known."""

    def text(first, step, target):
        told = story_frame(make_story(), target=target)
        return facts.steps_text(structs.replace(fr.unpack(told)[0].run, first=first, step=step))

    assert text(0, 3813, 100_000) == "3,813 of 100,000 steps"
    assert text(441, 993, 1041) == "552 of 600 steps, from step 441 on"
    assert text(0, 1, None) == "1 step"
    stopped = make_story(target=100_000)
    assert facts.headlines(stopped)[0].detail == "of 100,000, in 6.6 s"


def test_the_pace_of_a_run_is_one_number():
    """Picture, report and live views say the same: of the whole run, stalls included."""
    story = make_story()
    run = fr.unpack(story_frame(story))[0].run
    assert (run.samples, run.seconds) == (480, pytest.approx(6.6))
    assert f"{facts.pace(run.samples, run.seconds):.0f}" == facts.headlines(story)[2].value


def test_a_value_without_neighbours_is_drawn():
    """Of a run of one step, or between two that are no numbers, there is no line."""
    one = make_story(1, incidents=[])
    assert "<circle" in Chart(one, "loss").svg
    assert "<circle" not in Chart(make_story(), "loss").svg
    drawn = figure(one, "throughput").renderers
    (dots,) = [part for part in drawn if isinstance(part.glyph, Scatter)]
    assert list(dots.data_source.data["y"]) == [80.0]
    gaps = np.array([np.nan, 1.0, np.nan, 2.0, 3.0, np.inf, 4.0])
    assert facts.lonely(gaps).tolist() == [1, 6]


def test_of_which_steps_compute_times_are_known_is_said():
    """Where the beginning of a long run is missing; a step or two that were not sent are not."""
    series = {0: {"compute_s": (np.arange(3.0), np.full(3, 0.1))}}
    for first, note in ((0, ""), (4, ""), (20, "from step 20 on")):
        steps = {"step": np.arange(first, 30.0)}
        told = make_story(series=series, tables={"steps": steps})
        assert facts.series_table(told, "compute_s", 1e3, "ms").note == note


def test_an_engine_that_hung_is_marked_until_it_was_ended():
    """From its last sign of life on; one that was lost at once has no such time."""
    hung = incident(kind="hung", began_at=12.0, detect_s=10.0, slots=(1,))
    assert facts.silences([hung, incident()]) == [(1, 2.0, 12.0)]


@pytest.mark.parametrize(
    ("incidents", "detail"),
    [
        ([], "no stall"),
        ([incident(stall_s=None)], "their stall is not known"),
        ([incident(stall_s=None), incident(stall_s=0.2)], "longest stall 200 ms"),
    ],
)
def test_a_stall_that_is_not_known_is_not_denied(incidents, detail):
    """That of an incident before the first step, for instance."""
    found = facts.headlines(make_story(incidents=incidents))
    (told,) = [fact for fact in found if fact.label == "incidents"]
    assert told.detail == detail


def test_a_story_without_a_flaw_passes_all_checks():
    """Nothing is missing, nothing happened twice."""
    assert all(check.holds for check in facts.story_checks(make_story()))


@pytest.mark.parametrize(
    ("story", "name", "detail"),
    [
        (with_rows(step=(7, 6)), "no step is missing or committed twice", "after step 6 comes 6"),
        (with_rows(loss=(4, np.nan)), "every loss is a number", "nan at step 4"),
        (
            make_story(incidents=[incident(samples_lost=3, samples_repeated=5)]),
            "no sample is lost or repeated",
            "3 lost, 5 repeated",
        ),
        (
            make_story(incidents=[incident(not_restored={"file": "cannot be copied"})]),
            "newcomers were given everything",
            "lacking: file",
        ),
        (make_story(incidents=[incident(after=None)]), "every incident came to its end", "1 did"),
        (empty_story(), "steps were committed", "0"),
    ],
)
def test_each_flaw_is_seen_by_its_own_check(story, name, detail):
    """The check fails, the others hold, and the detail says where."""
    checks = checks_of(story)
    assert [check.name for check in checks.values() if not check.holds] == [name]
    assert detail in checks[name].detail


def test_an_incident_without_a_step_stands_where_its_generation_begins():
    """Its own step comes first; before any row of its generation it has no place."""
    rows = make_story().rows
    assert facts.place(incident(step=17), rows) == 17
    assert facts.place(incident(step=None, after=3), rows) == 12
    assert facts.place(incident(step=None, after=9), rows) is None
    assert facts.place(incident(step=None, after=None), rows) is None


def test_the_incident_table_has_every_part():
    """Durations in ms, a dash where a part did not take place, and what could not be restored."""
    table = facts.incident_table(
        [incident(detect_s=0.0042, stall_s=1.5, steps_repeated=1, not_restored={"f": "open file"})]
    )
    whole = " | ".join(map("=".join, zip(table.header, table.rows[0], strict=True)))
    assert whole == (
        "#=1 | kind=lost | slots=2 | ranks=2 | cause=SIGKILL | step=10 | generation=1 → 2 | "
        "detect ms=4 | regroup ms=– | restore ms=– | stall ms=1,500 | steps repeated=1 | "
        "samples lost=0 | samples repeated=0 | not restored=f: open file"
    )


def test_a_long_run_has_a_short_table():
    """Of many steps some are shown, those around a change of generation among them."""
    story = make_story(5000)
    table = facts.step_table(story)
    steps = {int(row[0]) for row in table.rows}
    assert {0, 9, 10, 11, 12, 4999} <= steps
    assert len(steps) < 80
    assert table.note == f"{len(steps)} of 5,000 steps"
    assert len(facts.step_table(make_story()).rows) == NUM_STEPS
    assert facts.step_table(empty_story()).rows == []


def test_each_chart_is_told_in_a_sentence():
    """The sentence has the chart's numbers, whatever they are."""
    story = make_story()
    assert "from 5.00 to 2.10, lowest 2.10 at step 29. 2" in facts.describe(story, "loss")
    assert "73 over the run; of a step 80 in the median, 20 at least, at step 10" in facts.describe(
        story, "throughput"
    )
    assert "4 at first, 4 at last, 3 at least" in facts.describe(story, "world")
    assert facts.describe(empty_story(), "loss") == "No step was committed."
    lost = with_rows(loss=(slice(None), np.nan))
    assert "None of 30 steps has a value" in facts.describe(lost, "loss")
    one = make_story(incidents=[incident()])
    assert facts.describe(one, "world").endswith(" 1 incident is marked.")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (2.6416, "2.64"),
        (10.831, "10.8"),
        (999.96, "1,000"),
        (0.01234, "0.0123"),
        (9.95e-7, "9.95e-7"),
        (-123456.0, "-1.23e+5"),
        (0.0, "0.00"),
        (float("inf"), "inf"),
    ],
)
def test_a_loss_of_any_size_has_three_digits(loss, text):
    """None is written as zero because it is small."""
    assert facts.loss_text(loss) == text


def test_one_thing_is_not_many():
    """A number of things is said as one says it."""
    assert [facts.counted(number, "rank") for number in (0, 1, 2)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
    ]


# ---- palette


def test_every_slot_has_a_look_of_its_own():
    """32 slots: no two share colour and dash, and a slot keeps its colour."""
    looks = {(palette.slot_colour(slot), palette.slot_dash(slot)) for slot in range(32)}
    assert len(looks) == 32
    assert palette.slot_colour(0) == "#0072B2"


# ---- figures


def sources_of(chart):
    return [renderer.data_source.data for renderer in chart.renderers]


def test_figures_show_the_rows():
    """Loss, throughput and world draw what the story holds."""
    story = make_story()
    assert any(
        "value" in data and np.array_equal(data["value"], story.rows["loss"])
        for data in sources_of(figure(story, "loss"))
    )
    rates = next(d["value"] for d in sources_of(figure(story, "throughput")) if "value" in d)
    assert rates[10] == pytest.approx(20)
    world = next(d for d in sources_of(figure(story, "world")) if "ranks" in d)
    assert world["step"].tolist() == [0, 10, 12, 30]
    assert world["ranks"].tolist() == [4, 3, 4, 4]


@pytest.mark.parametrize("name", OVER_STEPS)
def test_every_incident_is_marked_on_every_chart(name):
    """At its step, numbered as in the table, in its slot's colour and its kind's shape."""
    marks = next(d for d in sources_of(figure(make_story(), name)) if "marker" in d)
    assert marks["x"] == [10, 12]
    assert marks["number"] == ["1", "2"]
    assert marks["colour"] == [palette.slot_colour(2)] * 2
    assert marks["marker"] == ["inverted_triangle", "triangle"]


@pytest.mark.parametrize("name", OVER_STEPS)
def test_figures_stand_what_runs_bring(name):
    """No steps, one step, losses that are no numbers, thousands of steps."""
    wild = with_rows(loss=(slice(0, 5), np.inf), seconds=(3, 0.0))
    instant = with_rows(seconds=(slice(None), 0.0), loss=(slice(None), np.nan))
    for story in (empty_story(), make_story(1), wild, instant, make_story(20_000)):
        chart = figure(story, name)
        for data in sources_of(chart):
            assert all(len(column) <= figures.MAX_POINTS + 2 for column in data.values())
        assert np.isfinite([chart.y_range.start or 0, chart.y_range.end or 0]).all()


def test_a_long_line_keeps_its_extremes():
    """Of thousands of steps not all are drawn, but the outlier is."""
    story = make_story(20_000)
    story.rows["loss"][12_345] = 99.0
    drawn = next(d["value"] for d in sources_of(figure(story, "loss")) if "value" in d)
    assert max(drawn) == 99.0


def test_a_chart_that_does_not_exist_is_refused():
    """The error lists those that do."""
    with pytest.raises(
        ValueError,
        match="no chart 'lose': there are loss, throughput, world, bytes, sync, pipeline",
    ):
        figure(make_story(), "lose")


# ---- lanes


def test_the_sync_of_the_last_step_has_lanes_of_bars():
    """Computing above, buckets below, from the beginning of the step; its sentence has numbers."""
    shown = lanes(synthetic_story(), "sync")
    assert shown.names == ("slot 0", "slot 1", "slot 2", "slot 3")
    assert {bar.lane for bar in shown.bars} == {0, 1, 2, 3}
    buckets = [bar for bar in shown.bars if bar.what.startswith("bucket")]
    assert len(buckets) == 4 * 4
    assert min(bar.top for bar in buckets) > max(b.bottom for b in shown.bars if b not in buckets)
    assert min(bar.began for bar in shown.bars) == 0
    assert "Gradient sync of step 301: 4 buckets on 4 slots" in shown.sentence


def test_membership_has_a_bar_for_each_state_of_a_slot():
    """A slot that was lost is grey for a while, and comes back in its own colour."""
    shown = lanes(synthetic_story(), "membership")
    lives = [(bar.what, bar.colour) for bar in shown.bars if bar.lane == 2]
    own = palette.slot_colour(2)
    assert [what for what, _ in lives] == [
        *("starting", "generation 1", "empty", "starting", "generation 3")
    ]
    assert [colour for what, colour in lives if what.startswith("gen")] == [own, own]
    assert "4 slots over 60" in shown.sentence or "4 slots over 59" in shown.sentence


@pytest.mark.parametrize("name", LANE_NAMES)
def test_lanes_that_nothing_is_known_of_say_why(name):
    """In the chart, its text and its bokeh figure."""
    chart = Chart(make_story(), name)
    assert "known" in chart.text
    lines = [part.text for part in ET.fromstring(chart.svg)[1:]]
    assert chart.text in " ".join(filter(None, lines))
    assert list(chart.bokeh.renderers[0].data_source.data["left"]) == []


@pytest.mark.parametrize("name", LANE_NAMES)
def test_lanes_are_drawn_by_bokeh_too(name):
    """As many bars, with the names of the slots."""
    made = {
        "pipeline": lambda: PipedRun(length_s=4.0),
        "distance": lambda: DriftingRun(length_s=9.0),
        "agreement": lambda: AgreeingRun(length_s=9.0),
    }
    story = synthetic_story(made[name]() if name in made else None)
    chart, shown = figure(story, name), lanes(story, name)
    assert len(chart.renderers[0].data_source.data["left"]) == len(shown.bars) >= 4
    assert tuple(chart.yaxis[0].major_label_overrides.values()) == shown.names


# ---- the page


class Resources(HTMLParser):
    """Collects what a browser would fetch, and the text that a reader sees."""

    def __init__(self, html):
        super().__init__()
        self.fetched, self.text, self.tags, self._inside = [], [], [], ""
        self.styles = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        self.tags.append(tag)
        names = {"src", "href", "data", "action", "poster", "srcset"}
        self.fetched += [value for name, value in attributes if name in names]

    def handle_endtag(self, _tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "style":
            self.styles.append(data)
        elif self._inside != "script":
            self.text.append(data)


def held(html, name):
    """What an element of the page holds, unpacked."""
    (text,) = re.findall(rf'id="{name}">([^<]*)<', html)
    return gzip.decompress(base64.b64decode(text))


@pytest.fixture(scope="module")
def html():
    x = 100 + np.arange(1.0, 6.0)
    story = replace(
        synthetic_story(title="<script>alert(1)</script> & co"),
        series={0: {"memory_rss_bytes": (x, np.full(5, 2.0**28))}},
        evaluations=[Evaluation(step=20, at=104.0, metrics={"accuracy": 0.5})],
        notes=["12 records <b>dropped</b>"],
    )
    extra = [Check(name="replicas are equal", holds=False, detail="rank 2 differs")]
    return page(story, checks=extra, reference=make_story(title="undisturbed"))


def test_the_page_fetches_nothing(html):
    """No attribute, style or import names another resource, and a policy forbids it: offline."""
    resources = Resources(html)
    assert {value.partition(",")[0] for value in resources.fetched} == {
        "data:image/png;base64",
        "data:application/gzip;base64",
    }
    styles = "".join(resources.styles)
    assert not re.search(r"@import|url\(\s*['\"]?(?!data:)", styles)
    assert "link" not in resources.tags
    assert "default-src 'none'" in html
    assert len(html) < 3_000_000


def test_the_page_holds_the_run_and_what_draws_it(html):
    """A frame with the run's buckets, the installed BokehJS, the views' modules, a picture."""
    header, tables = fr.unpack(held(html, "nbdist-frame"))
    assert not header.is_live
    assert header.run.state == "finished"
    assert {"rows", "steps", "buckets", "spans", "seats", "phases"} <= set(tables)
    _, beneath = fr.unpack(held(html, "nbdist-reference"))
    assert beneath["rows"]["step"].tolist() == list(range(NUM_STEPS))
    assert bokehjs().replace("</script", "") in html
    assert report_module() in html
    for name in ("nbdist-settings", "nbdist-figures"):
        (text,) = re.findall(rf'id="{name}">([^<]*)<', html)
        assert json.loads(text)


def test_no_script_ends_early(html):
    """Code has no end tag within; each script element has one."""
    assert html.count("<script") == html.count("</script>") == 6 + bokehjs().count("<script")
    assert "<!--" not in report_module()


def test_the_page_says_everything_in_words(html):
    """Facts, checks, incidents, evaluations, notes and tables stand there without scripts."""
    resources = Resources(html)
    text = " ".join(" ".join(resources.text).split())
    for words in (
        *("1 of 7 checks failed", "replicas are equal : rank 2 differs", "1.617", "1 → 2"),
        *("Steps as a table", "Memory of each engine as a table", "256.0", "accuracy"),
        *("12 records <b>dropped</b>", "▼ lost", "Save the record"),
    ):
        assert words in text
    assert resources.tags.count("details") == 2
    assert re.search('<img src="data:image/png;base64,[^"]+" alt="Loss over 302 steps', html)


@pytest.mark.parametrize("record", [None, b'{"type": "Header"}\n', os.urandom(4_000_000)])
def test_the_page_holds_the_record(record, tmp_path):
    """That which the run wrote, where it is not too large; else one that its story makes."""
    story, path = make_story(), tmp_path / "run.jsonl"
    if record is not None:
        path.write_bytes(record)
    text = page(story, record=None if record is None else path)
    (packed,) = re.findall('href="data:application/gzip;base64,([^"]+)"', text)
    lines = gzip.decompress(base64.b64decode(packed))
    own = story_lines(story, nbdist=__version__)
    assert lines == (record if record is not None and len(record) < 1_000_000 else own)


def test_what_users_write_is_text_and_not_html(html):
    """A title with tags in it is shown as it is."""
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in html


def test_a_report_is_one_file(tmp_path):
    """An older one is replaced; a run without steps or incidents has a page too."""
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_report(path, empty_story()) == path
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "Nothing happened" in text
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_needs_a_name():
    """It is not the present folder that cannot be written."""
    with pytest.raises(ValueError, match=r"path='': the name of a file"):
        write_report("", empty_story())


def test_views_load_no_torch():
    """A notebook's kernel draws them."""
    code = "import sys\nimport nbdist.views.report\nassert 'torch' not in sys.modules"
    root = Path(palette.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


# ---- a chart that a cell shows


@pytest.mark.parametrize("name", figures.NAMES)
@pytest.mark.parametrize("num_steps", [0, 1, 30, 50_000])
def test_a_chart_draws_itself_small_and_without_a_network(name, num_steps):
    """A drawing and its twin in words; whatever the length, a notebook stays small."""
    story = make_story(max(num_steps, NUM_STEPS))
    story = replace(story, rows=story.rows[:num_steps])
    shown = Chart(story, name)._repr_mimebundle_(include=None, exclude=None)
    root = ET.fromstring(shown["image/svg+xml"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].text == figures.text_of(story, name)
    assert shown["text/plain"] == f"<chart: {root[0].text}>"
    assert len(shown["image/svg+xml"]) < 30_000
    assert not re.search("href|script|url", shown["image/svg+xml"])


def test_a_chart_parts_its_line_where_a_loss_is_no_number():
    """And marks the incidents; a loss that is none everywhere is said."""
    drawn = Chart(with_rows(loss=(slice(10, 12), np.nan)), "loss").svg
    (curve,) = re.findall(r'd="([^"]*)" fill="none"', drawn)
    assert curve.count("M") == 2
    assert drawn.count("stroke-dasharray") == 2
    assert "None of 30 steps" in Chart(with_rows(loss=(slice(None), np.inf)), "loss").svg


def test_a_chart_has_a_bokeh_figure_and_a_name():
    """The one that reports hold; other names are refused."""
    assert Chart(make_story(), "loss").bokeh.renderers
    with pytest.raises(
        ValueError,
        match="no chart 'lost': there are loss, throughput, world, bytes, sync, pipeline",
    ):
        Chart(make_story(), "lost")
