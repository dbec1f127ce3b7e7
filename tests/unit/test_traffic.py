"""What ranks send, from an engine's records to the rows, bars and sentences of the views."""

from __future__ import annotations

import numpy as np
import pytest
from piped import SENT_BYTES, PipedRun
from stories import synthetic_story
from synthetic import BUCKET_BYTES, NUM_BUCKETS

from nbdist.protocol.tables import TABLES
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import AXES, OPS, SHARES, Axis, Op, Road, packed, unpacked
from nbdist.supervisor.details import DetailReader
from nbdist.supervisor.series import Series
from nbdist.views.lanes import lanes
from nbdist.views.traffic import NUM_RECENT, flows, road_colour, sentence

MS = 1_000_000
LATER_S = 1e6


@pytest.mark.parametrize("axis", Axis)
@pytest.mark.parametrize("op", Op)
def test_a_record_names_what_is_done_between_whom(op, axis):
    """By one number, which a table of the views holds exactly; all have names and a formula."""
    ident = packed(op, axis, 512)
    assert unpacked(ident) == Road(op, axis, 512)
    assert np.float32(ident) == ident
    assert OPS[op]
    assert AXES[axis]
    assert SHARES[op][1](4) >= 0.75


def test_what_is_not_known_is_refused():
    """By the reader; an engine of a later version may tell of more."""
    with pytest.raises(ValueError, match="15"):
        unpacked(15)


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        (Op.ALL_REDUCE, 150.0),
        (Op.ALL_GATHER, 300.0),
        (Op.REDUCE_SCATTER, 75.0),
        (Op.ALL_TO_ALL, 75.0),
        (Op.BROADCAST, 100.0),
        (Op.SEND, 100.0),
    ],
)
def test_of_a_payload_so_much_is_sent(op, sent):
    """Between four ranks, by the formula sheet."""
    assert Road(op, Axis.DATA, 4).sent_bytes(100.0) == sent


def test_exchanges_of_a_step_are_a_row_for_each_kind(made_up):
    """Payloads summed up, and how long at least one went on; what stages send is one of them."""
    engine, series = made_up(2), Series(1)
    engine.ring.begin_step(7, 1)
    start = engine.now_ns
    road = packed(Op.ALL_REDUCE, Axis.DATA, 4)
    for began, ended in ((0, 4), (2, 5), (9, 10)):
        times = start + began * MS, start + ended * MS
        engine.put(Kind.COLLECTIVE, *times, ident=road, value=100.0)
    engine.put(Kind.COLLECTIVE, ident=15, value=1.0)
    for _ in range(2):
        engine.put(Kind.SEND, value=8.0)
    engine.put(Kind.RECEIVE, value=8.0)
    series.add(2, engine.records())
    table = DetailReader(0.0).read(series, LATER_S * 10, 100)["traffic"]
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    who = {"step": 7, "slot": 2, "generation": 1, "attempt": 0}
    summed, sent = rows
    assert summed == who | {
        "op": Op.ALL_REDUCE,
        "axis": Axis.DATA,
        "ranks": 4,
        "calls": 3,
        "payload_bytes": 300.0,
        "sent_bytes": 450.0,
        "seconds": pytest.approx(0.006),
    }
    assert np.isnan(sent.pop("seconds"))
    assert sent == who | {
        "op": Op.SEND,
        "axis": Axis.PIPELINE,
        "ranks": 2,
        "calls": 2,
        "payload_bytes": 16.0,
        "sent_bytes": 16.0,
    }


def rows(*given):
    """Of a table: (generation, step, slot, axis, payload)."""
    table = {column: np.ones(len(given)) for column in TABLES["traffic"]}
    for name, values in zip(
        ("generation", "step", "slot", "axis", "payload_bytes"),
        zip(*given, strict=True),
        strict=True,
    ):
        table[name] = np.array(values, dtype=np.float64)
    return {"traffic": table}


def test_a_flow_is_the_mean_over_the_newest_steps_of_the_newest_group():
    """What is sent every other step counts half; what an earlier group sent does not count."""
    steps = [(2, step, 0, Axis.DATA, 10.0) for step in range(100)]
    copies = [(2, step, 0, Axis.COPIES, 8.0) for step in range(0, 100, 2)]
    data, kept = flows(rows((1, 300, 0, Axis.DATA, 1e6), *steps, *copies))
    assert (data.payload_bytes, data.calls) == (10.0, 1.0)
    assert (kept.payload_bytes, kept.calls) == (4.0, 0.5)
    changed = [(2, step, 0, Axis.DATA, 10.0 + (step >= 50)) for step in range(50 + NUM_RECENT)]
    assert flows(rows(*changed))[0].payload_bytes == 11.0


def test_a_pipeline_sends_between_its_stages_and_copies():
    """The ranks in the middle most, both ways; bars behind one another, a colour for each kind."""
    story = synthetic_story(PipedRun(length_s=8.0))
    shown = flows(story.tables)
    sent = {f.slot: f.payload_bytes for f in shown if f.road.axis is Axis.PIPELINE}
    assert sent == {0: 8 * SENT_BYTES, 1: 16 * SENT_BYTES, 2: 16 * SENT_BYTES, 3: 8 * SENT_BYTES}
    assert "Slot 1 sends most" in sentence(shown)
    drawn = lanes(story, "traffic")
    assert drawn.sentence == sentence(shown)
    first, second = (bar for bar in drawn.bars if bar.lane == 1)
    assert (first.began, first.ended) == (0.0, pytest.approx(16 * SENT_BYTES / 2**20))
    assert second.began == first.ended
    assert second.colour == road_colour(Road(Op.SEND, Axis.COPIES, 2)) != first.colour


def test_the_sentence_has_the_formula():
    """And the payload, and how fast it went."""
    said = sentence(flows(synthetic_story().tables))
    payload = NUM_BUCKETS * BUCKET_BYTES
    assert f"all-reduce, data: {payload / 2**20:.1f} MiB × 2(n−1)/n with n = 4" in said
    assert f"{payload * 1.5 / 0.03 / 2**20:,.0f} MiB/s" in said
