"""What else a cluster lives through, and what it weighs.

Its supervisor is killed, it grows and shrinks, it ends.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

_CELL_LIMIT_S = 30.0
_SUPERVISOR = "nbdist.supervisor"


def weigh(cluster: Cluster, samples: Samples) -> None:
    """Memory of each engine after a first cell.

    Its own, and with its part of what it has in common with others.
    """
    pids = cluster.run("import os; torch.ones(2).sum(); os.getpid()", once=True).values
    for pid in pids.values():
        info = psutil.Process(pid).memory_full_info()
        samples.add("uss", info.uss)
        samples.add("pss", info.pss)


def replace_supervisor(cluster: Cluster, samples: Samples) -> None:
    """SIGKILL the supervisor, and run a cell at once."""
    before, generation = _supervisor_pid(), cluster.generation
    began = time.monotonic()
    os.kill(before, signal.SIGKILL)
    values = cluster.run("rank", timeout=_CELL_LIMIT_S, once=True).values
    samples.add("supervisor", time.monotonic() - began)
    size = cluster.world_size
    if values != {rank: rank for rank in range(size)} or _supervisor_pid() == before:
        raise NbdistError(f"after the supervisor was replaced, the ranks of {size} are {values}")
    if cluster.generation != generation:
        raise NbdistError("the supervisor was replaced, and the group with it")


def scale(cluster: Cluster, samples: Samples) -> None:
    """From all to two, and back."""
    size = cluster.world_size
    for name, wanted in (("shrink", 2), ("grow", size)):
        began = time.monotonic()
        cluster.scale(wanted)
        samples.add(name, time.monotonic() - began)
        if cluster.world_size != wanted:
            raise NbdistError(f"scaled to {wanted}, but there are {cluster.world_size}")


def shut_down(cluster: Cluster, samples: Samples) -> None:
    """Until nothing of the cluster is left."""
    began = time.monotonic()
    cluster.shutdown()
    samples.add("shutdown", time.monotonic() - began)


def _supervisor_pid() -> int:
    """This process has one cluster, and its supervisor is a child."""
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and _SUPERVISOR in child.cmdline():
            return child.pid
    raise NbdistError("this cluster has no supervisor")
