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
from nbdist.processes import (
    RUNDIR_VARIABLE,
    end_processes,
    module_environment,
    processes_by_rundir,
    rundir_in,
    rundir_of,
    spawn,
)
from nbdist.rundir import Owner, RunDir, Surroundings, runtime_root


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
    """Our own interpreter without the present folder, the module, the directory; no shell."""
    spawn(rundir, "nbdist.supervisor", "supervisor")
    ((command, options),) = started
    assert command == [sys.executable, "-P", "-m", "nbdist.supervisor", str(rundir.path)]
    assert options["log"] == rundir.log("supervisor")
    assert options["stderr"] is options["stdout"]
    assert options["stdin"] == subprocess.DEVNULL


def test_a_process_has_a_session_of_its_own(rundir, started):
    """Signals to the notebook's process group do not reach it."""
    spawn(rundir, "nbdist.supervisor", "supervisor")
    assert started[0][1]["start_new_session"]


def test_a_process_has_the_surroundings_of_the_start(rundir, started):
    """The environment of the notebook, and the directory, by which it is found."""
    spawn(rundir, "nbdist.supervisor", "supervisor")
    env = started[0][1]["env"]
    assert env["PATH"] == os.environ["PATH"]
    assert env[RUNDIR_VARIABLE] == str(rundir.path)


@pytest.mark.parametrize("own", [None, "", "/theirs", f"/a{os.pathsep}/b"])
def test_a_process_finds_our_package_and_nothing_of_the_notebooks_folder(rundir, own):
    """The package's folder, then what the user's own variable names; never the search path."""
    env = {"A": "1"} if own is None else {"A": "1", "PYTHONPATH": own}
    around = Surroundings(cwd="/work", path=("", "/a"), env=env)
    home = str(Path(processes.__file__).parent.parent)
    assert module_environment(rundir, around) == {
        "A": "1",
        "PYTHONPATH": os.pathsep.join([home, own] if own else [home]),
        RUNDIR_VARIABLE: str(rundir.path),
    }


def test_a_file_of_the_notebooks_folder_is_not_taken_for_a_module_of_ours(
    rundir, monkeypatch, tmp_path
):
    """A `json.py` beside the notebook must not end a process that needs Python's."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    assert spawn(rundir, "json.tool", "check").wait(20) == 2  # its file is a directory
    assert "Is a directory" in rundir.log("check").read_text()


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


ROOT = Path("/run/nbdist")


@pytest.mark.parametrize(
    ("command_line", "found"),
    [
        (["python", "-P", "-m", "nbdist.supervisor", "/run/nbdist/a"], "a"),
        (["python", "-m", "nbdist.engine", "/run/nbdist/a", "0", "4"], "a"),
        (["python", "-m", "nbdist.engine", "0", "/run/nbdist/a"], "a"),
        (["python", "-m", "nbdist.supervisor", "/run/other/a"], None),
        (["python", "-m", "nbdist.supervisor", "/run/nbdist/a/b"], None),
        (["python", "-m", "nbdist.supervisor", "/run/nbdist"], None),
        (["python", "-m", "nbdist.supervisor"], None),
        (["python", "-m", "nbdistribution.supervisor", "/run/nbdist/a"], None),
        (["python", "-m", "json.tool", "/run/nbdist/a"], None),
        (["vim", "nbdist.supervisor", "/run/nbdist/a"], None),
        (["grep", "nbdist.supervisor"], None),
        ([], None),
    ],
)
def test_a_command_line_names_a_directory(command_line, found):
    """One of our modules, started for a directory right below the root; nothing else."""
    assert rundir_of(command_line, ROOT) == (ROOT / found if found else None)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("/run/nbdist/a", "a"),
        ("/run/nbdist/a/b", None),
        ("/run/nbdist", None),
        ("/run/other/a", None),
        ("", None),
        (None, None),
    ],
)
def test_an_environment_names_a_directory(value, found):
    """Right below the root; a process without our variable belongs to nobody."""
    environ = {} if value is None else {RUNDIR_VARIABLE: value}
    assert rundir_in(environ, ROOT) == (ROOT / found if found else None)


def test_processes_are_found_below_the_root_that_is_asked_for(rundir, monkeypatch):
    """Also where this process would make its own directories elsewhere by now; and never those of
    another user (ipyparallel PR#571)."""
    root = runtime_root()
    env = {**os.environ, RUNDIR_VARIABLE: str(rundir.path)}
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        assert [p.pid for p in processes_by_rundir()[rundir.path]] == [sleeper.pid]
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(rundir.path / "logs"))
        assert rundir.path not in processes_by_rundir()
        assert [p.pid for p in processes_by_rundir(root)[rundir.path]] == [sleeper.pid]
        with monkeypatch.context() as another:
            another.setattr(os, "getuid", lambda: os.geteuid() + 1)
            assert processes_by_rundir(root) == {}
        ended = end_processes(rundir.path)
        assert (ended.pids, ended.left) == ((sleeper.pid,), ())
    finally:
        sleeper.kill()
        sleeper.wait(10)


class Stubborn:
    """A process that does not end before it was asked so often."""

    def __init__(self, pid, asked=0):
        self.pid, self.asked = pid, asked

    def kill(self):
        self.asked -= 1


@pytest.fixture
def crowd(monkeypatch):
    """Processes of a directory that end when they are killed often enough."""
    path, crowd = Path("/elsewhere/0123abcd"), []

    def alive(root):
        assert root == path.parent
        return {path: [p for p in crowd if p.asked >= 0]} if crowd else {}

    monkeypatch.setattr(processes, "processes_by_rundir", alive)
    monkeypatch.setattr(
        psutil, "wait_procs", lambda found, **_: ([p for p in found if p.asked < 0], [])
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
