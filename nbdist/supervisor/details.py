"""What happened when in the last steps, as tables of spans, buckets and traffic. Pure.

Of quick steps only some fit into a frame: the newest, each with all slots. Of a run that is over
the worst ones before those are told too. What the stages of a pipeline compute are spans; what they
send and receive is summed up for each slot.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.tables import TABLES
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op, Road, unpacked
from nbdist.supervisor.attempts import SETTLED_S
from nbdist.supervisor.timeline import NUM_WORST, Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.protocol.ids import Slot
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.series import Series
    from nbdist.supervisor.timeline import StepTimeline

    Row = tuple[float, ...]
    Steps = dict[Key, list[tuple[Slot, StepTimeline]]]

DETAILS = ("spans", "buckets", "traffic")
"""Tables that are made of them."""
_BUCKETS = (int(Kind.BUCKET_READY), int(Kind.BUCKET_LAUNCH), int(Kind.BUCKET_DONE))
NUM_FIRST = 20
"""The newest steps, for which the worst ones do not make room."""
MAX_PASSAGE = 1_200
"""Rows that one step of a pipeline may have, though there is less room: without all its ranks it
says little."""
_FIRST = Key(-1, -1, -1)
_PASSED_ON = (Kind.SEND, Kind.RECEIVE)
_TO_A_STAGE = Road(Op.SEND, Axis.PIPELINE, 2)


class DetailReader:
    """How far somebody has read.

    Args:
        since: what began before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since_ns = since * 1e9
        self._last = _FIRST

    def read(
        self, series: Series, now: float, max_rows: int, *, with_worst: bool = False
    ) -> dict[str, Table]:
        """Spans and buckets of the newest steps that were not read, at most so many rows of each.

        Oldest first. Where even one step is larger, some of its slots are left out. `with_worst`:
        the worst steps before those that are kept as the last, too; they come before all but the
        newest where there is little room.
        """
        steps = self._new(series, int((now - SETTLED_S) * 1e9))
        if steps:
            self._last = max(steps)
        chosen = sorted(steps, reverse=True)
        if with_worst:
            worst = self._worst(series, steps)
            steps |= worst
            by_tail = sorted(worst, key=lambda key: -_tail_ns(worst[key]))
            chosen = [*chosen[:NUM_FIRST], *by_tail, *chosen[NUM_FIRST:]]
        return _read(steps, chosen, max_rows)

    def _new(self, series: Series, settled_ns: int) -> Steps:
        """The steps that were not read and of which nothing more will come."""
        steps: Steps = {}
        for slot in series.slots:
            for timeline in reversed(series.last_steps(slot)):
                if timeline.key <= self._last or not self._is_ours(timeline):
                    break
                steps.setdefault(timeline.key, []).append((slot, timeline))
        return {
            key: parts
            for key, parts in steps.items()
            if all(timeline.records["t1_ns"].max() <= settled_ns for _, timeline in parts)
        }

    def _worst(self, series: Series, known: Steps) -> Steps:
        """The worst steps of all slots that are not among the known."""
        steps: Steps = {}
        for slot in series.slots:
            for timeline in series.worst_steps(slot):
                if timeline.key not in known and self._is_ours(timeline):
                    steps.setdefault(timeline.key, []).append((slot, timeline))
        return dict(sorted(steps.items(), key=lambda item: -_tail_ns(item[1]))[:NUM_WORST])

    def _is_ours(self, timeline: StepTimeline) -> bool:
        records = timeline.records
        return len(records) > 0 and bool(records["t0_ns"].min() >= self._since_ns)


def _tail_ns(parts: Iterable[tuple[Slot, StepTimeline]]) -> int:
    return max(timeline.tail_ns() for _, timeline in parts)


def _read(steps: Steps, chosen: Iterable[Key], max_rows: int) -> dict[str, Table]:
    """The rows of these steps, in the order of their importance, as far as there is room."""
    found: dict[Key, list[list[Row]]] = {}
    nums = [0] * len(DETAILS)
    for key in chosen:
        its: list[list[Row]] = [[] for _ in DETAILS]
        for slot, timeline in steps[key]:
            rows = [list(make(slot, timeline)) for make in (_spans, _buckets, _traffic)]
            is_passage = not found and np.isin(timeline.records["kind"], _PASSED_ON).any()
            most = max(n + len(a) + len(b) for n, a, b in zip(nums, its, rows, strict=True))
            room = (MAX_PASSAGE if is_passage else max_rows) - most
            if room < 0 and found:
                return _tables(found)  # this step is not whole
            if room < 0:
                break
            its = [a + b for a, b in zip(its, rows, strict=True)]
        found[key] = its
        nums = [n + len(a) for n, a in zip(nums, its, strict=True)]
    return _tables(found)


def _spans(slot: Slot, timeline: StepTimeline) -> Iterable[Row]:
    """Rows of the table, columns in its order; the whole step and its compute are in others."""
    key = timeline.key
    passed_on: dict[int, tuple[int, int, int, float]] = {}
    whose = (slot, key.generation, key.attempt)
    for kind, ident, t0_ns, t1_ns, value in _columns(timeline):
        if Kind.FORWARD <= kind < Kind.BUCKET_READY:
            yield (key.step, t0_ns * 1e-9, t1_ns * 1e-9, *whose, kind, ident, value)
        elif kind in _PASSED_ON:
            began_ns, _, num, num_bytes = passed_on.get(kind, (t0_ns, t1_ns, 0, 0.0))
            passed_on[kind] = began_ns, t1_ns, num + 1, num_bytes + value
    for kind, (t0_ns, t1_ns, num, num_bytes) in sorted(passed_on.items()):
        yield (key.step, t0_ns * 1e-9, t1_ns * 1e-9, *whose, kind, num, num_bytes)


def _buckets(slot: Slot, timeline: StepTimeline) -> Iterable[Row]:
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


def _traffic(slot: Slot, timeline: StepTimeline) -> Iterable[Row]:
    """A row for each kind of exchange; what stages sent is one of them."""
    key, roads = timeline.key, dict[Road, list[tuple[int, int, float]]]()
    for kind, ident, t0_ns, t1_ns, value in _columns(timeline):
        if kind == Kind.SEND:
            roads.setdefault(_TO_A_STAGE, []).append((t0_ns, t1_ns, value))
        elif kind == Kind.COLLECTIVE:
            with contextlib.suppress(ValueError):  # of an engine that knows more
                roads.setdefault(unpacked(ident), []).append((t0_ns, t1_ns, value))
    for road, calls in sorted(roads.items()):
        payload = sum(value for _, _, value in calls)
        seconds = np.nan if road == _TO_A_STAGE else _union_ns(calls) * 1e-9
        whose = (slot, key.generation, key.attempt)
        yield (key.step, payload, road.sent_bytes(payload), seconds, *whose, *road, len(calls))


def _union_ns(calls: Iterable[tuple[int, int, float]]) -> int:
    """How long at least one went on."""
    total = until = 0
    for began, ended, _ in sorted(calls):
        total += max(0, ended - max(began, until))
        until = max(until, ended)
    return total


def _columns(timeline: StepTimeline) -> Iterable[tuple[int, int, int, int, float]]:
    """Of each record what rows are made of, as plain numbers: that is many times quicker."""
    records = timeline.records
    names = ("kind", "ident", "t0_ns", "t1_ns", "value")
    return zip(*(records[name].tolist() for name in names), strict=True)


def _tables(found: dict[Key, list[list[Row]]]) -> dict[str, Table]:
    """Oldest first."""
    return {
        name: _table(name, [row for key in sorted(found) for row in found[key][place]])
        for place, name in enumerate(DETAILS)
    }


def _table(name: str, rows: list[Row]) -> Table:
    columns = TABLES[name]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(columns))
    return {column: values[:, place] for place, column in enumerate(columns)}
