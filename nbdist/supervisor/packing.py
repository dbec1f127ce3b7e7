"""Packs frames for one reader: what is new of a run and its world since the frame before. Pure.

It remembers how far its reader has come, and nothing else: a frame that is made later holds more,
so that nothing waits in a queue. Series that are long are thinned out to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.protocol.story import is_known
from nbdist.protocol.thinning import thin
from nbdist.supervisor.agreements import AgreementReader
from nbdist.supervisor.attempts import Reader
from nbdist.supervisor.details import DETAILS, DetailReader
from nbdist.supervisor.memories import DistanceReader, MemoryReader, SentReader
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.planned import PlanReader
from nbdist.supervisor.view import view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.protocol.events import Incident
    from nbdist.supervisor.changes import Changes
    from nbdist.supervisor.collector import Collector
    from nbdist.supervisor.run import Run
    from nbdist.supervisor.series import Series
    from nbdist.supervisor.state import Machine

IDLE_PERIOD_S = 1.0
"""Where nothing is new a frame that says so is sent that often."""
SILENT_S = 2
"""Beats come four times a second: an engine of which none came for so long is told as silent."""
MAX_INCIDENTS = 60
"""In a frame: the last ones. Older ones do not change any more."""
MAX_EVALUATIONS = 100
MAX_TEXT = 300
"""Characters of what is said in words."""
MAX_NAME = 80
"""Characters of what is only named."""
MAX_METRICS = 16
MAX_NAMES = 8
"""That could not be restored, of an incident."""
NUM_AT_LEAST = 5
"""Incidents and evaluations that even the fullest frame has room for."""


@dataclass(frozen=True)
class Room:
    """Rows of a frame at most."""

    rows: int
    steps: int
    """Over all slots."""
    details: int
    """Spans, and as many buckets."""
    memory: int
    changes: int


SNAPSHOT = Room(rows=1_000, steps=1_200, details=400, memory=400, changes=500)
WHOLE = Room(rows=1_000, steps=800, details=1_000, memory=300, changes=400)
"""Of a run that is over: with the last steps and the worst of a few ranks."""
DELTA = Room(rows=400, steps=500, details=250, memory=128, changes=250)
_SHRINKS = (1.0, 0.5, 0.2)
"""A frame that would be too large is made again with so much of the room."""


@dataclass(frozen=True)
class Sources:
    """What frames are made from; all of one cluster."""

    cluster: str
    machine: Machine
    collector: Collector
    changes: Changes


class Packer:
    """For one reader, from a snapshot on.

    Args:
        sources: the cluster's.
        run: which run; None: there is none yet.
        since: when it began, by the monotonic clock.
        views: what is wanted.
        width: of the widest chart, in pixels.
    """

    def __init__(
        self,
        sources: Sources,
        run: Run | None,
        *,
        since: float,
        views: Sequence[tb.View],
        width: int,
    ) -> None:
        self._sources, self.run, self._width = sources, run, width
        self._wanted = {table for view in views for table in tb.TABLES_OF[view]}
        self.is_first = True
        """Nothing was packed yet: the next frame is a snapshot."""
        self._next_row = run.progress.first if run is not None else 0
        self._num_replaced = run.progress.num_replaced if run is not None else 0
        self._num_evaluations = self._num_seats = self._num_phases = 0
        self._attempts, self._details = Reader(since), DetailReader(since)
        self._plans, self._memories = PlanReader(since), MemoryReader(since)
        self._distances, self._agreements = DistanceReader(since), AgreementReader(since)
        self._sent = SentReader(since)
        self._since = since
        self._told: dict[int, Incident] = {}
        self._num_before = self._incidents_before()
        self._last: fr.Header | None = None
        self._last_at = 0.0

    def pack(self, seq: int, now: float, *, is_live: bool = True, delayed: int = 0) -> bytes | None:
        """The next frame; None where nothing is new and the last one is not old."""
        room = (SNAPSHOT if is_live else WHOLE) if self.is_first else DELTA
        tables = self._read(now, room, is_live=is_live)
        header = self._header(seq, now, is_live=is_live, delayed=delayed)
        has_rows = any(map(tb.num_rows, chain.from_iterable(tables.values())))
        if not has_rows and self._is_old_news(header, now):
            return None
        self._last, self._last_at, self.is_first = header, now, False
        data = b""
        for share in _SHRINKS:
            fitted, thinned = self._fit(tables, room, share)
            header = _trimmed(header) if share == _SHRINKS[-1] else header
            data = fr.pack(msgspec.structs.replace(header, thinned=thinned), fitted)
            if len(data) <= fr.MAX_BYTES:
                break
        return data

    def _is_old_news(self, header: fr.Header, now: float) -> bool:
        last = self._last
        if last is None or header.incidents or header.evaluations or not header.is_live:
            return False
        same = msgspec.structs.replace(
            header,
            seq=last.seq,
            kind=last.kind,
            clock_s=last.clock_s,
            incidents=last.incidents,
            evaluations=last.evaluations,
        )
        return same == last and now - self._last_at < IDLE_PERIOD_S

    # ---- tables

    def _read(self, now: float, room: Room, *, is_live: bool) -> dict[str, list[tb.Table]]:
        """What is new: of each table parts, a part for each slot where it has slots."""
        series, changes = self._sources.collector.series, self._sources.changes
        settled = now if is_live else np.inf
        tables: dict[str, list[tb.Table]] = {}
        if self.run is not None and "rows" in self._wanted:
            tables["rows"] = [self._rows(self.run)]
        if self.run is not None and "steps" in self._wanted:
            tables["steps"] = self._attempts.read(series, settled)
        if self.run is not None and self._wanted.intersection(DETAILS):
            until = now if is_live else now + 1.0
            details = self._details.read(series, until, room.details, with_worst=not is_live)
            tables |= {name: [table] for name, table in details.items() if name in self._wanted}
        if self.run is not None:
            tables |= self._told_of(series)
        if "seats" in self._wanted:
            tables["seats"] = [changes.seats.since(self._num_seats, room.changes)]
            self._num_seats = changes.seats.num
        if "phases" in self._wanted:
            tables["phases"] = [changes.phases.since(self._num_phases, room.changes)]
            self._num_phases = changes.phases.num
        return tables

    def _told_of(self, series: Series) -> dict[str, list[tb.Table]]:
        """What is new of those tables whose readers know themselves how far they have come."""
        readers: dict[str, Callable[[], list[tb.Table]]] = {
            "plans": lambda: [self._plans.read(series)],
            "sent": lambda: self._sent.read(series),
            "memory": lambda: self._memories.read(series),
            "distance": lambda: self._distances.read(series),
            "agreement": lambda: [self._agreements.read(series.agreements)],
        }
        return {name: read() for name, read in readers.items() if name in self._wanted}

    def _rows(self, run: Run) -> tb.Table:
        progress = run.progress
        self._next_row -= progress.num_replaced - self._num_replaced
        self._num_replaced = progress.num_replaced
        rows = progress.rows[max(0, self._next_row - progress.first) :]
        self._next_row = progress.step
        rows = rows[is_known(rows)]
        return {column: rows[column] for column in tb.TABLES["rows"]}

    def _fit(
        self, tables: dict[str, list[tb.Table]], room: Room, share: float
    ) -> tuple[dict[str, tb.Table], tuple[str, ...]]:
        """One table of each name, thinned out to its room; which ones were."""
        fitted, thinned = {}, []
        most = {"rows": room.rows, "steps": room.steps, "memory": room.memory}
        most["distance"] = most["sent"] = room.memory
        for name, parts in tables.items():
            kept = [part for part in parts if tb.num_rows(part)]
            num = sum(map(tb.num_rows, kept))
            if name in DETAILS and share < 1.0:
                kept = []
            elif name in most and kept:
                rows_each = max(4, min(int(most[name] * share) // len(kept), 2 * self._width))
                kept = [thin(name, part, rows_each) for part in kept]
            if sum(map(tb.num_rows, kept)) < num:
                thinned.append(name)
            if kept:
                fitted[name] = {
                    column: np.concatenate([part[column] for part in kept])
                    for column in tb.TABLES[name]
                }
        return fitted, tuple(thinned)

    # ---- the header

    def _header(self, seq: int, now: float, *, is_live: bool, delayed: int) -> fr.Header:
        kind: Literal["snapshot", "delta"] = "snapshot" if self.is_first else "delta"
        return fr.Header(
            seq=seq,
            kind=kind,
            clock_s=now,
            cluster=self._sources.cluster,
            run=self._run_part(),
            is_live=is_live,
            world=_world(self._sources.machine, now),
            incidents=self._incidents(),
            evaluations=self._evaluations(),
            counters=self._counters(delayed),
        )

    def _run_part(self) -> fr.Run | None:
        machine, run = self._sources.machine, self.run
        if run is None:
            return None
        view = run.view(is_whole=machine.phase is Phase.RUNNING)
        fault = f"{run.fault.kind}: {run.fault.message}" if run.fault is not None else ""
        return fr.Run(
            run=run.spec.run,
            name=run.spec.name,
            state=view.state,
            first=run.progress.first - run.progress.num_dropped,
            step=run.progress.step,
            target=run.target,
            durable=run.progress.durable(machine.membership.slots),
            until=run.until,
            usual_s=run.progress.usual_s(),
            fault=fault[:MAX_TEXT],
            samples=run.progress.num_samples,
            seconds=run.progress.seconds,
        )

    def _incidents(self) -> tuple[fr.Numbered, ...]:
        story = self._sources.machine.story
        num_since = story.num_begun - self._num_before
        recent = list(story.incidents)[-min(MAX_INCIDENTS, num_since) :] if num_since else []
        first = num_since - len(recent) + 1
        news = []
        for number, incident in enumerate(recent, first):
            if self._told.get(number) != incident:
                self._told[number] = msgspec.structs.replace(incident)
                news.append(fr.Numbered(number=number, incident=_shortened(incident)))
        self._told = {number: told for number, told in self._told.items() if number >= first}
        return tuple(news)

    def _incidents_before(self) -> int:
        """Incidents of the cluster that had begun before the run."""
        story, rows = self._sources.machine.story, self.run.progress.rows if self.run else None
        if rows is None:
            return 0
        since = self._since
        if len(rows := rows[is_known(rows)]):  # another supervisor may have seen it begin
            since = min(since, float(rows["at"][0] - rows["seconds"][0]))
        if not math.isfinite(since):
            return 0
        later = [i for i in story.incidents if i.began_at is None or i.began_at >= since]
        return story.num_begun - len(later)

    def _evaluations(self) -> tuple[fr.Evaluated, ...]:
        if self.run is None:
            return ()
        news = self.run.evaluations[self._num_evaluations :][-MAX_EVALUATIONS:]
        self._num_evaluations = len(self.run.evaluations)
        return tuple(fr.Evaluated(step=e.step, at=e.at, metrics=_metrics(e.metrics)) for e in news)

    def _counters(self, delayed: int) -> fr.Counters:
        collector, story = self._sources.collector, self._sources.machine.story
        total = collector.total
        return fr.Counters(
            records=total.num_records,
            missing=total.num_missing,
            dropped=total.num_dropped,
            late=total.num_late,
            malformed=total.num_malformed,
            no_room=collector.series.num_refused + collector.series.num_left_out,
            rows_dropped=self.run.progress.num_dropped if self.run is not None else 0,
            incidents_left_out=max(0, story.num_begun - self._num_before - MAX_INCIDENTS),
            delayed=delayed,
        )


def _world(machine: Machine, now: float) -> fr.World:
    view = view_of(machine, with_beats=True)
    heard = {slot: seat.heard_at for slot, seat in machine.seats.items()}
    return fr.World(
        phase=view.phase,
        generation=view.membership.generation,
        world_size=view.membership.world_size,
        size=view.size,
        healthy=view.healthy,
        reason=view.reason[:MAX_TEXT],
        seats=tuple(
            fr.Seat(
                slot=seat.slot,
                rank=seat.rank,
                state=seat.state,
                pid=seat.pid,
                host=seat.host,
                device=seat.device,
                generation=seat.generation,
                memory_bytes=seat.rss_bytes,
                activity=seat.activity[:MAX_TEXT],
                slow_factor=seat.slow_factor,
                num_not_restored=len(seat.not_restored),
                silent_s=_silent_s(heard[seat.slot], now) if seat.rank is not None else 0.0,
            )
            for seat in view.seats
        ),
    )


def _silent_s(heard_at: float | None, now: float) -> float:
    """Whole seconds since the last beat: what changes all the time would make each frame new."""
    seconds = 0 if heard_at is None else int(now - heard_at)
    return float(seconds) if seconds >= SILENT_S else 0.0


def _trimmed(header: fr.Header) -> fr.Header:
    """With the last incidents and evaluations only."""
    return msgspec.structs.replace(
        header,
        incidents=header.incidents[-NUM_AT_LEAST:],
        evaluations=header.evaluations[-NUM_AT_LEAST:],
    )


def _metrics(metrics: dict[str, float]) -> dict[str, float | None]:
    first = list(metrics.items())[:MAX_METRICS]
    return {name[:MAX_NAME]: value if math.isfinite(value) else None for name, value in first}


def _shortened(incident: Incident) -> Incident:
    names = list(incident.not_restored.items())
    kept = {name[:MAX_NAME]: why[:MAX_NAME] for name, why in names[:MAX_NAMES]}
    if len(names) > MAX_NAMES:
        kept["…"] = f"and {len(names) - MAX_NAMES} more"
    return msgspec.structs.replace(
        incident,
        not_restored=kept,
        cause=incident.cause[:MAX_TEXT],
        reason=incident.reason[:MAX_TEXT],
    )
