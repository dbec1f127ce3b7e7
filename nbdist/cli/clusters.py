"""This user's clusters as a terminal sees them: run directories, and the processes of each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import psutil

from nbdist.processes import processes_by_rundir
from nbdist.rundir import Owner, RunDir, all_rundirs

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUPERVISOR = "nbdist.supervisor"

State = Literal["owned", "kept", "left over", "unreadable", "without folder"]
"""owned: its owner is alive. left over: its owner is gone. kept: likewise, and it was started to
outlive its owner. unreadable: no telling who owns it. without folder: its directory is gone."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster, as found at one moment."""

    rundir: RunDir
    state: State
    processes: tuple[psutil.Process, ...] = ()
    owner: Owner | None = None
    """None where cluster.json does not say."""
    supervisor_pid: int | None = None
    age_s: float | None = None
    """Since its directory was made; None where that is gone."""
    problem: str = ""
    """Why cluster.json cannot be read."""


def find_clusters() -> list[Cluster]:
    """All clusters of this user."""
    processes = processes_by_rundir()
    paths = {rundir.path for rundir in all_rundirs()} | processes.keys()
    return [_describe(RunDir(path), tuple(processes.get(path, ()))) for path in sorted(paths)]


def _describe(rundir: RunDir, processes: tuple[psutil.Process, ...]) -> Cluster:
    owner, problem, keep = None, "", False
    try:
        config, owner, _ = rundir.read()
        keep = config.keep
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    age_s = _age_s(rundir)
    state: State
    if age_s is None:
        state = "without folder"
    elif owner is None:
        state = "unreadable"
    elif owner.is_alive():
        state = "owned"
    else:
        state = "kept" if keep else "left over"
    return Cluster(
        rundir=rundir,
        state=state,
        processes=processes,
        owner=owner,
        supervisor_pid=_supervisor_pid(processes),
        age_s=age_s,
        problem=problem,
    )


def _supervisor_pid(processes: Sequence[psutil.Process]) -> int | None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _SUPERVISOR in process.cmdline():
                return process.pid
    return None


def _age_s(rundir: RunDir) -> float | None:
    """By the wall clock, since that is what files are stamped with."""
    for path in (rundir.file("cluster.json"), rundir.path):
        with suppress(FileNotFoundError):
            return max(0.0, datetime.now(tz=UTC).timestamp() - path.stat().st_mtime)
    return None
