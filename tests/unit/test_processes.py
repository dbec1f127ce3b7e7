"""Processes of a cluster: how they are started, and that ending them is bounded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from nbdist import processes
from nbdist.config import ClusterConfig
from nbdist.processes import RUNDIR_VARIABLE, end_processes, processes_by_rundir, spawn
from nbdist.rundir import Owner, RunDir, Surroundings


@pytest.fixture
def rundir(monkeypatch):
    """The directory of a cluster, in a folder of our own."""
    folder = tempfile.mkdtemp(prefix="nb-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield RunDir.create(ClusterConfig(num_engines=1), Owner.this())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started(monkeypatch):
    """What would be started: command and options, once each."""
    calls = []

    class Popen:
        def __init__(self, command, **options):
            calls.append((command, {**options, "log": Path(options["stdout"].name)}))

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return calls


def test_a_process_is_one_of_our_modules_for_the_directory(rundir, started):
    """Our own interpreter, the module, the directory, then the arguments; no shell."""
    spawn(rundir, "nbdist.engine", "slot-0", "0", "4")
    ((command, options),) = started
    assert command == [sys.executable, "-m", "nbdist.engine", str(rundir.path), "0", "4"]
    assert options["log"] == rundir.log("slot-0")
    assert options["stderr"] is options["stdout"]
    assert options["stdin"] == subprocess.DEVNULL


def test_a_process_has_a_session_of_its_own(rundir, started):
    """Signals to the notebook's process group do not reach it."""
    spawn(rundir, "nbdist.supervisor", "supervisor")
    assert started[0][1]["start_new_session"]


def test_a_process_has_the_surroundings_of_the_start(rundir, started):
    """The environment of the notebook, its search path, and the directory, by which it is found."""
    around = Surroundings(cwd="/work", path=("", "/a"), env={"A": "1", "PYTHONPATH": "/old"})
    spawn(rundir, "nbdist.engine", "slot-0", surroundings=around)
    spawn(rundir, "nbdist.supervisor", "supervisor")
    first, second = (options["env"] for _, options in started)
    assert first == {
        "A": "1",
        "PYTHONPATH": f"/work{os.pathsep}/a",
        RUNDIR_VARIABLE: str(rundir.path),
    }
    assert second["PATH"] == os.environ["PATH"]
    assert second[RUNDIR_VARIABLE] == str(rundir.path)


def test_what_a_process_says_is_added_to_its_log(rundir):
    """Output and errors go to the log of its name, after what stands there."""
    rundir.log("check").write_text("before\n")
    process = spawn(rundir, "json.tool", "check")
    assert process.wait(20) != 0
    text = rundir.log("check").read_text()
    assert text.startswith("before\n")
    assert len(text) > len("before\n")


def test_the_caller_and_its_parents_are_never_named(rundir, monkeypatch):
    """Even with the directory on its own command line and in its environment."""
    monkeypatch.setattr(psutil.Process, "environ", lambda _: {RUNDIR_VARIABLE: str(rundir.path)})
    this = psutil.Process()
    found = {p.pid for p in processes_by_rundir().get(rundir.path, [])}
    assert found.isdisjoint({this.pid, *(p.pid for p in this.parents())})


class Stubborn:
    """A process that does not end before it was asked so often."""

    def __init__(self, pid, asked=0):
        self.pid, self.asked = pid, asked

    def kill(self):
        self.asked -= 1


@pytest.fixture
def crowd(monkeypatch):
    """Processes of a directory that end when they are killed often enough."""
    path, crowd = Path("/nowhere"), []

    def alive():
        return {path: [p for p in crowd if p.asked >= 0]} if crowd else {}

    monkeypatch.setattr(processes, "processes_by_rundir", alive)
    monkeypatch.setattr(
        psutil, "wait_procs", lambda found, timeout: ([p for p in found if p.asked < 0], [])
    )
    return path, crowd


def test_processes_are_ended_until_none_is_left(crowd):
    """One that the first round does not end is ended by the next."""
    path, processes_there = crowd
    processes_there += [Stubborn(7), Stubborn(5, asked=2)]
    ended = end_processes(path)
    assert (ended.pids, ended.left) == ((5, 7), ())


def test_the_end_is_bounded(crowd):
    """What is still there at the deadline is named."""
    path, processes_there = crowd
    processes_there += [Stubborn(7), Stubborn(5, asked=10**9)]
    ended = end_processes(path, timeout_s=0.01)
    assert (ended.pids, ended.left) == ((7,), (5,))


def test_nothing_to_end_is_no_error(crowd):
    """An empty directory is done at once."""
    assert end_processes(crowd[0]).pids == ()


def test_a_process_that_ends_by_itself_meanwhile_is_no_error(crowd):
    """Between look and signal it may be gone, or not be ours to end."""
    path, processes_there = crowd

    class Fleeting(Stubborn):
        def kill(self):
            self.asked -= 1
            raise psutil.NoSuchProcess(self.pid)

    processes_there.append(Fleeting(9))
    assert end_processes(path).left == ()
