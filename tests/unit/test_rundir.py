"""The runtime directory: who may read it, what comes back from it, its lease."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nbdist import rundir as module
from nbdist.config import ClusterConfig
from nbdist.rundir import (
    MAX_SOCKET_PATH,
    Keys,
    Lease,
    Owner,
    RunDir,
    Surroundings,
    all_rundirs,
    runtime_root,
)

CONFIG = ClusterConfig(num_engines=2, devices=(1, 0), keep=True)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """A short folder of our own that stands for $XDG_RUNTIME_DIR."""
    folder = Path(tempfile.mkdtemp(prefix="nb-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rundir():
    return RunDir.create(CONFIG, Owner.this())


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, moved by hand."""
    clock = SimpleNamespace(now=1_000.0)
    fake = SimpleNamespace(
        monotonic=lambda: clock.now, monotonic_ns=lambda: int(clock.now * 1_000_000_000)
    )
    monkeypatch.setattr(module, "time", fake)
    return clock


# ---- making and reading


def test_nobody_else_may_read_anything(rundir):
    """Folders 0700, files 0600, whatever the umask is."""
    for path in [rundir.path.parent, rundir.path, *rundir.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_what_was_written_comes_back(rundir):
    """Settings and owner are equal, the keys are four."""
    config, owner, keys = rundir.read()
    assert (config, owner) == (CONFIG, Owner.this())
    assert (
        len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    )
    assert {len(k) for k in (keys.server_public, keys.client_secret)} == {40}


def test_clusters_have_names_and_keys_of_their_own(rundir):
    """Two clusters of one user share nothing."""
    other = RunDir.create(CONFIG, Owner.this())
    assert other.cluster_id != rundir.cluster_id
    assert len(rundir.cluster_id) == 8
    assert other.read()[2] != rundir.read()[2]
    assert Keys.make() != Keys.make()


def test_the_surroundings_of_the_start_come_back():
    """Folder, search path and environment of the process that started the cluster."""
    rundir = RunDir.create(CONFIG, Owner.this())
    assert rundir.read_surroundings() == Surroundings.here()


def test_surroundings_are_taken_on(monkeypatch, tmp_path):
    """A newcomer has the notebook's folder, path and environment, plus what its slot needs."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    around = Surroundings(cwd="/", path=("/a", "/b"), env={"A": "1", "B": "1"})
    around.enter({"B": "2"})
    assert os.environ == {"A": "1", "B": "2"}
    assert sys.path == ["/a", "/b"]
    assert Path.cwd() == Path("/")


def test_the_names_of_files_are_fixed(rundir):
    """Sockets, logs and ipyparallel's files stand where every process looks for them."""
    path = rundir.path
    assert rundir.endpoint == f"ipc://{path}/orders"
    assert rundir.log("slot-0") == path / "logs" / "slot-0.log"
    assert rundir.connection_file("engine") == path / "ipp/security/ipcontroller-engine.json"
    assert len(str(rundir.file("orders"))) <= MAX_SOCKET_PATH


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_what_is_cut_short_is_an_error(rundir, part):
    """A file that is no whole description raises, and never half a cluster."""
    text = rundir.file("cluster.json").read_text()
    rundir.file("cluster.json").write_text(text[: int(part * len(text))])
    with pytest.raises(ValueError, match="char"):
        rundir.read()


@pytest.mark.parametrize("content", [{}, {"config": {}}, {"config": {"ghost": 1}}])
def test_what_lacks_a_part_is_an_error(rundir, content):
    """Whole JSON of something else is no cluster either."""
    rundir.file("cluster.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"cluster\.json|unknown setting"):
        rundir.read()


def test_the_controller_is_ready_when_both_its_files_are_whole(rundir):
    """It writes one after the other, and a reader may come in between."""
    assert not rundir.is_controller_ready
    for role in ("client", "engine"):
        rundir.connection_file(role).parent.mkdir(parents=True, exist_ok=True)
        rundir.connection_file(role).write_text('{"ssh": ""')
        assert not rundir.is_controller_ready
        rundir.connection_file(role).write_text('{"ssh": ""}')
    assert rundir.is_controller_ready


def test_a_missing_directory_is_an_error(rundir):
    """Nothing there: OSError."""
    rundir.remove()
    with pytest.raises(OSError, match=r"cluster\.json"):
        rundir.read()


def test_removing_twice_is_harmless(rundir):
    """The directory goes with everything in it, and stays gone."""
    rundir.log("slot-0").write_text("hello")
    rundir.remove()
    rundir.remove()
    assert not rundir.path.exists()


def test_a_directory_that_cannot_be_filled_is_removed(folder, monkeypatch):
    """A full disk at the start leaves nothing behind that holds keys or looks like a cluster."""

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "_write_private", no_space)
    with pytest.raises(OSError, match="No space left"):
        RunDir.create(CONFIG, Owner.this())
    assert list((folder / "nbdist").iterdir()) == []


def test_a_directory_whose_making_is_interrupted_is_removed(folder, monkeypatch):
    """Ctrl-C in the middle of a start leaves nothing either."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(Keys, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunDir.create(CONFIG, Owner.this())
    assert list((folder / "nbdist").iterdir()) == []


def test_a_private_file_is_never_written_over(rundir):
    """Keys stand in a file that this process made itself."""
    with pytest.raises(FileExistsError):
        rundir._write_private("cluster.json", "{}")


def test_a_process_can_be_noted_and_found_again(rundir):
    """Under a name, the newest one counts; nobody noted, or half a note, is None."""
    assert rundir.read_owner("controller") is None
    rundir.write_owner("controller", Owner(pid=7, created=1.5))
    rundir.write_owner("controller", Owner.this())
    assert rundir.read_owner("controller") == Owner.this()
    assert stat.S_IMODE(rundir.file("controller").stat().st_mode) == 0o600
    rundir.file("controller").write_text('{"pid"')
    assert rundir.read_owner("controller") is None


# ---- owners


def test_an_owner_is_a_process_and_not_a_number():
    """A pid in new hands is not the owner; one that nobody has is not alive."""
    this = Owner.this()
    assert this.pid == os.getpid()
    assert this.is_alive()
    assert not Owner(pid=this.pid, created=this.created - 100.0).is_alive()
    assert not Owner(pid=2**22 + 1, created=0.0).is_alive()
    with pytest.raises(psutil.NoSuchProcess):
        Owner.of(2**22 + 1)


def test_a_zombie_is_not_alive(monkeypatch):
    """A process that has ended and was not waited for runs no more."""
    this = Owner.this()
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_ZOMBIE)
    assert not this.is_alive()


# ---- the lease


def test_a_lease_runs_out_when_it_is_not_renewed(rundir, clock):
    """By the reader's own clock, from the last change that it saw."""
    rundir.renew_lease()
    lease = Lease(rundir, 15.0)
    clock.now += 15.0
    assert not lease.has_run_out()
    clock.now += 0.1
    assert lease.has_run_out()


def test_a_renewed_lease_goes_on(rundir, clock):
    """Each change of the stamp starts the time anew."""
    rundir.renew_lease()
    lease = Lease(rundir, 15.0)
    for _ in range(5):
        clock.now += 10.0
        rundir.renew_lease()
        assert not lease.has_run_out()
    clock.now += 15.1
    assert lease.has_run_out()


def test_readers_compare_stamps_and_not_clocks(rundir, clock):
    """A stamp of long ago, or of the future, is as good as any: only its change counts."""
    os.utime(rundir.file("lease"), (5, 5))
    lease = Lease(rundir, 15.0)
    clock.now += 14.0
    assert not lease.has_run_out()
    os.utime(rundir.file("lease"), (1, 1))
    assert not lease.has_run_out()
    clock.now += 14.0
    assert not lease.has_run_out()


def test_without_a_directory_the_lease_has_run_out(rundir):
    """The cluster was ended: nobody waits for the time to pass."""
    lease = Lease(rundir, 15.0)
    rundir.remove()
    assert lease.has_run_out()


def test_a_lease_is_made_where_there_is_none(rundir):
    """A supervisor that takes over renews it even if the file is gone."""
    rundir.file("lease").unlink()
    rundir.renew_lease()
    assert stat.S_IMODE(rundir.file("lease").stat().st_mode) == 0o600
    assert not Lease(rundir, 15.0).has_run_out()


# ---- the root


def test_the_root_is_in_the_runtime_folder_of_the_user(folder):
    """$XDG_RUNTIME_DIR comes first, and the folder is private."""
    assert runtime_root() == folder / "nbdist"
    assert stat.S_IMODE(runtime_root().stat().st_mode) == 0o700


def test_without_a_runtime_folder_the_temporary_one_is_used(folder, monkeypatch):
    """With the uid in its name, since others use that folder too."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert runtime_root() == folder / f"nbdist-{os.getuid()}"


def test_a_folder_that_is_too_long_for_sockets_is_passed_over(folder, monkeypatch):
    """The path of a Unix socket has a limit: the next candidate is taken."""
    long = folder / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert runtime_root() == folder / f"nbdist-{os.getuid()}"


def test_a_folder_that_cannot_be_made_is_passed_over(folder, monkeypatch):
    """A runtime folder that is not there (a login that ended) does not stop a start."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert runtime_root() == folder / f"nbdist-{os.getuid()}"


def test_a_folder_that_others_may_enter_is_refused():
    """It holds keys: the message names it and the mode that it must have."""
    runtime_root().chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        runtime_root()


def test_a_link_to_somewhere_is_refused(folder):
    """Nobody may send us to another place by a link in a shared folder."""
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "nbdist").symlink_to(folder / "elsewhere")
    with pytest.raises(PermissionError):
        runtime_root()


def test_without_any_folder_the_candidates_are_named(monkeypatch):
    """The message says what was tried and what to set."""
    monkeypatch.setattr(module, "MAX_SOCKET_PATH", 10)
    with pytest.raises(PermissionError, match="set XDG_RUNTIME_DIR") as caught:
        runtime_root()
    assert f"/tmp/nbdist-{os.getuid()}" in str(caught.value)


def test_all_directories_are_found_and_nothing_else(rundir):
    """Clusters, also one whose description is missing; other files and folders are none."""
    other = RunDir.create(CONFIG, Owner.this())
    other.file("cluster.json").unlink()
    (rundir.path.parent / "stray").mkdir()
    (rundir.path.parent / "note.txt").write_text("hello")
    assert {r.path for r in all_rundirs()} == {rundir.path, other.path}


def test_the_file_is_plain_json(rundir):
    """Whoever may read it needs none of our code."""
    content = json.loads(rundir.file("cluster.json").read_text())
    assert set(content) == {"config", "owner", "keys"}
    assert content["owner"]["created"] <= time.time()  # noqa: TID251 - psutil's creation time
