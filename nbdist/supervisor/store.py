"""The rendezvous store: a process of its own, the zygote's first child.

It decides nothing: groups find the addresses of their members here, under keys that carry the generation. torch's
TCPStore knows no authentication, and by itself would listen on every interface; so the listening socket is bound here,
to loopback, and handed over.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import NoReturn

from nbdist.config import LOOPBACK
from nbdist.rundir import Lease, RunDir


def listen() -> socket.socket:
    """A listening socket on a free loopback port."""
    sock = socket.socket()
    sock.bind((LOOPBACK, 0))
    sock.listen(1024)
    return sock


def serve(sock: socket.socket, rundir: RunDir, lease_s: float) -> NoReturn:
    """Host the store until the lease runs out. Runs as the whole of a forked child."""
    from torch.distributed import TCPStore

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    port = sock.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=sock.detach()
    )
    lease, parent = Lease(rundir, lease_s), os.getppid()
    while not lease.has_run_out() and os.getppid() == parent:
        time.sleep(1.0)
    del store
    os._exit(0)
