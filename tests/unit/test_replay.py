"""`nbdist replay`: a run as its record tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nbdist import cli
from nbdist.cli.seconds import lines
from nbdist.protocol.columns import to_columns
from nbdist.protocol.events import Incident
from nbdist.protocol.ids import Generation
from nbdist.protocol.orders import WorldView
from nbdist.protocol.record import Ended, Happened, Header, Remark, Steps, World, encoded
from nbdist.protocol.story import ROWS
from nbdist.protocol.topology import EMPTY
from nbdist.supervisor.record import Recorder
from nbdist.supervisor.replay import Replay
from nbdist.views import report


def replay_of(*ats, tokens=None, worlds=()):
    """A run that committed a step at each of these times, on four ranks."""
    rows = np.zeros(len(ats), ROWS)
    rows["step"], rows["at"] = np.arange(len(ats)), 100 + np.array(ats, dtype=float)
    rows["loss"], rows["samples"], rows["world_size"], rows["generation"] = 2.5, 64, 4, 1
    header = Header(schema=1, title="", at=100.0, started="", nbdist="")
    return Replay(header=header, rows=rows, tokens=tokens or {}, worlds=list(worlds))


def world(at, phase, generation, slots, reason=""):
    return World(
        at=100.0 + at,
        phase=phase,
        generation=Generation(generation),
        slots=slots,
        healthy=True,
        reason=reason,
    )


def running(incidents):
    return WorldView(
        phase="running",
        membership=EMPTY,
        seats=(),
        size=3,
        num_formed=3,
        healthy=True,
        reason="",
        incidents=incidents,
    )


def words(line):
    return " ".join(line.split())


def test_each_second_has_a_line():
    """With the steps committed so far, the loss, what each rank did, and the world."""
    first, second = map(words, lines(replay_of(0.1, 0.6, 1.2)))
    assert first == "0 s step 2 loss 2.5000 32 samples/s per rank world 4 generation 1"
    assert second == "1 s step 3 loss 2.5000 16 samples/s per rank world 4 generation 1"


def test_tokens_are_shown_where_a_run_counts_them():
    """Those of all ranks, divided by their number."""
    (line,) = lines(replay_of(0.5, tokens={0: 8_192.0}))
    assert "2,048 tokens/s per rank" in line


def test_a_second_without_a_step_says_what_the_world_was():
    """The reason for a stall, not only the stall."""
    worlds = [world(0.0, "running", 1, (0, 1)), world(1.1, "forming", 2, (0,), "rank 1 is gone")]
    _, idle, _ = map(words, lines(replay_of(0.5, 2.5, worlds=worlds)))
    assert idle == "1 s no step; forming (rank 1 is gone), world 1, generation 2"


def test_a_long_time_without_a_step_is_one_line():
    """An hour's pause is not 3,600 lines."""
    first, idle, last = map(words, lines(replay_of(0.5, 3_600.5)))
    assert first.startswith("0 s step 1")
    assert last.startswith("3600 s step 2")
    assert idle == "1 s to 3599 s: no step"


def test_a_run_without_a_step_has_no_lines():
    """Nothing was committed."""
    assert list(lines(replay_of())) == []


@pytest.fixture
def record(tmp_path):
    """The file of a small run with an incident."""
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, title="a small run")
    row = np.zeros(1, ROWS)
    row["at"] = 1e9
    recorder.steps(row)
    incident = Incident(
        kind="lost", slots=(2,), ranks=(2,), cause="SIGKILL", generation_before=1, stall_s=0.15
    )
    with path.open("ab") as file:
        file.write(msgspec.json.encode(Happened(incident=incident)) + b"\n")
    recorder.close("finished")
    return path


def test_the_command_prints_run_incidents_and_notes(record, capsys):
    """In this order, and ends well."""
    assert cli.main(["replay", str(record)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a small run, begun 20")
    assert "ended: finished" in out
    assert "lost" in out.split("ended: finished")[1]
    assert "150" in out
    assert "note:" not in out


def test_who_stops_reading_ends_the_command_quietly(record):
    """As in `nbdist replay RUN.jsonl | head -1`: no traceback, and the status of a broken pipe."""
    code = f"import sys; from nbdist.cli import main; sys.exit(main(['replay', {str(record)!r}]))"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


STEERING = "\x1b]0;x\x07\r\x1b[2J\x9b1m\n\u202e\u2028"


def test_no_text_of_a_record_steers_the_terminal(tmp_path, capsys):
    """Wherever it stands in the file: control characters are written as Python writes them."""
    path = tmp_path / "run.jsonl"
    header = Header(schema=1, title=f"t{STEERING}", at=100.0, started=f"s{STEERING}", nbdist="")
    row = np.zeros(1, ROWS)
    row["at"] = 102.5
    incident = Incident(
        kind="lost",
        slots=(2,),
        ranks=(2,),
        cause=f"c{STEERING}",
        generation_before=1,
        not_restored={f"n{STEERING}": f"w{STEERING}"},
    )
    told = [
        header,
        world(0.5, f"p{STEERING}", 1, (0,), reason=f"r{STEERING}"),
        Steps(num=1, columns=to_columns(row)),
        Happened(incident=incident),
        Remark(text=f"m{STEERING}"),
        Ended(at=103.0, how=f"h{STEERING}"),
    ]
    path.write_bytes(b"".join(map(encoded, told)))
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    for place in "tspcrnwmh":
        assert f"{place}\\x1b]0;x\\x07\\r" in out
    path.write_bytes(encoded(header).replace(b'"at":100.0', b'"at":"\\u001b[2J"'))
    assert cli.main(["replay", str(path)]) == 1
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def test_two_ranks_that_are_lost_together_are_two_incidents(tmp_path, capsys):
    """Each with a line; that no step was there from which a stall counts is a dash."""
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, title="two")
    lost = [
        Incident(kind="lost", slots=(s,), ranks=(s,), cause="SIGKILL", generation_before=1)
        for s in (1, 2)
    ]
    recorder.world(running(incidents=tuple(lost)), 1.0)
    for incident in lost:
        incident.generation_after = 2
    recorder.world(running(incidents=tuple(lost)), 2.0)
    recorder.close("finished")
    assert cli.main(["replay", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows if row[:1] == ["lost"]] == [
        ["lost", "1", "1", "SIGKILL"],
        ["lost", "2", "2", "SIGKILL"],
    ]
    assert all(row[-3] == "–" for row in rows if row[:1] == ["lost"])


def test_a_report_is_written_where_one_is_wanted(record, tmp_path, monkeypatch, capsys):
    """By whoever draws reports, from the run's story and with its record."""
    written = []

    def write(path, story, *, record):
        written.append((story.title, record))
        return path

    monkeypatch.setattr(report, "write_report", write)
    out = tmp_path / "run.html"
    assert cli.main(["replay", str(record), "--report", str(out)]) == 0
    assert written == [("a small run", record)]
    assert f"report: {out}" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, b"hello"])
def test_a_file_that_is_no_record_fails(tmp_path, capsys, text):
    """Exit code 1, and the file is named."""
    path = tmp_path / "no.jsonl"
    if text is not None:
        path.write_bytes(text)
    assert cli.main(["replay", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
