"""Takes in the telemetry of engines: checks it, counts what is missing, keeps it and records it.

Called by the supervisor's one thread. Whatever an engine sends, it harms nothing here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.telemetry import BatchError, decode_records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.events import Telemetry
    from nbdist.protocol.ids import Generation, Slot
    from nbdist.supervisor.record import Recorder
    from nbdist.supervisor.series import Series

MAX_SOURCES = 1_024
"""Engines that are told apart; of those that sent nothing for longest the counts are summed up."""
MAX_LOGGED = 20
"""Malformed batches that are logged; more are counted only."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Received:
    """What has come from one engine, or from all."""

    num_records: int = 0
    num_missing: int = 0
    """Records whose numbers are missing between others: lost in the engine or on the way."""
    num_dropped: int = 0
    """Records that the engines say they have lost."""
    num_late: int = 0
    """Records of a generation that was over when they came."""
    num_malformed: int = 0
    """Batches that could not be read; their records are missing."""

    def __iadd__(self, other: Received) -> Received:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
        return self


class Collector:
    """Of one cluster.

    Args:
        series: where the records are kept.
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        self.recorder: Recorder | None = None
        """Where they are written, too, while a run is recorded."""
        self._sources: dict[tuple[Slot, int], _Source] = {}
        self._gone = Received()

    @property
    def total(self) -> Received:
        """Sums over all engines that there ever were."""
        total = Received()
        for part in (self._gone, *(source.received for source in self._sources.values())):
            total += part
        return total

    def received(self, slot: Slot, pid: int) -> Received:
        """What has come from one engine."""
        source = self._sources.get((slot, pid))
        return source.received if source is not None else Received()

    def take(self, event: Telemetry, generation: Generation) -> None:
        """One batch; `generation`: the world's at this moment."""
        source = self._source(event)
        try:
            records = source.read(event)
        except BatchError as error:
            source.received.num_malformed += 1
            if self.total.num_malformed <= MAX_LOGGED:
                log.warning("telemetry of slot %s (pid %s): %s", event.slot, event.pid, error)
            return
        num_late = int(np.count_nonzero(records["generation"] < generation))
        source.received.num_late += num_late
        self.series.add(event.slot, records)
        if self.recorder is not None:
            self.recorder.telemetry(event, records, num_late=num_late)

    def _source(self, event: Telemetry) -> _Source:
        key = (event.slot, event.pid)
        source = self._sources.pop(key, None) or _Source()
        self._sources[key] = source  # the last to be heard of stands last
        if len(self._sources) > MAX_SOURCES:
            self._gone += self._sources.pop(next(iter(self._sources))).received
        return source


class _Source:
    """One engine."""

    def __init__(self) -> None:
        self.received = Received()
        self._next = 0
        """Number that its next record should have; 0: not known, nothing came yet."""

    def read(self, event: Telemetry) -> NDArray[np.void]:
        records = decode_records(event.layout, event.records)
        numbers = records["number"]
        if event.first != numbers[0]:
            raise BatchError(f"begins with record {numbers[0]}, said to be {event.first}")
        if numbers[0] < self._next:
            raise BatchError(f"begins with record {numbers[0]}, expected {self._next} or later")
        # What came before this supervisor did is nothing that it missed.
        expected = self._next or int(numbers[0])
        self._next = int(numbers[-1]) + 1
        self.received.num_records += len(records)
        self.received.num_missing += self._next - expected - len(records)
        self.received.num_dropped = max(self.received.num_dropped, event.num_dropped)
        return records
