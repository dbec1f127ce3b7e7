"""The rendezvous store: a process of its own, the zygote's first child.

It decides nothing: groups find the addresses of their members here, under keys that carry the
generation. torch's TCPStore knows no authentication, and by itself would listen on every interface;
so the listening socket is bound here, to loopback, and handed over.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbdist.config import LOOPBACK
from nbdist.rundir import Lease, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable

KEPT_GENERATIONS = 2
_GENERATION = re.compile(r"/?g(\d+)/")


def listen() -> socket.socket:
    """A listening socket on a free loopback port."""
    sock = socket.socket()
    sock.bind((LOOPBACK, 0))
    sock.listen(1024)
    return sock


def outdated(keys: Iterable[str]) -> list[str]:
    """Keys of generations before the last two: what is kept does not grow with the generations."""
    found = [(int(match[1]), key) for key in keys if (match := _GENERATION.match(key))]
    newest = max((generation for generation, _ in found), default=0)
    return [key for generation, key in found if generation < newest - KEPT_GENERATIONS]


def serve(sock: socket.socket, rundir: RunDir, lease_s: float) -> NoReturn:
    """Host the store until the lease runs out. Runs as the whole of a forked child."""
    from torch.distributed import TCPStore  # noqa: PLC0415 - whoever starts the store needs no torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    port = sock.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=sock.detach()
    )
    lease, parent = Lease(rundir, lease_s), os.getppid()
    while not lease.has_run_out() and os.getppid() == parent:
        for key in outdated(store.list_keys()):
            store.delete_key(key)
        time.sleep(1.0)
    del store
    os._exit(0)


def main() -> None:
    """`python -m nbdist.supervisor.store RUNDIR FD`: where the zygote cannot fork it."""
    rundir, fd = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    config, _, _ = rundir.read()
    serve(socket.socket(fileno=fd), rundir, config.lease_s)


if __name__ == "__main__":
    main()
