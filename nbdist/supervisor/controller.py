"""ipyparallel's controller in a wrapper: one process, on loopback, with CURVE, ended by the lease.

`python -m nbdist.supervisor.controller RUNDIR`. The controller itself never ends when those who
started it are gone; the lease's thread here sees to that. Heartbeats come often, so that an
engine's registration is complete at once, and may be missed for long, so that ipyparallel never
drops an engine before the supervisor has judged it.

By itself ipyparallel looks for a free port, lets it go, and binds it half a second later, in a
thread whose failure nobody sees; here a port is held from the moment in which it is chosen.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.config import LOOPBACK, ClusterConfig
from nbdist.rundir import Lease, RunDir

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

PR_SET_PDEATHSIG = 1
"""prctl(2)."""
PERIOD_MS = 100
HANG_TIMEOUTS = 10
"""ipyparallel may drop an engine after this many of our own hang timeouts, and never before."""
_holders: list[socket.socket] = []
"""Of the ports that `hold_ports` gave out."""


def arguments(rundir: RunDir, config: ClusterConfig) -> list[str]:
    """Command line of the controller."""
    misses = max(600, int(HANG_TIMEOUTS * config.hang_timeout_s * 1000 / PERIOD_MS))
    return [
        f"--profile-dir={rundir.file('ipp')}",
        f"--ip={LOOPBACK}",
        f"--location={LOOPBACK}",
        "--IPController.enable_curve=True",
        "--IPController.use_threads=True",
        "--IPController.broadcast_scheduler_depth=0",
        "--IPController.reuse_files=False",
        f"--HeartMonitor.period={PERIOD_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={misses}",
        "--IPController.db_class=NoDB",
        "--log-level=ERROR",
    ]


def hold_ports(num_ports: int) -> list[int]:
    """Loopback ports that Linux gives to nobody else for as long as this process lives.

    In place of ipyparallel's `select_random_ports`. A second socket may bind such a port, since
    both are marked for reuse (ZMQ marks its own) and the first one never listens.
    """
    holders = [socket.socket() for _ in range(num_ports)]
    for holder in holders:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
    _holders.extend(holders)
    return [holder.getsockname()[1] for holder in holders]


def end_with_lease(lease: Lease) -> None:
    """End the process when nobody has renewed the lease.

    The one that the controller forks for its heartbeats ends with it.
    """
    heart: list[BaseProcess] = []
    while not lease.has_run_out() and all(child.is_alive() for child in heart):
        heart = heart or multiprocessing.active_children()
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def end_with_parent() -> None:
    """In a forked child: be killed when the parent is gone, however that ends.

    On Linux; elsewhere the lease must do.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run the controller until it is told to end or the lease runs out."""
    rundir = RunDir(Path(sys.argv[1]))
    config, _, _ = rundir.read()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lease = Lease(rundir, config.lease_s)
    threading.Thread(target=end_with_lease, args=(lease,), name="nbdist-lease", daemon=True).start()
    os.register_at_fork(after_in_child=end_with_parent)
    from ipyparallel import util  # noqa: PLC0415 - the lease is watched first
    from ipyparallel.controller.app import IPController  # noqa: PLC0415 - the same

    if sys.platform.startswith("linux"):
        util.select_random_ports = hold_ports
    IPController.launch_instance(argv=arguments(rundir, config))


if __name__ == "__main__":
    main()
