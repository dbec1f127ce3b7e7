"""Findings about the machine: system, cores, memory, folders, sockets, limits, interfaces."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.cli.findings import Finding, Level
from nbdist.config import LOOPBACK, LOOPBACK_INTERFACE
from nbdist.gpus import Gpus, default_num_engines
from nbdist.rundir import MAX_SOCKET_PATH, runtime_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MIB = 2**20
_MIN_SHM_BYTES = 256 * _MIB
_MIN_FILES = 256
_FEW_FILES = 1024
_LONGEST_SOCKET = "0123abcd/orders"


def system(name: str, environ: Mapping[str, str]) -> Finding:
    """Whether engines can be forked from a zygote."""
    text = f"{platform.platform(terse=True)}, Python {platform.python_version()}"
    slower = "engines start as fresh processes, some seconds each"
    if not name.startswith("linux"):
        level: Level = "warn"
        text += f": no forking here, so {slower}; blocked ranks cannot be cut loose"
        step = "use Linux for the whole of it"
    elif environ.get("NBDIST_NO_FORK"):
        level, text, step = "warn", f"{text}: NBDIST_NO_FORK is set, so {slower}", "unset it"
    else:
        level, text, step = "ok", f"{text}: engines are forked", ""
    return Finding(name="system", level=level, text=text, next_step=step)


def pidfd() -> Finding:
    """Whether the system tells of a process's end through a file descriptor."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding(
            name="pidfd",
            level="warn",
            text=f"not to be had ({error}); some deaths are noticed later, by a missed beat",
            next_step="use Linux 5.3 or later, and a container profile that permits pidfd_open",
        )
    return Finding(name="pidfd", level="ok", text="deaths are noticed at once")


def cores(num: int, gpus: Gpus) -> Finding:
    """Cores, and how many engines start by default."""
    kind = "one for each GPU" if gpus.count else "one for each core"
    text = f"{num}; {default_num_engines()} engines by default, {kind}"
    return Finding(name="cores", level="ok", text=text)


def memory(available_bytes: int, engine_bytes: int = 300 * _MIB) -> Finding:
    """Whether memory will do for some engines, torch loaded and little else."""
    text = f"{available_bytes / 2**30:.1f} GiB available"
    if available_bytes < 4 * engine_bytes:
        text += "; each engine takes a few hundred MiB before it holds any data"
        step = "close other programs, or start fewer engines"
        return Finding(name="memory", level="warn", text=text, next_step=step)
    return Finding(name="memory", level="ok", text=text)


def runtime_folder(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether there is a private folder for clusters, in which sockets work."""
    try:
        root = runtime_root()
    except OSError as error:
        step = "remove it, or set XDG_RUNTIME_DIR to a short path of a folder that is yours alone"
        yield Finding(name="runtime", level="fail", text=str(error), next_step=step)
        return
    text = f"{root}, mode {root.stat().st_mode & 0o777:04o}"
    wanted = environ.get("XDG_RUNTIME_DIR")
    if wanted and root.parent != Path(wanted):
        yield Finding(
            name="runtime",
            level="warn",
            text=f"{text}; XDG_RUNTIME_DIR={wanted} was passed over: too long, or not writable",
            next_step="use the same XDG_RUNTIME_DIR everywhere, or none: clusters are found by it",
        )
    else:
        yield Finding(name="runtime", level="ok", text=text)
    yield unix_socket(root)


def unix_socket(root: Path) -> Finding:
    """Whether a Unix socket can be made in a folder, with the longest path that will be needed."""
    num_bytes = len(os.fsencode(root / _LONGEST_SOCKET))
    text = f"longest path {num_bytes} of {MAX_SOCKET_PATH} bytes"
    path = root / f".doctor-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
        path.unlink()
    except OSError as error:
        text = f"{text}; no Unix socket can be made in {root}: {error}"
    else:
        if num_bytes <= MAX_SOCKET_PATH:
            return Finding(name="sockets", level="ok", text=text)
    step = "set XDG_RUNTIME_DIR to a folder of yours with a short path on a local disk"
    return Finding(name="sockets", level="fail", text=text, next_step=step)


def shared_memory(path: Path) -> Finding:
    """Room for batches on their way from data loader processes."""
    name = str(path)
    if not path.is_dir():
        text = f"there is no {path}: DataLoader(num_workers=…) may fail"
        return Finding(name=name, level="warn", text=text, next_step="keep num_workers=0")
    free_bytes = shutil.disk_usage(path).free
    text = f"{free_bytes / _MIB:.0f} MiB free"
    if free_bytes < _MIN_SHM_BYTES:
        text += ": DataLoader(num_workers=…) may end with SIGBUS"
        step = "keep num_workers=0, or give the container more (docker run --shm-size=1g)"
        return Finding(name=name, level="warn", text=text, next_step=step)
    return Finding(name=name, level="ok", text=text)


def open_files(limit: int) -> Finding:
    """Whether each process may open enough files and sockets."""
    if limit == resource.RLIM_INFINITY:
        return Finding(name="open files", level="ok", text="no limit")
    level: Level = "fail" if limit < _MIN_FILES else "warn" if limit < _FEW_FILES else "ok"
    step = "" if level == "ok" else f"ulimit -n {4 * _FEW_FILES}, in the shell that starts Jupyter"
    return Finding(name="open files", level=level, text=f"at most {limit}", next_step=step)


def loopback() -> Finding:
    """Whether processes on this host can reach one another."""
    state = psutil.net_if_stats().get(LOOPBACK_INTERFACE)
    step = f"ip link set {LOOPBACK_INTERFACE} up"
    if state is None or not state.isup:
        text = f"the interface {LOOPBACK_INTERFACE} is {'down' if state else 'missing'}"
        return Finding(name="loopback", level="fail", text=text, next_step=step)
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2.0).close()
    except OSError as error:
        text = f"no connection to {LOOPBACK}: {error}"
        return Finding(name="loopback", level="fail", text=text, next_step=step)
    return Finding(name="loopback", level="ok", text=f"{LOOPBACK_INTERFACE}, {LOOPBACK}")


def gloo_interface(value: str | None, interfaces: Iterable[str]) -> Finding:
    """Whether GLOO_SOCKET_IFNAME is set to something that gloo would not understand."""
    overridden = f"engines on this host use {LOOPBACK_INTERFACE}"
    if value is None or value == LOOPBACK_INTERFACE:
        return Finding(name="gloo", level="ok", text=overridden)
    text = f"GLOO_SOCKET_IFNAME={value!r} is set; {overridden} all the same"
    missing = [name for name in value.split(",") if name not in set(interfaces)]
    if not missing:
        return Finding(name="gloo", level="ok", text=text)
    text = f"{text}. There is no interface {missing[0]!r} (gloo knows no exclusions with ^)"
    step = "unset it: your own scripts with gloo will fail with it"
    return Finding(name="gloo", level="warn", text=text, next_step=step)
