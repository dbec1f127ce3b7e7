"""List this user's clusters, and whether their owners are alive.

The owner is the process that started the cluster: a notebook's kernel or a script. `nbdist clean`
ends what is left over of those that are gone. Exit code 0.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nbdist.cli.clusters import Cluster, find_clusters
from nbdist.cli.table import columns, duration

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_HEADER = ("id", "state", "owner", "supervisor", "processes", "age", "logs")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist ps`."""
    parser.add_argument("--json", action="store_true", help="print a JSON list, for programs")


def run(options: Namespace) -> int:
    """Print the table."""
    clusters = find_clusters()
    if options.json:
        print(json.dumps([as_json(cluster) for cluster in clusters], indent=2))
    elif clusters:
        print(columns(_HEADER, map(_row, clusters)))
    else:
        print("no clusters")
    return 0


def as_json(cluster: Cluster) -> dict[str, Any]:
    """One cluster for programs; what is not known is null."""
    owner = cluster.owner
    return {
        "id": cluster.rundir.cluster_id,
        "state": cluster.state,
        "owner_pid": owner and owner.pid,
        "owner_is_alive": cluster.state == "owned" if owner else None,
        "supervisor_pid": cluster.supervisor_pid,
        "pids": [process.pid for process in cluster.processes],
        "age_s": cluster.age_s,
        "logs": str(cluster.rundir.path / "logs"),
        "problem": cluster.problem,
    }


def _row(cluster: Cluster) -> tuple[object, ...]:
    owner = "unknown"
    if cluster.owner:
        owner = f"{cluster.owner.pid} ({'alive' if cluster.state == 'owned' else 'gone'})"
    return (
        cluster.rundir.cluster_id,
        cluster.state,
        owner,
        "–" if cluster.supervisor_pid is None else cluster.supervisor_pid,
        len(cluster.processes),
        "–" if cluster.age_s is None else duration(cluster.age_s),
        cluster.rundir.path / "logs",
    )
