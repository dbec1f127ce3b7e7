"""Loss against bytes, from what an engine sends to the curve and its sentence."""

import threading
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from sending import PAYLOAD_BYTES, SendingRun
from stories import synthetic_story

from nbdist.engine import emit
from nbdist.protocol.story import ROWS, RunStory
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.thinning import thin
from nbdist.protocol.traffic import Axis, Op
from nbdist.supervisor.history import CAPACITY
from nbdist.supervisor.memories import SentReader
from nbdist.supervisor.series import Series
from nbdist.supervisor.tables import run_tables
from nbdist.views.chart import Chart
from nbdist.views.figures import figure
from nbdist.views.sent import NOTHING, curve, sentence

MS = 1_000_000
EACH = 100.0
"""Bytes that a made-up engine sends in a step."""


def told():
    """What the process has told of what it sent."""
    drained = emit.RING.drain(emit.NUM_RECORDS)
    records = np.frombuffer(drained.records, emit.RECORD)
    return records["value"][records["kind"] == Kind.SENT].tolist()


def train(engine, steps, *, begins=True):
    """Tell of steps as an engine does that has sent so much in each since it began."""
    engine.ring.begin_step(steps[0], 1)
    if begins:
        engine.put(Kind.SENT, value=0.0)
    for num, step in enumerate(steps, 1):
        engine.ring.begin_step(step, 1)
        engine.now_ns += 10 * MS
        engine.put(Kind.SENT, value=num * EACH)
    return engine.records()


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def story(sent, losses):
    """Of a run whose slots have sent so much: {slot: [(step, bytes), ...]}."""
    rows = np.zeros(len(losses), ROWS)
    rows["step"], rows["loss"] = np.arange(len(losses)), losses
    points = [(slot, step, num) for slot, its in sent.items() for step, num in its]
    slots, steps, nums = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    table = {"step": steps, "at": np.arange(len(points)), "sent_bytes": nums, "slot": slots}
    return RunStory(title="made up", rows=rows, tables={"sent": table})


# ---- what an engine tells


def test_a_rank_tells_what_it_has_sent_since_it_began():
    """A 0 before the first time; of each payload what has to be sent; a run later from 0 again."""
    told()
    emit.begin_sent()
    emit.tell_sent()
    assert told() == []
    with emit.exchange(Op.ALL_REDUCE, Axis.DATA, 4, 100):
        pass
    emit.tell_sent()
    emit.sent(8)
    emit.tell_sent()
    assert told() == [0.0, 150.0, 158.0]
    emit.begin_sent()
    emit.sent(8)
    emit.tell_sent()
    assert told() == [0.0, 8.0]


def test_what_several_threads_send_is_summed_up():
    """Each adds without waiting, and nothing is lost."""
    total = emit.Sum()
    threads = [
        threading.Thread(target=lambda: [total.add(1.0) for _ in range(1_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    read = [total.total for _ in range(10)]
    for thread in threads:
        thread.join()
    assert total.total == 4_000
    assert read == sorted(read)


# ---- what is made of it


def test_an_engine_in_anothers_place_goes_on_from_what_that_one_had_sent(made_up):
    """The curve never falls, also where the new one's first step was as large as all before."""
    series, reader = Series(1), SentReader(0.0)
    series.add(0, train(made_up(0), [0]))
    series.add(1, train(made_up(1), [0, 1, 2]))
    first = joined(reader.read(series))
    assert first["sent_bytes"].tolist() == [EACH, EACH, 2 * EACH, 3 * EACH]
    assert reader.read(series) == []
    later = made_up(0, pid=101, now_ns=1_000_100 * MS)
    series.add(0, train(later, [1, 2]))
    parts = reader.read(series)
    assert joined(parts)["sent_bytes"].tolist() == [2 * EACH, 3 * EACH]
    assert joined(parts)["step"].tolist() == [1, 2]
    whole = run_tables(series, [])["sent"]
    assert whole["sent_bytes"][whole["slot"] == 0].tolist() == [EACH, 2 * EACH, 3 * EACH]


def test_what_an_earlier_run_sent_does_not_count(made_up):
    """The reader of a run looks at nothing that was told before it began."""
    engine, series = made_up(0), Series(1)
    series.add(0, train(engine, range(50)))
    engine.now_ns += MS
    reader = SentReader(engine.now_ns * 1e-9)
    series.add(0, train(engine, [50, 51]))
    assert joined(reader.read(series))["sent_bytes"].tolist() == [EACH, 2 * EACH]


def test_a_long_run_is_known_from_its_beginning(made_up):
    """Where points are kept no more, what they were summed up to says what was sent."""
    series, num = Series(10), CAPACITY + 1_000
    engine = made_up(0)
    for start in range(0, num, 500):
        for step in range(start, start + 500):
            engine.ring.begin_step(step, 1)
            engine.now_ns += 10 * MS
            engine.put(Kind.SENT, value=(step + 1) * EACH)
        series.add(0, engine.records())
    table = joined(SentReader(0.0).read(series))
    assert table["step"][0] < 100
    assert table["sent_bytes"].tolist() == ((table["step"] + 1) * EACH).tolist()
    short = thin("sent", table, 400)
    assert (short["step"][0], short["step"][-1]) == (table["step"][0], num - 1)


def test_what_all_ranks_have_sent_is_summed_up_step_by_step():
    """What is told of some steps only is taken to be even between them; who is gone stays."""
    shown = curve(story({0: [(0, 10.0), (2, 30.0)], 1: [(0, 1.0)], 2: [(1, 5.0)]}, [3, 2, 1, 1]))
    assert shown.steps.tolist() == [0, 1, 2]
    assert shown.sent_bytes.tolist() == [11.0, 26.0, 36.0]
    assert (shown.at(0.5), shown.at(9)) == (18.5, 36.0)


def test_steps_that_are_trained_again_cost_again():
    """What was sent for steps that were lost is counted, and no step stands before another."""
    again = [(0, 10.0), (1, 20.0), (2, 30.0), (1, 40.0), (2, 50.0)]
    assert curve(story({0: again}, [3, 2, 1])).sent_bytes.tolist() == [10.0, 40.0, 50.0]


# ---- what is shown


def test_the_curve_is_told_in_a_sentence():
    """How much, how much in a step, and what half of the way has cost."""
    its = [(step, (step + 1) * 2.0**20) for step in range(5)]
    said = sentence(curve(story({0: its}, [5.0, 4.0, 3.0, 2.0, 1.0])))
    assert said == (
        "All ranks together have sent 5.0 MiB, 1.0 MiB in a step; the loss went from 5.00 to "
        "1.00, half of the way with the first 3.0 MiB."
    )
    risen = sentence(curve(story({0: its}, [1.0, 2.0, np.nan, 2.0, 3.0])))
    assert risen.endswith("the loss went from 1.00 to 3.00.")


def test_a_run_of_which_nothing_is_known_says_why():
    """One rank alone, or a record of an earlier version: in words, in all drawings."""
    older = synthetic_story()
    assert "sent" not in older.tables
    chart = Chart(older, "bytes")
    assert chart.text == NOTHING
    lines = [part.text for part in ET.fromstring(chart.svg)[1:]]
    assert NOTHING in " ".join(filter(None, lines))
    assert figure(older, "bytes").renderers == []
    assert sentence(curve(story({0: [(0, 1.0)]}, [np.nan]))) == NOTHING


def test_it_is_drawn():
    """To what all have sent, in a unit with few digits, with the incidents."""
    sending = synthetic_story(SendingRun())
    whole = curve(sending).sent_bytes
    num = len(sending.rows)
    assert whole[-1] < num * 6 * PAYLOAD_BYTES < 1.1 * whole[-1]
    assert (np.diff(whole) > 0).all()
    chart = figure(sending, "bytes")
    (drawn,) = (r.data_source.data for r in chart.renderers if "GiB" in r.data_source.data)
    assert drawn["GiB"][-1] == pytest.approx(whole[-1] / 2**30)
    assert chart.xaxis[0].axis_label == "GiB sent by all ranks"
    marks = next(r.data_source.data for r in chart.renderers if "marker" in r.data_source.data)
    assert marks["x"] == [pytest.approx(whole[step] / 2**30) for step in (94, 98)]
    drawing = ET.fromstring(Chart(sending, "bytes").svg)
    assert len([part for part in drawing if part.tag.endswith("}g")]) == len(marks["x"])
    wild = replace(sending, rows=sending.rows.copy())
    wild.rows["loss"][:5] = np.inf
    ET.fromstring(Chart(wild, "bytes").svg)
    assert np.isfinite(figure(wild, "bytes").y_range.end)
