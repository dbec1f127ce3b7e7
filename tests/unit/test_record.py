"""A run's record: what is written is read again, whatever became of its writer or its disk."""

from __future__ import annotations

import errno
import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from stories import synthetic_story

from nbdist.errors import RecordUnreadable
from nbdist.protocol.events import Incident
from nbdist.protocol.orders import WorldView
from nbdist.protocol.record import SCHEMA, story_lines
from nbdist.protocol.story import ROWS, Evaluation
from nbdist.protocol.tables import STATES
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor.collector import Collector
from nbdist.supervisor.record import Recorder
from nbdist.supervisor.replay import read
from nbdist.supervisor.series import Series
from nbdist.views.playback import story_frame

LOST = Incident(kind="lost", slots=(1,), ranks=(1,), cause="SIGKILL", generation_before=1, step=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def rows(*steps, loss=2.0, at=0.0):
    out = np.zeros(len(steps), ROWS)
    out["step"], out["loss"], out["samples"], out["world_size"] = steps, loss, 64, 4
    out["at"] = at
    return out


def view(generation=1, phase="running", incidents=(), slots=(0, 1)):
    members = tuple(Member(slot=s, engine_id=s, pid=s, host="") for s in slots)
    return WorldView(
        phase=phase,
        membership=Membership(generation=generation, members=members),
        seats=(),
        size=2,
        num_formed=2,
        healthy=True,
        reason="",
        incidents=incidents,
    )


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def notes(path):
    return "; ".join(read(path).notes)


def test_a_whole_run_is_read_as_it_was_written(path, made_up):
    """Title, steps, incidents as they ended, evaluations, worlds, and series like the live ones."""
    live = Collector(Series(max_mb=5))
    live.recorder = recorder = Recorder(path, title="GPT on 2 engines")
    recorder.world(view(), 1.0)
    for slot in (0, 1):
        engine = made_up(slot)
        for step in range(20):
            engine.step(step, loss=3 - step / 10, tail_ms=1 + step)
            live.take(engine.batch(), 1)
    recorder.steps(rows(0, 1, 2))
    recorder.world(view(phase="breaking", incidents=(LOST,)), 2.0)
    ended = msgspec.structs.replace(LOST, generation_after=2, stall_s=0.125)
    recorder.world(view(generation=2, incidents=(ended,), slots=(0,)), 3.0)
    recorder.evaluation(Evaluation(step=3, at=4.0, metrics={"accuracy": 0.5}))
    recorder.remark("lr was changed")
    recorder.close("finished")

    replay = read(path)
    story = replay.story()
    assert story.title == "GPT on 2 engines"
    np.testing.assert_array_equal(story.rows, rows(0, 1, 2))
    assert story.incidents == [ended]
    assert story.evaluations == [Evaluation(step=3, at=4.0, metrics={"accuracy": 0.5})]
    assert story.notes == ["lr was changed"]
    assert [(w.phase, w.generation, w.slots) for w in replay.worlds] == [
        ("running", 1, (0, 1)),
        ("breaking", 1, (0, 1)),
        ("running", 2, (0,)),
    ]
    assert replay.ended.how == "finished"
    assert story.series.keys() == {0, 1}
    for slot, curves in story.series.items():
        assert curves.keys() == live.series.curves(slot).keys()
        for name, curve in curves.items():
            np.testing.assert_array_equal(curve, live.series.curves(slot)[name])
        for one, other in zip(
            replay.series.last_steps(slot), live.series.last_steps(slot), strict=True
        ):
            np.testing.assert_array_equal(one.records, other.records)


def test_what_slots_did_is_kept_for_the_last_steps_and_the_worst(path, made_up):
    """Of 100 steps buckets and spans of the last 50 and of the 20 with the longest tails before
    them, oldest first; of all steps how long they took; who was in the group when."""
    collector = Collector(Series(max_mb=5))
    collector.recorder = recorder = Recorder(path, title="")
    recorder.world(view(), 1.0)
    for slot in (0, 1):
        engine = made_up(slot)
        for step in range(100):
            engine.step(step, tail_ms=9 if step == 7 else 1 + step / 1000)
            engine.put(Kind.MEMORY_RSS, value=5e8)
            collector.take(engine.batch(), 1)
    recorder.world(view(generation=2, slots=(0,)), 3.0)
    recorder.close("finished")
    story = read(path).story()
    assert story.state == "finished"
    tables = story.tables
    kept = [7, *range(31, 50), *range(50, 100)]
    for name in ("buckets", "spans"):
        assert np.unique(tables[name]["step"]).tolist() == kept
        assert (np.diff(tables[name]["step"]) >= 0).all()
    assert len(tables["buckets"]["step"]) == len(kept) * 2 * 2
    assert sorted(tables["steps"]["step"]) == sorted([*range(100)] * 2)
    assert set(tables["memory"]["bytes"]) == {5e8}
    assert set(tables["memory"]["kind"]) == {Kind.MEMORY_RSS}
    assert tables["seats"]["slot"].tolist() == [0, 1, 0, 1]
    assert [STATES[int(state)] for state in tables["seats"]["state"]] == [
        *("member", "member", "member", "empty")
    ]
    assert tables["phases"]["world_size"].tolist() == [2, 1]


@pytest.mark.parametrize("packs", [bytes, gzip.compress])
def test_a_story_is_a_record_too(path, packs):
    """What its lines say is the same story; a report saves them, packed or not."""
    story = replace(synthetic_story(), notes=["a note"], state="failed", fault="ValueError: no")
    path.write_bytes(packs(story_lines(story, nbdist="1")))
    again = read(path).story()
    np.testing.assert_array_equal(again.rows, story.rows)
    assert (again.title, again.incidents, again.notes) == (
        *(story.title, story.incidents, story.notes),
    )
    assert (again.state, again.fault) == (story.state, story.fault)
    assert again.tables.keys() == story.tables.keys()
    for name, table in story.tables.items():
        for column, values in table.items():
            np.testing.assert_array_equal(again.tables[name][column], values)
    assert again.series.keys() == story.series.keys()
    assert story_frame(again) == story_frame(story)


def test_a_packed_record_that_is_cut_short_is_refused(path):
    """It says so, and names the file."""
    path.write_bytes(gzip.compress(b"x" * 1000)[:-12])
    with pytest.raises(RecordUnreadable, match=str(path)):
        read(path)


def test_only_what_changes_is_written(path):
    """A world like the one before adds no line."""
    recorder = Recorder(path, title="")
    for at in range(5):
        recorder.world(view(incidents=(LOST,)), at)
    assert [line["type"] for line in lines(path)] == ["Header", "World", "Happened"]
    recorder.steps(rows())
    assert len(lines(path)) == 3


def test_numbers_that_json_lacks_survive(path):
    """A loss that is nan or infinite is told from one that is missing."""
    losses = [float("nan"), float("inf"), float("-inf")]
    Recorder(path, title="").steps(rows(0, 1, 2, loss=losses))
    np.testing.assert_array_equal(read(path).rows["loss"], losses)


def test_a_step_that_was_committed_again_counts_once(path):
    """As it was committed last, in its place of the second time."""
    recorder = Recorder(path, title="")
    recorder.steps(rows(0, 1, 2))
    recorder.steps(rows(2, 3, loss=1.0))
    found = read(path).rows
    assert found["step"].tolist() == [0, 1, 2, 3]
    assert found["loss"].tolist() == [2.0, 2.0, 1.0, 1.0]


def test_tokens_are_counted_by_second(path, made_up):
    """Of all ranks together, exactly, from the beginning of the record."""
    collector = Collector(Series(max_mb=1))
    collector.recorder = Recorder(path, title="")
    begun_ns = int(lines(path)[0]["at"] * 1e9)
    for slot in (0, 1):
        engine = made_up(slot, now_ns=begun_ns + 500_000_000)
        for _ in range(3):
            engine.put(Kind.TOKENS, value=100)
            engine.now_ns += 1_000_000_000
        collector.take(engine.batch(), 1)
    assert read(path).tokens == {0: 200, 1: 200, 2: 200}


def test_missing_and_late_records_are_told(path, made_up):
    """Gaps are shown, not hidden."""
    collector = Collector(Series(max_mb=1))
    collector.recorder = Recorder(path, title="")
    engine = made_up()
    for step in range(3):
        engine.step(step)
        batch = engine.batch()
        if step != 1:
            collector.take(batch, 1 + (step > 1))
    num = len(batch.records) // 56
    assert f"telemetry records missing: {num}" in notes(path)
    assert f"telemetry records of a generation that was over: {num}" in notes(path)


# ---- records that are not whole


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_torn_last_line_is_passed_over(path, lost):
    """The writer was killed: all lines before are read, and a line that lacks its end alone too."""
    recorder = Recorder(path, title="")
    recorder.steps(rows(0))
    recorder.steps(rows(1))
    path.write_bytes(path.read_bytes()[:-lost])
    assert read(path).rows["step"].tolist() == ([0, 1] if lost == 1 else [0])
    assert ("the last line is cut short" in notes(path)) == (lost > 1)
    assert "damaged" not in notes(path)
    assert "has no end" in notes(path)


def test_another_supervisor_goes_on_after_a_torn_line(path):
    """What it writes is not spoilt; the reader is told."""
    Recorder(path, title="a").steps(rows(0))
    path.write_bytes(path.read_bytes()[:-5])
    recorder = Recorder(path, title="b", resumes=True)
    recorder.steps(rows(1))
    recorder.close("finished")
    replay = read(path)
    assert (replay.header.title, replay.rows["step"].tolist()) == ("a", [1])
    assert "another supervisor took over" in notes(path)
    assert "damaged lines passed over: 1" in notes(path)


def test_a_record_is_begun_anew_unless_it_is_resumed(path):
    """An older file of that name is gone; one that is not there is begun."""
    Recorder(path, title="a").steps(rows(0))
    Recorder(path, title="b")
    assert [line["title"] for line in lines(path)] == ["b"]
    path.unlink()
    Recorder(path, title="c", resumes=True)
    assert read(path).header.title == "c"


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"Ghost"}',
        b'{"type":"Steps","num":1,"columns":{"step":[1]}}',
        b'{"type":"Batch","slot":0,"pid":1,"num":0,"num_dropped":0,"columns":{}}',
        b'{"type":"Steps","num":"x"}',
        b"\xff\xfe",
        b"[]",
    ],
)
def test_a_damaged_line_is_passed_over(path, line):
    """Unknown, not whole, of another form: the others are read, and it is counted."""
    recorder = Recorder(path, title="")
    with path.open("ab") as file:
        file.write(line + b"\n\n")
    recorder.steps(rows(0))
    assert read(path).rows["step"].tolist() == [0]
    assert "damaged lines passed over: 1" in notes(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not the record of a run"),
        (b"hello\n", "not the record of a run"),
        (b'{"type":"World"}\n', "not the record of a run"),
        (b'{"type":"Header","schema":%d}\n' % (SCHEMA + 1), f"schema {SCHEMA + 1}.*up to"),
        (b'{"type":"Header","schema":%d,"title":1}\n' % SCHEMA, "first line .* damaged"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(path, text, says):
    """With the file's name and what to do."""
    path.write_bytes(text)
    with pytest.raises(RecordUnreadable, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


# ---- bounds


def test_the_file_is_bounded_and_says_so(path, made_up):
    """Telemetry ends first; steps go on until the file is full; the last line says that it is."""
    max_bytes = 40_000
    collector = Collector(Series(max_mb=1))
    collector.recorder = recorder = Recorder(path, title="", max_bytes=max_bytes)
    engine = made_up()
    for step in range(40):
        engine.step(step)
        collector.take(engine.batch(), 1)
    assert path.stat().st_size < max_bytes * 0.76
    assert lines(path)[-1]["text"].startswith("telemetry is left out from here on")
    for step in range(100):
        recorder.steps(rows(step))
    recorder.close("finished")
    assert path.stat().st_size <= max_bytes
    assert lines(path)[-1]["text"].startswith("nothing more is written: the record has reached")
    assert recorder.num_lost == 141 - sum(x["type"] in ("Batch", "Steps") for x in lines(path))
    assert len(read(path).rows) > 10


def test_a_full_disk_costs_lines_and_nothing_else(path, monkeypatch, caplog):
    """It is logged once, counted, and said where the next line is written."""
    recorder = Recorder(path, title="")
    before = path.read_bytes()
    written, opened = [], Path.open

    class Full:
        """A file of which half a line can be written."""

        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def write(self, data):
            written.append(self._file.write(data[: len(data) // 2]))
            self._file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "open", lambda self, mode: Full(opened(self, mode)))
        for step in range(5):
            recorder.steps(rows(step))
    assert (recorder.num_lost, len(written)) == (5, 5)
    assert len(caplog.records) == 1
    assert path.read_bytes() == before
    recorder.steps(rows(5))
    recorder.close("finished")
    assert "for want of room; so far: 5" in notes(path)
    assert "lines that could not be written: 5" in notes(path)
    assert read(path).rows["step"].tolist() == [5]


def test_a_folder_that_cannot_be_written_is_no_end(tmp_path):
    """The run goes on without a record."""
    recorder = Recorder(tmp_path / "absent" / "run.jsonl", title="")
    recorder.steps(rows(0))
    recorder.close("finished")
    assert recorder.num_lost == 3
