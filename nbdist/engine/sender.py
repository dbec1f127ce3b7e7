"""Sends what the ring holds to the supervisor, ten times a second. Runs in the agent's thread.

What the socket does not take at once is dropped and counted, never waited for. While the supervisor
does not answer beats nothing is sent: what happens meanwhile waits in the ring, which is bounded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zmq

from nbdist.engine.emit import RING
from nbdist.engine.probe import Probe
from nbdist.protocol import wire
from nbdist.protocol.events import Telemetry
from nbdist.protocol.telemetry import LAYOUT, MAX_BATCH_RECORDS

if TYPE_CHECKING:
    from nbdist.engine.emit import Ring
    from nbdist.protocol.ids import Generation, Slot

SEND_PERIOD_S = 0.1
SAMPLE_PERIOD_S = 1.0
MAX_UNANSWERED = 8
"""Beats without an answer, a quarter of a second apart, after which nothing more is sent."""


class Sender:
    """One engine's.

    Args:
        slot: whose.
        ring: what is sent; default: this process's.
    """

    def __init__(self, slot: Slot, ring: Ring = RING) -> None:
        self._slot, self._ring = slot, ring
        self._probe = Probe()
        self._next_sample_s = self._next_send_s = 0.0

    def serve(
        self,
        socket: zmq.Socket[bytes],
        now_s: float,
        *,
        generation: Generation,
        num_unanswered: int,
    ) -> None:
        """Do what is due; called many times a second.

        Args:
            socket: the agent's.
            now_s: monotonic time.
            generation: whose group this engine is in.
            num_unanswered: beats that the supervisor has not acknowledged.
        """
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_PERIOD_S
            self._probe.sample()
        if now_s < self._next_send_s or num_unanswered > MAX_UNANSWERED:
            return
        self._next_send_s = now_s + SEND_PERIOD_S
        drained = self._ring.drain(MAX_BATCH_RECORDS)
        if not drained.records:
            return
        batch = Telemetry(
            slot=self._slot,
            pid=os.getpid(),
            generation=generation,
            first=drained.first,
            num_dropped=drained.num_dropped,
            layout=LAYOUT,
            records=drained.records,
        )
        try:
            socket.send(wire.encode(batch), zmq.NOBLOCK)
        except zmq.Again:
            self._ring.count_dropped(drained.num_records)
