"""What happened when in the last steps, as tables of spans and buckets. Pure.

Of quick steps only some fit into a frame: the newest, each with all slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.frames import TABLES
from nbdist.protocol.telemetry import Kind
from nbdist.supervisor.attempts import SETTLED_S
from nbdist.supervisor.timeline import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.protocol.frames import Table
    from nbdist.protocol.ids import Slot
    from nbdist.supervisor.series import Series
    from nbdist.supervisor.timeline import StepTimeline

_BUCKETS = (int(Kind.BUCKET_READY), int(Kind.BUCKET_LAUNCH), int(Kind.BUCKET_DONE))
_FIRST = Key(-1, -1, -1)


class DetailReader:
    """How far somebody has read.

    Args:
        since: what began before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since_ns = since * 1e9
        self._last = _FIRST

    def read(self, series: Series, now: float, max_rows: int) -> dict[str, Table]:
        """Spans and buckets of the newest steps that were not read, at most so many rows of each.

        Where even one step is larger, some of its slots are left out.
        """
        steps = self._new(series, int((now - SETTLED_S) * 1e9))
        if steps:
            self._last = max(steps)
        spans: list[tuple[float, ...]] = []
        buckets: list[tuple[float, ...]] = []
        for key in sorted(steps, reverse=True):
            its_spans: list[tuple[float, ...]] = []
            its_buckets: list[tuple[float, ...]] = []
            for slot, timeline in steps[key]:
                span_rows = list(_spans(slot, timeline))
                bucket_rows = list(_buckets(slot, timeline))
                room = max_rows - max(
                    len(spans) + len(its_spans) + len(span_rows),
                    len(buckets) + len(its_buckets) + len(bucket_rows),
                )
                if room < 0 and (spans or buckets):
                    return _tables(spans, buckets)  # this step is not whole
                if room < 0:
                    break
                its_spans += span_rows
                its_buckets += bucket_rows
            spans += its_spans
            buckets += its_buckets
        return _tables(spans, buckets)

    def _new(self, series: Series, settled_ns: int) -> dict[Key, list[tuple[Slot, StepTimeline]]]:
        """The steps that were not read and of which nothing more will come."""
        steps: dict[Key, list[tuple[Slot, StepTimeline]]] = {}
        for slot in series.slots:
            for timeline in reversed(series.last_steps(slot)):
                records = timeline.records
                if timeline.key <= self._last or not len(records):
                    break
                if records["t0_ns"].min() < self._since_ns:
                    break
                steps.setdefault(timeline.key, []).append((slot, timeline))
        return {
            key: parts
            for key, parts in steps.items()
            if all(timeline.records["t1_ns"].max() <= settled_ns for _, timeline in parts)
        }


def _spans(slot: Slot, timeline: StepTimeline) -> Iterable[tuple[float, ...]]:
    """Rows of the table, columns in its order; the whole step and its compute are in others."""
    key = timeline.key
    for kind, ident, t0_ns, t1_ns, _ in _columns(timeline):
        if Kind.FORWARD <= kind < Kind.BUCKET_READY:
            at = (t0_ns * 1e-9, t1_ns * 1e-9)
            yield (key.step, *at, slot, key.generation, key.attempt, kind, ident)


def _buckets(slot: Slot, timeline: StepTimeline) -> Iterable[tuple[float, ...]]:
    """Rows of the table, columns in its order."""
    key = timeline.key
    moments: dict[int, list[float]] = {}
    for kind, ident, _, t1_ns, value in _columns(timeline):
        if kind in _BUCKETS:
            its = moments.setdefault(ident, [np.nan] * (len(_BUCKETS) + 1))
            its[_BUCKETS.index(kind)] = t1_ns * 1e-9
            if kind == Kind.BUCKET_DONE:
                its[-1] = value
    for ident, its in sorted(moments.items()):
        yield (key.step, *its, slot, key.generation, key.attempt, ident)


def _columns(timeline: StepTimeline) -> Iterable[tuple[int, int, int, int, float]]:
    """Of each record what rows are made of, as plain numbers: that is many times quicker."""
    records = timeline.records
    names = ("kind", "ident", "t0_ns", "t1_ns", "value")
    return zip(*(records[name].tolist() for name in names), strict=True)


def _tables(spans: list[tuple[float, ...]], buckets: list[tuple[float, ...]]) -> dict[str, Table]:
    return {"spans": _table("spans", spans), "buckets": _table("buckets", buckets)}


def _table(name: str, rows: list[tuple[float, ...]]) -> Table:
    columns = TABLES[name]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(columns))
    return {column: values[:, place] for place, column in enumerate(columns)}
