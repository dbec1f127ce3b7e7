"""The main job against stand-ins for cluster and runs: what it shows, and what it finds wrong."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nbdist
from nbdist.cli import main, main_job, transcript
from nbdist.cli.incidents import incident_table
from nbdist.cli.progress import progress
from nbdist.cli.transcript import Transcript
from nbdist.cli.verdicts import (
    Expected,
    Fault,
    loss_check,
    record_check,
    replicas_check,
    run_checks,
)
from nbdist.config import ClusterConfig
from nbdist.errors import CellFailed, StartFailed
from nbdist.gpus import Gpus
from nbdist.protocol.events import Incident
from nbdist.protocol.story import ROWS, RunStory
from nbdist.rundir import Owner, RunDir, runtime_root
from nbdist.supervisor.record import Recorder
from nbdist.views.facts import Check

FAULTS = (
    Fault(step=20, rank=0, signal="KILL", kind="lost"),
    Fault(step=40, rank=1, signal="STOP", kind="hung"),
)
EXPECTED = Expected(num_engines=4, num_steps=60, global_batch=16, loss_below=3.0)


def make_rows(num_steps=60):
    rows = np.zeros(num_steps, ROWS)
    rows["step"] = np.arange(num_steps)
    rows["loss"] = 2.5 + 3 * np.exp(-rows["step"] / 10)
    rows["samples"], rows["seconds"], rows["lr"] = 16, 0.25, 1e-3
    rows["generation"], rows["world_size"] = 1, 4
    rows["at"] = 100 + np.cumsum(rows["seconds"])
    return rows


def make_incident(kind, rank, step=20, **more):
    fields = {"kind": kind, "slots": (rank,), "ranks": (rank,), "cause": "user", "step": step}
    return Incident(**(fields | {"generation_before": 1, "generation_after": 2} | more))


INCIDENTS = [make_incident("lost", 0), make_incident("hung", 1, step=40)]


def make_story(rows=None, incidents=INCIDENTS):
    return RunStory(
        title="a run", rows=make_rows() if rows is None else rows, incidents=list(incidents)
    )


def changed(name, index, value):
    rows = make_rows()
    rows[name][index] = value
    return rows


# ---- one line on how far it is


def columns_of(rows):
    return {name: rows[name] for name in ROWS.names}


def how_far(rows, **more):
    options = {"num_steps": 60, "tokens_per_sample": 128, "world_size": 4, "generation": 3}
    return progress(columns_of(rows), **(options | {"state": "running"} | more))


def test_the_line_tells_step_loss_throughput_world_and_time_left():
    """Tokens of one rank: those of the batch, over the seconds, over the ranks."""
    line = str(how_far(make_rows(23)))
    assert line == (
        "step 23/60  loss 2.832  2,048 tokens/s per rank  world 4  generation 3  ETA 9 s"
    )


def test_the_line_says_when_it_is_not_simply_running():
    """Paused, recovering or over."""
    assert str(how_far(make_rows(60), state="finished")).endswith("ETA 0 s  finished")


def test_before_the_first_step_there_are_dashes():
    """Nothing is known, and nothing is made up."""
    line = str(how_far(make_rows(0)))
    assert line == "step  0/60  loss –  – tokens/s per rank  world 4  generation 3  ETA –"


def test_a_stall_lowers_the_throughput_and_not_the_pace():
    """The time left is told from the median step; throughput looks three seconds back."""
    rows = make_rows(30)
    rows["seconds"][25] = 5.25
    seen = how_far(rows)
    assert seen.left_s == pytest.approx(30 * 0.25)
    assert seen.tokens_per_second == pytest.approx(5 * 16 * 128 / (5.25 + 4 * 0.25) / 4)


def test_throughput_is_weighted_by_the_ranks_that_were_there():
    """Three ranks do more each than four."""
    rows = make_rows(12)
    rows["world_size"] = 3
    assert how_far(rows).tokens_per_second == pytest.approx(16 * 128 / 0.25 / 3)


# ---- what is printed


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(transcript, "_is_terminal", lambda: True)
    size = SimpleNamespace(columns=20)
    monkeypatch.setattr(transcript.shutil, "get_terminal_size", lambda: size)


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_the_live_line_is_written_over(capsys):
    """It is cut to the width, and what follows begins on a line of its own."""
    told = Transcript()
    told.live("step 1")
    told.live("step 2 of a very long line")
    told.say("rank 0 is killed")
    out = capsys.readouterr().out
    assert out == "\r\x1b[2K  step 1\r\x1b[2K  step 2 of a very \n  rank 0 is killed\n"


def test_elsewhere_the_live_line_is_a_plain_line(capsys):
    """No control characters in a file or a pipe."""
    told = Transcript()
    told.live("step 1")
    told.live("step 2")
    assert capsys.readouterr().out == "  step 1\n  step 2\n"


def test_the_verdict_counts_the_checks(capsys):
    """Exit code 1, and the names of those that failed, where one did."""
    told = Transcript()
    told.check(Check(name="good", holds=True))
    assert told.close() == 0
    told.check(Check(name="bad", holds=False, detail="why"))
    assert told.close() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  ok      good" in lines
    assert "  FAILED  bad: why" in lines
    assert "All 1 checks hold, in 0 s." in lines
    assert lines[-2:] == ["1 of 2 checks FAILED, in 0 s:", "  bad"]


def test_incidents_are_a_line_each_and_say_what_is_lacking():
    """All parts stand in their columns; what was not restored stands below."""
    lines = incident_table(
        [
            make_incident("lost", 2, detect_s=0.013, steps_repeated=1, samples_lost=3),
            make_incident("joined", 2, step=None, not_restored={"f": "an open file"}),
        ]
    ).splitlines()
    assert lines[1].split() == [
        *("lost", "2", "2", "user", "20", "1", "→", "2", "13", "–", "–", "–", "1", "3/0")
    ]
    assert lines[2].split()[4] == "–"
    assert lines[3] == "not restored: f (an open file)"


# ---- what must be true


def failed(checks):
    return [check.name for check in checks if not check.holds]


def test_a_run_without_a_flaw_passes():
    """Steps, samples, loss and incidents are as they must be."""
    assert failed(run_checks(make_story(), EXPECTED, FAULTS)) == []


@pytest.mark.parametrize(
    ("story", "names"),
    [
        (make_story(make_rows(59)), ["every step that was asked for", "every sample"]),
        (make_story(changed("samples", 5, 15)), ["every sample was trained on once"]),
        (make_story(changed("loss", slice(50, None), 3.1)), ["the loss fell below 3"]),
        (make_story(incidents=INCIDENTS[:1]), ["SIGSTOP of rank 1 is on record"]),
        (
            make_story(incidents=[make_incident("lost", 0), make_incident("lost", 1)]),
            ["SIGSTOP of rank 1 is on record"],
        ),
        (
            make_story(make_rows(0), INCIDENTS),
            ["steps were", "every step", "every sample", "the loss fell"],
        ),
    ],
)
def test_each_flaw_of_a_run_is_seen(story, names):
    """By its own check, and by no other."""
    found = failed(run_checks(story, EXPECTED, FAULTS))
    assert len(found) == len(names)
    assert all(name.startswith(start) for name, start in zip(found, names, strict=True))


def test_a_short_run_is_not_asked_for_a_low_loss():
    """A few steps do not get there."""
    rows = make_rows(24)
    rows["loss"] = 5.0
    expected = replace(EXPECTED, num_steps=24, loss_below=None)
    assert failed(run_checks(make_story(rows), expected, FAULTS)) == []


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        (make_rows(), True),
        (changed("loss", 30, make_rows()["loss"][30] * (1 + 0.9e-5)), True),
        (changed("loss", 30, make_rows()["loss"][30] * (1 + 1.1e-5)), False),
        (changed("loss", 30, math.nan), False),
        (make_rows(59), False),
        (make_rows(0), False),
    ],
)
def test_losses_may_differ_by_rounding_only(rows, holds):
    """At every step, not at the last alone; fewer steps are not the same run."""
    check = loss_check(make_story(rows), make_story())
    assert check.holds is holds
    if len(rows) == 60 and not holds:
        assert "at step 30" in check.detail


def test_two_empty_runs_are_no_evidence():
    """Nothing beside nothing proves nothing."""
    assert not loss_check(make_story(make_rows(0)), make_story(make_rows(0))).holds


@pytest.mark.parametrize(
    ("digests", "holds"),
    [
        (dict.fromkeys(range(4), "abc"), True),
        ({**dict.fromkeys(range(3), "abc"), 3: "xyz"}, False),
        (dict.fromkeys(range(3), "abc"), False),
        ({}, False),
    ],
)
def test_replicas_are_equal_where_all_ranks_have_one_digest(digests, holds):
    """A rank that is missing is not equal."""
    assert replicas_check(digests, 4).holds is holds


def test_the_record_must_have_every_row():
    """A step that is missing, or a loss that differs, is seen."""
    assert record_check(make_story(), make_story()).holds
    assert not record_check(make_story(), make_story(make_rows(59))).holds
    assert not record_check(make_story(), make_story(changed("loss", 3, 1.0))).holds


# ---- all of it


class FakeRun:
    """Commits a step each time somebody looks."""

    def __init__(self, cluster, name, num_steps):
        self.id, self.cluster, self.name = f"run-{name}", cluster, name
        self.rows, self.num_committed = make_rows(num_steps), 0
        self.incidents = []
        if cluster.flaw == f"loss of {name}":
            self.rows["loss"] += 0.01
        if cluster.flaw == f"samples of {name}":
            self.rows["samples"][-1] = 15

    @property
    def state(self):
        if self.cluster.flaw == f"failure of {self.name}" and self.num_committed >= 10:
            return "failed"
        return "finished" if self.num_committed == len(self.rows) else "running"

    @property
    def history(self):
        if self.state == "running":
            self.num_committed += 1
        return columns_of(self.rows[: self.num_committed])

    def wait(self, timeout):
        assert timeout > 0
        if self.state == "failed":
            raise CellFailed("ValueError: no data")
        return self

    def story(self):
        return make_story(self.rows[: self.num_committed], self.incidents)


class FakeCluster:
    """Answers as four engines would; `flaw` is what goes wrong."""

    warnings = ()
    world_size = 4
    generation = 1

    def __init__(self, rundir, folder, flaw):
        self.rundir, self.folder, self.flaw = rundir, Path(folder), flaw
        self.cells, self.kills, self.run_going = [], [], None
        self.is_shut_down = False

    @property
    def id(self):
        return self.rundir.cluster_id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()

    def status(self):
        fields = {"device": "cpu", "state": "member", "generation": self.generation}
        return [SimpleNamespace(rank=r, slot=r, pid=100 + r, **fields) for r in range(4)]

    def run(self, code):
        self.cells.append(code)

    def train(self, name, *, steps):
        self.run_going = FakeRun(self, name, steps)
        if self.flaw != "record":
            path = self.folder / f"{self.id}-{self.run_going.id}.jsonl"
            recorder = Recorder(path, title=name)
            num = 10 if self.flaw == f"failure of {name}" else steps
            recorder.steps(self.run_going.rows[: num - (self.flaw == "short record")])
            recorder.close("finished")
        return self.run_going

    def kill(self, rank, *, signal):
        self.kills.append((rank, signal, self.run_going.num_committed))
        if self.flaw != "no incident":
            kind = "lost" if signal == "KILL" else "hung"
            self.run_going.incidents.append(make_incident(kind, rank))

    def wait_healthy(self, *, timeout):
        assert timeout > 0

    def parameter_digest(self, name):
        assert name == "trainer"
        return {rank: f"digest{rank if self.flaw == 'digest' else ''}" for rank in range(4)}

    def shutdown(self):
        self.is_shut_down = True
        with contextlib.suppress(FileNotFoundError):
            self.rundir.remove()


@pytest.fixture
def play(monkeypatch, tmp_path, capsys):
    """Plays the demo with a flaw; returns the exit code, the failed checks, all lines, cluster."""
    made = []

    def start(num_engines, *, hang_timeout_s, record):
        assert (num_engines, hang_timeout_s) == (4, 2.0)
        if made and made[0] == "start":
            raise StartFailed("the controller did not come up")
        rundir = RunDir.create(ClusterConfig(num_engines=num_engines), Owner.this())
        made.append(FakeCluster(rundir, record, made.pop()))
        return made[0]

    def processes():
        cluster = made[0]
        left = [SimpleNamespace(pid=7)] if cluster.flaw == "left" else []
        path = runtime_root() / cluster.id
        return {path: left if cluster.is_shut_down else [SimpleNamespace(pid=7)] * 5}

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(nbdist, "start", start)
    monkeypatch.setattr(main_job, "count_gpus", lambda: Gpus(reason="none"))
    monkeypatch.setattr(main_job, "processes_by_rundir", processes)
    monkeypatch.setattr(main_job, "_GONE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(main_job, "_LOOK_S", 0.0)

    def go(flaw=""):
        made[:] = [flaw]
        code = main(["demo", "--report", str(tmp_path / "report.html")])
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        failed = [line.removeprefix("FAILED").strip() for line in lines if line.startswith("FAI")]
        return SimpleNamespace(code=code, failed=failed, lines=lines, cluster=made[0])

    return go


def test_the_demo_tells_the_whole_story(play, tmp_path):
    """All checks hold, each fault comes at its step, report and record are where it says."""
    told = play()
    assert (told.code, told.failed) == (0, [])
    assert told.cluster.kills == [(0, "KILL", 20), (1, "STOP", 40)]
    text = "\n".join(told.lines)
    assert "SIGKILL to rank 0, pid 100, after 20 steps" in text
    assert "step 60/60  loss 2.508" in text
    assert f"report: {tmp_path}/report.html (opens offline)" in text
    assert f"record: {tmp_path}/report.jsonl" in text
    assert told.lines[-1].startswith("All ")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "replicas are equal bit for bit" in page
    assert page.count("no sample is lost or repeated") == 1
    assert "the same run, undisturbed" in page


@pytest.mark.parametrize(
    ("flaw", "checks"),
    [
        ("start", ["the demo ran to its end: StartFailed: the controller did not"]),
        ("failure of trainer", ["the demo ran to its end: CellFailed: ValueError: no data"]),
        ("failure of undisturbed", ["the demo ran to its end: CellFailed"]),
        ("no incident", ["SIGKILL of rank 0 is on record", "SIGSTOP of rank 1 is on record"]),
        ("samples of trainer", ["every sample was trained on once: 959 of 960"]),
        ("digest", ["replicas are equal bit for bit: 4 ranks: digest0…, digest1…"]),
        ("loss of undisturbed", ["the loss is that of the undisturbed run"]),
        ("left", ["no process of the cluster is left: pid 7"]),
        ("record", ["the run was recorded: 0 file"]),
        ("short record", ["the record on disk holds every step: 59 of 60"]),
    ],
)
def test_the_demo_fails_where_a_check_does_not_hold(play, flaw, checks):
    """Each flaw is seen by its own check, and the exit code is 1."""
    told = play(flaw)
    assert told.code == 1
    assert len(told.failed) == len(checks)
    for line, check in zip(told.failed, checks, strict=True):
        assert line.startswith(check)


def test_a_run_that_fails_has_a_report_of_what_there_was(play, tmp_path):
    """The steps before the failure are in it."""
    told = play("failure of trainer")
    assert told.cluster.is_shut_down
    assert "10 steps" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["-n", "1"], ["--steps", "3"], ["--steps", "many"]])
def test_a_demo_that_shows_nothing_is_refused(words, capsys):
    """The error says how many it needs."""
    with pytest.raises(SystemExit):
        main(["demo", *words])
    assert "or more" in capsys.readouterr().err


def test_the_demo_uses_the_cpu_where_gpus_are_too_few(monkeypatch, capsys):
    """One GPU does not do for four engines, and it says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for names, visible in ((("0",) * 4, "0"), (("0",), "")):
        monkeypatch.setattr(main_job, "count_gpus", lambda names=names: Gpus(names=names))
        main_job.use_cpu_if_gpus_are_few(4, Transcript())
        assert main_job.os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert "all use the CPU" in capsys.readouterr().out
