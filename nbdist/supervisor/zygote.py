"""The process that has torch imported and forks engines: one starts in a fraction of a second.

A fresh process (`python -m nbdist.supervisor.zygote RUNDIR`) in which only imports ran: it has one
thread, which is asserted before each fork, since a forked child of a threaded process can inherit a
lock that nobody will release; and it never touches a GPU. It is the parent of its engines, so it
alone learns with which signal they ended. It outlives a supervisor for the length of a lease, keeps
the exits that nobody was there to hear, and takes everything with it when the lease runs out. It
imports torch and, in its children, `nbdist.engine`; never ipywidgets or zmq's context.
"""

from __future__ import annotations

import errno
import gc
import hmac
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nbdist.protocol import forks, wire
from nbdist.rundir import Lease, RunDir
from nbdist.supervisor import store

if TYPE_CHECKING:
    from nbdist.protocol.ids import Slot

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch.optim",
    "torch.testing._internal.distributed.fake_pg",
    "torch._dynamo",
    "torch._dynamo.utils",
    "torch.distributed.algorithms.join",
    "torch.distributed._functional_collectives",
    "ipykernel.ipkernel",
    "IPython",
    "ipyparallel.engine.app",
    "cloudpickle",
    "nbdist.engine.entry",
    "nbdist.train",
)
"""What an engine and the first DDP model in it would import."""


TOLD_AGAIN_S = 5.0
"""Exits of so short a while ago are told to a supervisor that takes over, told before or not."""
HELLO_LIMIT_S = 0.2
"""A peer that has not said who it is by then is let go."""


class Zygote:
    """State of the process: its children, and the supervisor that is connected, if any."""

    def __init__(self, rundir: RunDir) -> None:
        config, _, keys = rundir.read()
        self.key = keys.server_secret
        self.rundir = rundir
        self.surroundings = rundir.read_surroundings()
        self.config = config
        self.lease = Lease(rundir, config.lease_s)
        self.children: dict[int, Slot] = {}
        self.unheard: list[forks.Exited] = []
        self.last_exits: deque[forks.Exited] = deque(maxlen=64)
        self.peer: socket.socket | None = None
        self.buffer = bytearray()
        self.store_pid = self.store_port = 0
        self.store_began = float("-inf")
        self.cannot_fork = ""
        self.listener = socket.socket(socket.AF_UNIX)
        self.wakeup, self.woken = os.pipe()

    def run(self) -> None:
        """Serve until the lease runs out."""
        for fd in (self.wakeup, self.woken):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.cannot_fork = why_not_fork()
        self.start_store()
        path = self.rundir.file("zygote")
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen(1)
        while not self.lease.has_run_out():
            sockets: list[Any] = [self.listener, *([self.peer] if self.peer else [])]
            ready, _, _ = select.select([*sockets, self.wakeup], [], [], 1.0)
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            self.reap()
            if self.listener in ready:
                self.accept()
            if self.peer in ready:
                self.receive()
        self.end_everything()

    # ---- children

    def start_store(self) -> None:
        """Fork the store; it must come before any engine, so that none inherits its socket."""
        time.sleep(max(0.0, self.store_began + 1.0 - time.monotonic()))  # should it end at once
        self.store_began = time.monotonic()
        sock = store.listen()
        self.store_port = sock.getsockname()[1]
        self.store_pid = self.spawn_store(sock) if self.cannot_fork else self.fork_store(sock)
        sock.close()

    def fork_store(self, sock: socket.socket) -> int:
        """The store as a child of this process."""
        pid = os.fork()
        if pid == 0:
            self.forget_parent("store")
            store.serve(sock, self.rundir, self.config.lease_s)
        return pid

    def spawn_store(self, sock: socket.socket) -> int:
        """The store as a fresh process, which is given the listening socket."""
        fd = sock.fileno()
        with self.rundir.log("store").open("ab") as out:
            command = [sys.executable, "-P", "-m", "nbdist.supervisor.store", str(self.rundir.path)]
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                [*command, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return process.pid

    def fork_engine(self, order: forks.Fork) -> None:
        """Make one engine and report its pid."""
        if problem := why_not_fork():
            raise RuntimeError(problem)
        pid = os.fork()
        if pid == 0:
            self.become_engine(order)
        self.children[pid] = order.slot
        self.tell(forks.Forked(slot=order.slot, pid=pid))

    def become_engine(self, order: forks.Fork) -> NoReturn:
        """The child's side: never returns."""
        code = 1
        try:
            self.forget_parent(f"slot-{order.slot}")
            self.surroundings.enter(order.env)
            from nbdist.engine import entry  # noqa: PLC0415 - imported by now, and only here

            code = entry.main(self.rundir, order.slot, order.num_threads)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - the last frame of a process: its log is the only place left
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def forget_parent(self, name: str) -> None:
        """In a child: own session, default signals, own log, none of the zygote's sockets."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.listener.close()
        if self.peer:
            self.peer.close()
        os.close(self.wakeup)
        os.close(self.woken)
        redirect(self.rundir.log(name))

    def reap(self) -> None:
        """Report children that ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.store_pid:
                self.start_store()
                self.tell(forks.StoreMoved(store_port=self.store_port))
                continue
            slot = self.children.pop(pid, None)
            if slot is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            exited = forks.Exited(
                slot=slot,
                pid=pid,
                signal=signal_name(-code) if code < 0 else None,
                exit_code=code if code >= 0 else None,
                at=time.monotonic(),
            )
            if self.peer is None:
                self.unheard.append(exited)
            else:
                self.last_exits.append(exited)
                self.tell(exited)

    def end_everything(self) -> None:
        """The lease ran out: nobody may be left."""
        for pid in [*self.children, self.store_pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.rundir.remove()

    # ---- the supervisor

    def accept(self) -> None:
        """A supervisor connects, and takes the place of an earlier one. Nobody else may."""
        peer, _ = self.listener.accept()
        if not self.is_supervisor(peer):
            peer.close()
            return
        if self.peer:
            self.peer.close()
        self.peer, self.buffer = peer, bytearray()
        children = tuple(forks.Child(slot=slot, pid=pid) for pid, slot in self.children.items())
        self.tell(
            forks.Ready(children=children, store_port=self.store_port, cannot_fork=self.cannot_fork)
        )
        # What was told to a supervisor that ended just then may not have been read.
        since = time.monotonic() - TOLD_AGAIN_S
        unheard, self.unheard = self.unheard, []
        for exited in [*unheard, *(e for e in self.last_exits if e.at > since)]:
            self.tell(exited)

    def is_supervisor(self, peer: socket.socket) -> bool:
        """Whether a peer is of our user, and its first words prove that it holds the key."""
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            return False
        expected = forks.pack(forks.Hello(key=self.key))
        peer.settimeout(HELLO_LIMIT_S)
        try:
            said = peer.recv(len(expected), socket.MSG_WAITALL)
        except OSError:
            return False
        peer.settimeout(None)
        return hmac.compare_digest(said, expected)

    def receive(self) -> None:
        """Carry out the supervisor's orders."""
        if self.peer is None:
            return
        try:
            data = self.peer.recv(65536)
        except ConnectionError:
            data = b""  # it was killed with something unread
        if not data:
            self.peer.close()
            self.peer = None
            return
        self.buffer += data
        for frame in forks.split(self.buffer):
            self.fork_engine(wire.decode(frame, forks.Fork))

    def tell(self, message: forks.Message) -> None:
        """Send, or keep an exit for the next supervisor."""
        try:
            if self.peer:
                self.peer.sendall(forks.pack(message))
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            self.peer = None
            if isinstance(message, forks.Exited):
                self.unheard.append(message)


def why_not_fork() -> str:
    """Why this process must not fork, in words; empty where it may."""
    if not sys.platform.startswith("linux"):
        return f"forking after imports is not safe on {sys.platform}"
    if os.environ.get("NBDIST_NO_FORK"):
        return "NBDIST_NO_FORK is set"
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"importing torch started threads ({', '.join(threads)})"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "importing started the CUDA driver"
    return ""


def signal_name(number: int) -> str:
    """SIGKILL for 9; the bare number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def redirect(log: Path) -> None:
    """Standard input from nowhere, output to a log."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, fd in ((0, null), (1, out), (2, out)):
        os.dup2(fd, target)
    os.close(null)
    os.close(out)


def preload() -> None:
    """Import what engines need, without starting a thread or touching a GPU."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that is gone is no news to us
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    """`python -m nbdist.supervisor.zygote RUNDIR`."""
    rundir = RunDir(Path(sys.argv[1]))
    preload()
    Zygote(rundir).run()


if __name__ == "__main__":
    main()
