"""A made-up engine, whose telemetry is like that of one that trains."""

from __future__ import annotations

import pytest

from nbdist.engine.emit import Ring
from nbdist.protocol.events import Telemetry
from nbdist.protocol.telemetry import LAYOUT, MAX_BATCH_RECORDS, Kind, decode_records

MS = 1_000_000


class MadeUpEngine:
    """Writes into a ring of its own, by a clock that only its steps move."""

    def __init__(self, slot=0, pid=100, *, now_ns=1_000_000 * MS):
        self.slot, self.pid, self.now_ns = slot, pid, now_ns
        self.ring = Ring()

    def spend(self, kind, ms, **more):
        """A span that begins now."""
        began, self.now_ns = self.now_ns, self.now_ns + int(ms * MS)
        self.put(kind, began, self.now_ns, **more)

    def put(self, kind, t0_ns=None, t1_ns=None, *, ident=0, value=0.0):
        """One record; by default of this moment."""
        t0_ns = self.now_ns if t0_ns is None else t0_ns
        self.ring.put(kind, t0_ns, t0_ns if t1_ns is None else t1_ns, ident, value)

    def step(self, step, *, generation=1, attempt=0, loss=2.0, num_buckets=2, tail_ms=1.0):
        """One step of 10 ms and its tail: the communication after the backward."""
        self.ring.begin_step(step, generation, attempt=attempt)
        began = self.now_ns
        self.spend(Kind.DATA, 1)
        self.spend(Kind.FORWARD, 3)
        for bucket in range(num_buckets):
            self.spend(Kind.BACKWARD, 4 / num_buckets)
            self.put(Kind.BUCKET_READY, ident=bucket)
            self.put(Kind.BUCKET_LAUNCH, ident=bucket)
        ready = self.now_ns
        for bucket in range(num_buckets):
            done = ready + int(tail_ms * MS)
            self.put(Kind.BUCKET_DONE, ready, done, ident=bucket, value=1e6)
        self.now_ns += int(tail_ms * MS)
        self.spend(Kind.VOTE, 1)
        self.spend(Kind.OPTIMIZER, 1)
        self.put(Kind.STEP, began, self.now_ns)
        self.put(Kind.SAMPLES, value=16)
        self.put(Kind.LOSS, value=loss)

    def batch(self, *, generation=1):
        """What an agent would send now; None: nothing."""
        drained = self.ring.drain(MAX_BATCH_RECORDS)
        if not drained.records:
            return None
        return Telemetry(
            slot=self.slot,
            pid=self.pid,
            generation=generation,
            first=drained.first,
            num_dropped=drained.num_dropped,
            layout=LAYOUT,
            records=drained.records,
        )

    def records(self):
        """Likewise, decoded."""
        batch = self.batch()
        return decode_records(batch.layout, batch.records)


@pytest.fixture
def made_up():
    """The class; a test makes the engines that it needs."""
    return MadeUpEngine
