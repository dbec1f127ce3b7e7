"""End what is left over of clusters whose owner is gone, and nothing else.

A cluster whose owner is alive is left alone. So is one that was started with `keep`, unless you
ask for it. Exit code 1 where something could not be ended or removed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.cli.clusters import Cluster, find_clusters
from nbdist.cli.table import duration
from nbdist.processes import end_processes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_STARTING_S = 60.0
"""A directory that cannot be read may be one that is just being made, up to this age."""

_ENDING_S = 2.0
"""A cluster whose directory is gone may be one that is just shutting down, for this long."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist clean`."""
    parser.add_argument(
        "--all-kept", action="store_true", help="also end clusters started with keep, owner gone"
    )


def run(options: Namespace) -> int:
    """Clean, and say for each cluster what was done."""
    clusters = find_clusters()
    if any(cluster.state == "without folder" for cluster in clusters):
        time.sleep(_ENDING_S)
        clusters = find_clusters()
    failed = False
    for cluster in clusters:
        reason = why_left(cluster, all_kept=options.all_kept)
        if reason:
            print(f"{cluster.rundir.cluster_id}: left alone: {reason}")
            continue
        outcome = end(cluster)
        failed = failed or not outcome.succeeded
        print(f"{cluster.rundir.cluster_id}: {_why_ended(cluster)}; {outcome.text}")
    if not clusters:
        print("nothing to clean")
    return int(failed)


def why_left(cluster: Cluster, *, all_kept: bool) -> str:
    """Why a cluster is none of ours to end, in words; empty where it is."""
    owner = f"its owner (pid {cluster.owner.pid})" if cluster.owner else "its owner"
    if cluster.state == "owned":
        return f"{owner} is alive"
    if cluster.state == "kept" and not all_kept:
        return f"{owner} is gone, but it was started with keep; `nbdist clean --all-kept` ends it"
    if cluster.state == "unreadable" and cluster.processes:
        pids = _listed([process.pid for process in cluster.processes])
        return f"cluster.json does not tell its owner ({cluster.problem}), and it has {pids}"
    if cluster.state == "unreadable" and (cluster.age_s or 0.0) < _STARTING_S:
        return f"it is {duration(cluster.age_s or 0.0)} old and may be just starting"
    return ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of ending one cluster."""

    succeeded: bool
    text: str


def end(cluster: Cluster) -> Outcome:
    """Kill its processes; once none is left, remove its directory."""
    ended = end_processes(cluster.rundir.path)
    done = f"ended {_listed(ended.pids)}" if ended.pids else "no process was left"
    if ended.left:
        text = f"{done}; FAILED to end {_listed(ended.left)}: look at them with `ps -fp PID`"
        return Outcome(succeeded=False, text=text)
    if cluster.rundir.path.exists():
        cluster.rundir.remove()
        if cluster.rundir.path.exists():
            text = f"{done}; FAILED to remove {cluster.rundir.path}: remove it by hand"
            return Outcome(succeeded=False, text=text)
        done += "; removed its folder"
    return Outcome(succeeded=True, text=done)


def _why_ended(cluster: Cluster) -> str:
    if cluster.state == "without folder":
        return "its folder is gone"
    if cluster.owner is None:
        return f"cluster.json cannot be read ({cluster.problem})"
    return f"its owner (pid {cluster.owner.pid}) is gone"


def _listed(pids: list[int] | tuple[int, ...]) -> str:
    kind = "process" if len(pids) == 1 else "processes"
    return f"{len(pids)} {kind} (pid {', '.join(map(str, pids))})"
