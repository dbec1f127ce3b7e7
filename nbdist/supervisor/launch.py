"""Start, signal and stop engines, one per slot.

Through the zygote, or where fork is not possible as fresh processes. Everything started here gets
a process session of its own, so that a signal to the notebook's process group reaches none of it.
The supervisor's thread polls `fileno` and calls `read`; nothing here blocks.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.config import LOOPBACK
from nbdist.processes import module_environment, spawn
from nbdist.protocol import forks, wire
from nbdist.rundir import Owner, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.protocol.ids import Slot


@dataclass
class Zygote:
    """The supervisor's end of the zygote; also what stands in for it where it cannot fork."""

    rundir: RunDir
    store_port: int = 0
    cannot_fork: str = ""
    is_ready: bool = False
    socket: socket.socket | None = None
    buffer: bytearray = field(default_factory=bytearray)
    own: dict[int, tuple[Slot, Any]] = field(default_factory=dict)
    """Engines that are our own children: pid -> slot and ipyparallel's launcher."""

    def start(self) -> None:
        """Start a zygote; `connect` until it answers."""
        self.close()
        self.rundir.file("zygote").unlink(missing_ok=True)
        process = spawn(self.rundir, "nbdist.supervisor.zygote", "zygote")
        self.rundir.write_owner("zygote-process", Owner.of(process.pid))

    def connect(self) -> None:
        """Try to reach a zygote, our own or a predecessor's; start one if none lives."""
        if self.socket is not None:
            return
        owner = self.rundir.read_owner("zygote-process")
        if owner is None or not owner.is_alive():
            self.start()
            return
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(self.rundir.file("zygote")))
        except OSError:
            sock.close()  # it is still importing
        else:
            _, _, keys = self.rundir.read()
            sock.sendall(forks.pack(forks.Hello(key=keys.server_secret)))
            self.socket, self.buffer = sock, bytearray()

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the rendezvous store."""
        return LOOPBACK, self.store_port

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how engines are started."""
        if not self.cannot_fork:
            return ()
        return (f"engines are started one by one, not forked, which is slower: {self.cannot_fork}",)

    def fileno(self) -> int:
        """For the poller."""
        return self.socket.fileno() if self.socket else -1

    def read(self) -> list[forks.FromZygote] | None:
        """Messages that came; None where the zygote is gone."""
        if self.socket is None:
            return []
        try:
            data = self.socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return None
        self.buffer += data
        out: list[forks.FromZygote] = []
        for frame in forks.split(self.buffer):
            message = wire.decode(frame, forks.FromZygote)
            if isinstance(message, forks.Ready):
                self.store_port, self.cannot_fork = message.store_port, message.cannot_fork
                self.is_ready = True
            elif isinstance(message, forks.StoreMoved):
                self.store_port = message.store_port
            out.append(message)
        return out

    def start_engine(
        self, slot: Slot, env: dict[str, str], num_threads: int
    ) -> forks.Forked | None:
        """Make an engine.

        Where it is our own child its pid is known at once, else `Forked` comes by `read`.
        """
        if not self.cannot_fork:
            self._send(forks.Fork(slot=slot, env=env, num_threads=num_threads))
            return None
        launcher = self._launcher(slot, env, num_threads)
        launcher.start()
        self.own[launcher.pid] = (slot, launcher)
        return forks.Forked(slot=slot, pid=launcher.pid)

    def _launcher(self, slot: Slot, env: dict[str, str], num_threads: int) -> Any:
        """ipyparallel's local launcher, told to start our engine."""
        from ipyparallel.cluster.launcher import (  # noqa: PLC0415 - half a second, for this case only
            LocalEngineLauncher,
        )

        around = self.rundir.read_surroundings()
        return LocalEngineLauncher(
            engine_cmd=[sys.executable, "-P", "-m", "nbdist.engine"],
            engine_args=[str(self.rundir.path), str(slot), str(num_threads)],
            environment={**module_environment(self.rundir, around), **env},
            work_dir=around.cwd,
            output_file=str(self.rundir.log(f"slot-{slot}")),
        )

    def own_exits(self) -> Iterator[forks.Exited]:
        """Exits of engines that are our own children."""
        for pid, (slot, launcher) in list(self.own.items()):
            try:
                code = launcher.process.wait(timeout=0)
            except psutil.TimeoutExpired:
                continue
            del self.own[pid]
            is_signal = code is not None and code < 0
            yield forks.Exited(
                slot=slot,
                pid=pid,
                signal=signal.Signals(-code).name if is_signal else None,
                exit_code=None if is_signal else code,
                at=time.monotonic(),
            )

    def close(self) -> None:
        """Let go of the connection."""
        if self.socket:
            self.socket.close()
        self.socket, self.is_ready = None, False

    def _send(self, message: forks.Message) -> None:
        if self.socket is None:
            raise ConnectionError("the zygote is not connected")
        self.socket.sendall(forks.pack(message))
