"""Start processes of a cluster, and find exactly those that belong to one.

A process belongs to a cluster if its command line runs one of our modules for the cluster's
directory, or if its environment names that directory (what an engine started). Never by a program's
name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.rundir import RunDir, Surroundings, runtime_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RUNDIR_VARIABLE = "NBDIST_RUNDIR"
"""In the environment of everything that a cluster starts: its directory."""
_PACKAGE = "nbdist."
_ROUND_S = 0.1


def module_environment(rundir: RunDir, around: Surroundings) -> dict[str, str]:
    """Variables of a process that runs a module of ours.

    Not the notebook's folder: a file there that is called `signal.py` must not be ours.
    """
    home = str(Path(__file__).parent.parent)
    path = os.pathsep.join([home, *filter(None, [around.env.get("PYTHONPATH")])])
    return {**around.env, RUNDIR_VARIABLE: str(rundir.path), "PYTHONPATH": path}


def spawn(rundir: RunDir, module: str, log: str) -> subprocess.Popen[bytes]:
    """Run a module of ours in a session of its own, output to its log."""
    env = module_environment(rundir, rundir.read_surroundings())
    with rundir.log(log).open("ab") as out:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
            [sys.executable, "-P", "-m", module, str(rundir.path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=env,
        )


def processes_by_rundir(root: Path | None = None) -> dict[Path, list[psutil.Process]]:
    """Run directory below `root` -> its processes, without the caller and the caller's parents.

    None: below the folder where this process would make run directories.
    """
    root = root or runtime_root()
    found: dict[Path, list[psutil.Process]] = {}
    for process in _own_processes():
        # A process that ends meanwhile, or hides its environment, is not one that we can name.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            path = rundir_of(process.cmdline(), root) or rundir_in(process.environ(), root)
            if path is not None:
                found.setdefault(path, []).append(process)
    return found


def rundir_of(command_line: Sequence[str], root: Path) -> Path | None:
    """The run directory below `root` that one of nbdist's own modules was started for, if any."""
    for index, word in enumerate(command_line[:-2]):
        if word == "-m" and command_line[index + 1].startswith(_PACKAGE):
            paths = map(Path, command_line[index + 2 :])
            return next((path for path in paths if path.parent == root), None)
    return None


def rundir_in(environ: Mapping[str, str], root: Path) -> Path | None:
    """The run directory below `root` that an environment names, if any."""
    path = Path(environ.get(RUNDIR_VARIABLE, ""))
    return path if path.parent == root else None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What `end_processes` did."""

    pids: tuple[int, ...]
    """Ended."""
    left: tuple[int, ...]
    """Still there at the deadline."""


def end_processes(path: Path, *, timeout_s: float = 10.0) -> Ended:
    """Kill the processes of a run directory, until none is left or the time is over.

    Looks anew in each round, since one that was not yet killed may have started another. psutil
    compares the creation time before each signal, so that a pid in new hands is not touched.
    """
    deadline = time.monotonic() + timeout_s
    ended: set[int] = set()
    while processes := processes_by_rundir(path.parent).get(path, []):
        if time.monotonic() > deadline:
            return Ended(pids=tuple(sorted(ended)), left=tuple(p.pid for p in processes))
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a denied one is in `left`
                process.kill()
        gone, _ = psutil.wait_procs(processes, timeout=_ROUND_S)
        ended.update(process.pid for process in gone)
    return Ended(pids=tuple(sorted(ended)), left=())


def _own_processes() -> Iterator[psutil.Process]:
    this = psutil.Process()
    spared = {this.pid, *(parent.pid for parent in this.parents())}
    for process in psutil.process_iter(["uids"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid() and process.pid not in spared:
            yield process
