"""The kernel's road to the supervisor: one thread, one socket.

It starts the supervisor, and replaces it when it is gone. Callers hand in orders and get futures;
the thread calls back with what the supervisor says by itself. The callbacks run in this thread:
they store and return.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import subprocess
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from nbdist.errors import NbdistError, RecoveryFailed, WrongState, named_error
from nbdist.processes import spawn
from nbdist.protocol import feed as fd
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.protocol.ids import CellId
    from nbdist.rundir import RunDir

PING_PERIOD_S = 0.5
SILENCE_LIMIT_S = 8.0
"""A supervisor that lives and answers nothing for this long is ended and replaced."""
MAX_REPLACEMENTS = 5
"""So many in a row that never answer mean that something else is wrong."""

LOST = "the supervisor is gone, and so is the cluster; %dist_reset, then %dist_init, start anew"

log = logging.getLogger(__name__)


class Link:
    """One kernel's connection.

    Args:
        rundir: the cluster's.
        notice: called with every `WorldView` and whatever else the supervisor says by itself.
        open_cells: asked for the cells that run, when a supervisor takes over.
        lost: called with the reason when there will be no supervisor any more.
    """

    def __init__(
        self,
        rundir: RunDir,
        *,
        notice: Callable[[Any], None],
        open_cells: Callable[[], Iterable[CellId]],
        lost: Callable[[str], None],
    ) -> None:
        self._rundir, self._notice = rundir, notice
        self.subscriptions: Callable[[], tuple[fd.Subscribe, ...]] = tuple
        """Asked for those to live views, when a supervisor takes over."""
        self._open_cells, self._lost = open_cells, lost
        _, _, self._keys = rundir.read()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[od.Request, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[od.Request] = queue.SimpleQueue()
        self._wakeup, self._woken = os.pipe()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        self._is_attached = False
        self._is_lost = False
        self._is_ending = False
        """A shutdown was ordered: a supervisor that ends is not replaced."""
        self._sent: set[int] = set()
        self._heard = 0.0
        self._num_replacements = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="nbdist-link", daemon=True)

    def start(self) -> None:
        """Start the supervisor and the thread."""
        self._start_supervisor()
        self._thread.start()

    def ask(self, order: od.KernelOrder, timeout: float | None = None) -> Any:
        """Send an order and wait for its answer.

        Raises:
            NbdistError: what the supervisor answered, as the error it names.
            TimeoutError: no answer in `timeout` seconds.
        """
        future: Future[Any] = Future()
        request = od.Request(number=next(self._numbers), order=order)
        with self._lock:
            if self._is_closing:
                raise WrongState("the cluster is shut down")
            if self._is_lost:
                raise RecoveryFailed(LOST)
            self._is_ending = self._is_ending or isinstance(order, od.Shutdown)
            self._pending[request.number] = (request, future)
        self._put(request)
        try:
            body = future.result(timeout)
        except TimeoutError:
            what = type(order).__name__
            text = f"the supervisor has not answered {what} within {timeout:g} s; see its log"
            raise TimeoutError(text) from None
        finally:
            with self._lock:
                self._pending.pop(request.number, None)
        if isinstance(body, od.Refused):
            raise named_error(body.kind, body.message)
        return body

    def say(self, order: od.KernelOrder) -> None:
        """Send an order and await no answer; a supervisor that takes over is told it again."""
        request = od.Request(number=next(self._numbers), order=order)
        with self._lock:
            self._pending[request.number] = (request, Future())
        self._put(request)

    def post(self, order: od.KernelOrder) -> None:
        """Send an order that wants no answer, once: with a supervisor that ends it may be lost."""
        self._put(od.Request(number=0, order=order))

    def close(self) -> None:
        """End the thread; the supervisor is ended by an order, not here. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closing = self._is_closed = True
            os.write(self._woken, b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5)
        os.close(self._wakeup)
        os.close(self._woken)
        if self._supervisor is not None:
            try:
                self._supervisor.wait(3)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait(3)

    def _put(self, request: od.Request) -> None:
        self._outbox.put(request)
        with self._lock:
            if not self._is_closed:
                os.write(self._woken, b"x")

    def _start_supervisor(self) -> None:
        self._supervisor = spawn(self._rundir, "nbdist.supervisor", "supervisor")
        self._heard = time.monotonic()

    # ---- the thread

    def _run(self) -> None:
        context = zmq.Context()
        socket = self._connect(context)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(events)
        poller = zmq.Poller()
        for source in (socket, monitor, self._wakeup):
            poller.register(source, zmq.POLLIN)
        next_ping = 0.0
        while not self._is_closing:
            ready = dict(poller.poll(100))
            now = time.monotonic()
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                self._is_attached = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if self._is_attached:
                    self._attach(socket)
            while self._is_attached and not self._outbox.empty():
                self._send(socket, self._outbox.get())
            if socket in ready:
                self._receive(socket, now)
            if self._is_attached and now >= next_ping:
                next_ping = now + PING_PERIOD_S
                self._send(socket, od.Request(number=-1, order=od.Ping()))
            self._watch(now)
        socket.disable_monitor()
        context.destroy(linger=200)
        self._fail_pending(WrongState("the cluster is shut down"))

    def _connect(self, context: zmq.Context[Any]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.identity = f"kernel-{os.getpid()}".encode()
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.immediate = True
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 100
        socket.connect(self._rundir.endpoint)
        return socket

    def _send(self, socket: zmq.Socket[bytes], request: od.Request) -> None:
        """Never waits: what a broken connection does not take is asked again on the next one."""
        try:
            data = wire.encode(request)
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(request, f"{type(request.order).__name__} cannot be sent: {error}")
            return
        self._sent.add(request.number)
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._is_attached = False

    def _refuse(self, request: od.Request, message: str) -> None:
        with self._lock:
            _, future = self._pending.pop(request.number, (None, None))
        if future is not None:
            _resolve(future, od.Refused(kind="NbdistError", message=message))

    def _attach(self, socket: zmq.Socket[bytes]) -> None:
        """Say hello and ask again what was not answered.

        Called when a supervisor is there: the first one, or one that took over.
        """
        order = od.Attach(
            pid=os.getpid(),
            open_cells=tuple(self._open_cells()),
            subscriptions=self.subscriptions(),
        )
        self._send(socket, od.Request(number=-1, order=order))
        with self._lock:
            self._sent &= set(self._pending)
            pending = [self._pending[n] for n in sorted(self._sent)]
        for request, future in pending:
            if _is_done_twice_if_asked_twice(request.order):
                text = (
                    "the supervisor was replaced during this order: "
                    "look at %dist_status before ordering it again"
                )
                _resolve(future, od.Refused(kind="WrongState", message=text))
            else:
                self._send(socket, request)

    def _receive(self, socket: zmq.Socket[bytes], now: float) -> None:
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard, self._num_replacements = now, 0
            try:
                notice = wire.decode(data, od.Notice)
            except wire.WireError as error:
                log.warning("from the supervisor: %s", error)
                continue
            if not isinstance(notice, od.Answer):
                self._notice(notice)
                continue
            if isinstance(notice.body, od.WorldView):
                self._notice(notice.body)
            with self._lock:
                _, future = self._pending.pop(notice.number, (None, None))
            self._sent.discard(notice.number)
            if future is not None:
                _resolve(future, notice.body)

    def _watch(self, now: float) -> None:
        """Replace a supervisor that has ended, or that answers nothing."""
        if self._is_ending and (self._supervisor is None or self._supervisor.poll() is not None):
            self._end_unanswered()
        if self._is_closing or self._is_ending or self._supervisor is None:
            return
        has_ended = self._supervisor.poll() is not None
        if not has_ended and now - self._heard > SILENCE_LIMIT_S:
            log.warning("the supervisor (pid %s) is silent; it is replaced", self._supervisor.pid)
            self._supervisor.kill()
            self._supervisor.wait(3)
            has_ended = True
        if not has_ended:
            return
        if not self._rundir.path.exists() or self._num_replacements >= MAX_REPLACEMENTS:
            self._is_lost, self._supervisor = True, None
            self._fail_pending(RecoveryFailed(LOST))
            self._lost(LOST)
            return
        self._num_replacements += 1
        self._start_supervisor()

    def _end_unanswered(self) -> None:
        """The supervisor's last answer may be lost as it closes its sockets; its end says as much.

        The folder's end, where it is not this kernel's child.
        """
        if self._supervisor is not None or not self._rundir.path.exists():
            self._fail_pending(WrongState("the cluster is shut down"))

    def _fail_pending(self, error: NbdistError) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for _, future in pending.values():
            if not future.done():
                future.set_exception(error)


def _is_done_twice_if_asked_twice(order: od.KernelOrder) -> bool:
    """Whether the supervisor that was asked first may have done it, and another would again."""
    is_step = isinstance(order, rn.SteerRun) and order.action == "step"
    return is_step or isinstance(order, od.SignalEngines | rn.BeginRun)


def _resolve(future: Future[Any], body: Any) -> None:
    if not future.done():
        future.set_result(body)
