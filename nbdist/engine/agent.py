"""The engine's side thread: beats, the lease, orders; frees the main thread by cutting its group.

It shares nothing with the main thread but a queue of events to send, the groups' sockets and the
name of the running cell. What has to happen in the main thread is posted to its loop and runs there
between cells. When no supervisor has acknowledged a beat for the length of the lease, the whole
process group of the engine ends, children included.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from nbdist.engine.sender import Sender
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import wire
from nbdist.protocol.ids import CellId, Generation, Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.engine.group import Groups
    from nbdist.engine.runs import Runs
    from nbdist.engine.whereabouts import Whereabouts
    from nbdist.rundir import RunDir

BEAT_PERIOD_S = 0.25
LOOK_PERIOD_S = 0.05
SEND_LIMIT_S = 1.0
"""Nobody waits longer for an event to be on its way."""
WAIT_IS_NEWS_S = 0.1
"""A wait of the main thread is reported once it is this long."""
END_LIMIT_S = 0.7
"""A main thread that has not ended by then after an order to end is not waited for."""

log = logging.getLogger(__name__)


class Agent:
    """One engine's agent.

    Args:
        rundir, slot: whose.
        groups: cut on `BreakGroup`.
        whereabouts: looks at the main thread.
        post: has an order carried out in the main thread.
    """

    def __init__(
        self,
        rundir: RunDir,
        slot: Slot,
        *,
        groups: Groups,
        whereabouts: Whereabouts,
        post: Callable[[od.AgentOrder], None],
    ) -> None:
        config, _, self._keys = rundir.read()
        self._rundir, self._slot, self._lease_s = rundir, slot, config.lease_s
        self._groups, self._whereabouts = groups, whereabouts
        self._post = post
        self.runs: Runs | None = None
        """Whose committed steps are reported; set once they are there."""
        self._outbox: queue.SimpleQueue[ev.Event | threading.Event] = queue.SimpleQueue()
        """What is to be sent, and what is to be set when all before it has arrived."""
        self._doubtful: list[tuple[int, threading.Event]] = []
        """What is to be set when the supervisor has acknowledged this beat, or a later one."""
        self._wakeup, self._woken = os.pipe()
        self._sent: dict[int, float] = {}
        self._sender = Sender(slot)
        self._lease_until = time.monotonic() + self._lease_s
        self._end_at: float | None = None
        self.hello: ev.EngineHello | None = None
        self._left: deque[CellId] = deque(maxlen=16)
        """The cells that ended here last."""
        self.cell: CellId | None = None
        """The cell that the main thread runs."""

    def start(self, hello: ev.EngineHello) -> None:
        """Begin; `hello` is said now and to every supervisor that takes over."""
        self.hello = hello
        threading.Thread(target=self._run_or_end, name="nbdist-agent", daemon=True).start()

    def tell(self, event: ev.Event) -> None:
        """Send an event; from any thread, never waits."""
        self._outbox.put(event)
        os.write(self._woken, b"x")

    def tell_at_once(self, event: ev.Event) -> None:
        """Send an event, and return when the supervisor has it: what follows may end this process.

        What a process that is killed has handed to its socket may never leave it.
        """
        self.tell(event)
        has_arrived = threading.Event()
        self._outbox.put(has_arrived)
        os.write(self._woken, b"x")
        has_arrived.wait(SEND_LIMIT_S)

    def leave_cell(self) -> None:
        """The main thread's cell is over."""
        if self.cell is not None:
            self._left.append(self.cell)
        self.cell = None

    # ---- the thread

    def _run_or_end(self) -> None:
        """An engine without its agent could not be freed: it ends, and its seat is filled again."""
        try:
            self._run()
        except BaseException:
            log.exception("the agent of slot %s has failed", self._slot)
            os.killpg(os.getpid(), signal.SIGKILL)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.identity = f"slot-{self._slot}-{os.getpid()}".encode()
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.linger = 500
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 200
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(self._rundir.endpoint)
        poller = zmq.Poller()
        for source in (socket, monitor, self._wakeup):
            poller.register(source, zmq.POLLIN)
        next_beat, number, told = 0.0, 0, (False, self.cell, 1.0)
        while True:
            ready = dict(poller.poll(int(LOOK_PERIOD_S * 1000)))
            now = time.monotonic()
            if monitor in ready:
                monitor.recv_multipart()
                self._greet(socket)
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            port = self.runs.port if self.runs is not None else None
            if port is not None:
                port.flush()
            while not self._outbox.empty():
                self._send(socket, self._outbox.get(), number + 1)
            if socket in ready:
                self._receive(socket)
            where = self._whereabouts.look(now)
            is_waiting = where is not None and now - where.since_s > WAIT_IS_NEWS_S
            news = (is_waiting, self.cell, self._slow_factor)
            is_asked = bool(self._doubtful) and self._doubtful[-1][0] > number
            if now >= next_beat or news != told or is_asked:
                number += 1
                self._beat(socket, number, where if is_waiting else None, now)
                next_beat, told = now + BEAT_PERIOD_S, news
            self._sender.serve(
                socket,
                now,
                generation=Generation(self._groups.generation),
                num_unanswered=len(self._sent),
            )
            self._end_in_time(now)

    def _greet(self, socket: zmq.Socket[bytes]) -> None:
        """Say to the supervisor, perhaps another one, who and where we are."""
        if self.hello is not None:
            socket.send(wire.encode(self.hello))
        if self.runs is not None:
            self.runs.repeat()

    def _end_in_time(self, now: float) -> None:
        if now > self._lease_until:
            self._end("no supervisor has renewed the lease")
        if self._end_at is not None and now > self._end_at:
            self._end("ordered to end")

    def _beat(
        self, socket: zmq.Socket[bytes], number: int, where: ev.Where | None, now: float
    ) -> None:
        self._sent[number] = now
        port = self.runs.port if self.runs is not None else None
        beat = ev.Beat(
            slot=self._slot,
            pid=os.getpid(),
            number=number,
            generation=Generation(self._groups.generation),
            cell=self.cell,
            waiting=where,
            rss_bytes=_rss_bytes(),
            step=port.begun if port is not None else None,
            is_patient=port is not None and port.is_patient,
            slow_factor=self._slow_factor,
        )
        socket.send(wire.encode(beat))

    def _send(
        self, socket: zmq.Socket[bytes], item: ev.Event | threading.Event, next_beat: int
    ) -> None:
        if isinstance(item, threading.Event):
            self._doubtful.append((next_beat, item))
        else:
            socket.send(wire.encode(item))

    def _settle_doubts(self, number: int) -> None:
        """What was sent before a beat that is acknowledged has arrived."""
        for beat, has_arrived in self._doubtful:
            if beat <= number:
                has_arrived.set()
        self._doubtful = [(beat, event) for beat, event in self._doubtful if beat > number]

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                order = wire.decode(socket.recv(zmq.NOBLOCK), od.AgentOrder)
            except zmq.Again:
                return
            match order:
                case od.AcknowledgeBeat(number=number):
                    if (sent := self._sent.pop(number, None)) is not None:
                        self._lease_until = sent + self._lease_s
                        self._sent = {n: at for n, at in self._sent.items() if n > number}
                    self._settle_doubts(number)
                case od.InterruptMain(cell=cell):
                    # An older cell that still runs stands in this one's way.
                    if self.cell is not None and cell not in self._left:
                        os.kill(os.getpid(), signal.SIGINT)
                case od.SlowDown(factor=factor) if self.runs is not None:
                    self.runs.slow_factor = factor
                case od.EndEngine():
                    self._end_at = time.monotonic() + END_LIMIT_S
                    self._post(order)
                case od.BreakGroup(generation=generation):
                    self._groups.cut(generation)
                    self._post(order)
                case _:
                    self._post(order)

    @property
    def _slow_factor(self) -> float:
        return self.runs.slow_factor if self.runs is not None else 1.0

    def _end(self, why: str) -> None:
        log.warning("engine of slot %s ends: %s", self._slot, why)
        os.killpg(os.getpid(), signal.SIGKILL)


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - four times a second
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
