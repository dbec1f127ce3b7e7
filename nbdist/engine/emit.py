"""Telemetry of this engine: `span`, `scalar` and `instant` write into a ring, the agent empties it.

Called in the hot path by the main thread and by torch's own threads (gradient hooks, futures). A
call costs well under a microsecond, never waits and never raises: the ring was allocated when this
module was loaded, a full one overwrites its oldest records, and whatever is lost is counted.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nbdist.protocol.telemetry import PACKED, RECORD, Kind
from nbdist.protocol.traffic import SHARES, Axis, Op, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "RING",
    "Drained",
    "Ring",
    "Sum",
    "begin_sent",
    "begin_step",
    "bucket_done",
    "exchange",
    "exchanged",
    "instant",
    "scalar",
    "sent",
    "span",
    "tell_sent",
]

NUM_RECORDS = 4096

_now_ns = time.perf_counter_ns


class Drained(NamedTuple):
    """What was taken out of a ring."""

    records: bytes
    """In the order of their numbers, of layout `RECORD`; empty: there was nothing new."""
    first: int
    """Number of the first record; 0 where there is none."""
    num_dropped: int
    """Records that were lost since the ring was made."""

    @property
    def num_records(self) -> int:
        """How many were taken out."""
        return len(self.records) // RECORD.itemsize


class _Context:
    """What the next records belong to; one attribute, so that a writer finds it whole."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = (0, 0, 0)


def _writer(
    buffer: bytearray, num_records: int, context: _Context
) -> Callable[[int, int, int, int, float], None]:
    """The function that writes into a ring; its names are its own, since that is fastest."""
    pack_into, size, next_number = (
        struct.Struct(PACKED).pack_into,
        RECORD.itemsize,
        count(1).__next__,
    )

    def put(kind: int, t0_ns: int, t1_ns: int, ident: int, value: float) -> None:
        try:
            number = next_number()
            step, generation, attempt = context.now
            start = number % num_records * size
            pack_into(
                buffer,
                start,
                t0_ns,
                t1_ns,
                value,
                step,
                generation,
                ident,
                kind,
                attempt,
                number,
            )
        except Exception:  # noqa: BLE001 - never into training; the missing number is counted
            return

    return put


class Ring:
    """The last records of any number of writing threads, for one thread that takes them out.

    It needs no lock: under the interpreter's own, taking a number is one step and so is writing a
    whole record. Between the two a writer may be held up, so that a record is missing for a moment.
    """

    def __init__(self, num_records: int = NUM_RECORDS) -> None:
        self._num_records = num_records
        self._buffer = bytearray(num_records * RECORD.itemsize)
        self._context = _Context()
        self._next = 1
        self._waited_for = 0
        self._num_dropped = 0
        self.put = _writer(self._buffer, num_records, self._context)
        """(kind, t0_ns, t1_ns, ident, value): write one record; from any thread."""

    def begin_step(self, step: int, generation: int, *, attempt: int = 0) -> None:
        """From now on records belong to this attempt at this step."""
        self._context.now = (step, generation, attempt)

    def drain(self, max_records: int) -> Drained:
        """Take out the oldest records that were not taken yet; for one thread only."""
        copy = np.frombuffer(bytes(self._buffer), RECORD)  # copied in one step, see above
        newest = int(copy["number"].max())
        wanted = np.arange(max(self._next, newest - self._num_records + 1), newest + 1)
        places = wanted % self._num_records
        is_there = copy["number"][places] == wanted
        # What is missing between others may be about to be written: it has until the next call.
        missing = wanted[~is_there & (wanted > self._waited_for)]
        end = int(missing[0]) if missing.size else newest + 1
        if missing.size:
            self._waited_for = newest
        chosen = wanted[is_there & (wanted < end)][:max_records]
        if chosen.size == max_records:
            end = int(chosen[-1]) + 1
        self._num_dropped += max(0, end - self._next - chosen.size)
        self._next = max(self._next, end)
        records = copy[chosen % self._num_records].tobytes()
        return Drained(records, int(chosen[0]) if chosen.size else 0, self._num_dropped)

    def count_dropped(self, num_records: int) -> None:
        """So many that were taken out came to nothing; for the thread that takes them out."""
        self._num_dropped += num_records


class Sum:
    """Something that any thread adds to, and one reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0.0
        """Of all that was added since it began."""
        self.is_new = True
        """Nothing of it was told since it began."""

    def add(self, value: float) -> None:
        """So much more; from any thread."""
        with self._lock:
            self.total += value

    def begin(self) -> None:
        """Count from 0 on."""
        with self._lock:
            self.total, self.is_new = 0.0, True


RING = Ring()
"""The ring of this process."""
_SENT = Sum()

begin_step = RING.begin_step
begin_sent = _SENT.begin
"""This rank begins with a run: what it sends is counted from now on."""
sent = _SENT.add
"""(bytes): this rank has to send so much more."""
_put = RING.put


def tell_sent() -> None:
    """What this rank has had to send so far; of one that has nobody to send to nothing is told.

    Before the first time a 0 says that it has begun: what is told next may be as much as an engine
    in its place had told last.
    """
    total = _SENT.total
    if not total:
        return
    if _SENT.is_new:
        scalar(Kind.SENT, 0.0)
        _SENT.is_new = False
    scalar(Kind.SENT, total)


def span(kind: Kind, t0_ns: int, t1_ns: int, *, ident: int = 0, value: float = 0.0) -> None:
    """Something lasted from `t0_ns` to `t1_ns`, by `time.perf_counter_ns`."""
    _put(kind, t0_ns, t1_ns, ident, value)


@contextlib.contextmanager
def exchange(op: Op, axis: Axis, num_ranks: int, num_bytes: int) -> Iterator[None]:
    """Within, so many ranks exchange something, of which this one hands over so much.

    Nothing is told of one that fails.
    """
    began_ns = _now_ns()
    yield
    exchanged(op, axis, num_ranks, num_bytes, began_ns)


def exchanged(op: Op, axis: Axis, num_ranks: int, num_bytes: int, began_ns: int) -> None:
    """The same, where it does not end in the thread that began it."""
    _put(Kind.COLLECTIVE, began_ns, _now_ns(), packed(op, axis, num_ranks), num_bytes)
    sent(num_bytes * SHARES[op][1](num_ranks))


def bucket_done(op: Op, num_ranks: int, launched_ns: int, index: int, num_bytes: int) -> None:
    """A bucket of gradients has been summed by one exchange."""
    _put(Kind.BUCKET_DONE, launched_ns, _now_ns(), index, num_bytes)
    exchanged(op, Axis.DATA, num_ranks, num_bytes, launched_ns)


def scalar(kind: Kind, value: float, *, ident: int = 0) -> None:
    """Something has this value now."""
    now_ns = _now_ns()
    _put(kind, now_ns, now_ns, ident, value)


def instant(kind: Kind, ident: int = 0) -> None:
    """Something happens now."""
    now_ns = _now_ns()
    _put(kind, now_ns, now_ns, ident, 0.0)
