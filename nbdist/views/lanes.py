"""Bars in a lane for each slot: gradient sync, pipeline, traffic, memory, membership. Pure.

For charts that are made from a story; the live views have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.tables import STATES
from nbdist.protocol.telemetry import Kind
from nbdist.views import agreements, distances, holdings, palette, traffic
from nbdist.views.bars import Bar, Lanes
from nbdist.views.facts import counted, silences
from nbdist.views.passages import COLOURS, NAMES, PALE_COLOURS, WAIT_COLOUR, newest_passage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from nbdist.protocol.story import RunStory
    from nbdist.protocol.tables import Table

LANE_NAMES = ("sync", "pipeline", "traffic", "memory", "distance", "agreement", "membership")
"""Charts of lanes; each is drawn where the story has what it needs, and else says why not."""
MAX_LANES = 16

_BUCKET_COLOUR = "#D55E00"
_SPANS = {
    Kind.DATA: ("data", "#8c959f"),
    Kind.FORWARD: ("forward", "#56B4E9"),
    Kind.BACKWARD: ("backward", "#0072B2"),
    Kind.VOTE: ("vote", "#CC79A7"),
    Kind.OPTIMIZER: ("optimizer", "#009E73"),
}
_UPPER, _LOWER, _WHOLE = (0.08, 0.48), (0.52, 0.92), (0.15, 0.85)
_PASSED, _PLANNED = (0.08, 0.58), (0.64, 0.92)


def lanes(story: RunStory, name: str) -> Lanes:
    """The chart of that name, one of `LANE_NAMES`."""
    return _MAKERS[name](story)


def newest_sync(buckets: Table, spans: Table) -> tuple[int, Table, Table]:
    """Buckets and spans of the newest attempt at a step that all its slots have summed, and which.

    Of the last one of a run some slots may not have told all; where there is no other, it is taken.

    Args:
        buckets: rows of that table, oldest first; at least one.
        spans: of that one.
    """
    names = ("step", "generation", "attempt")

    def parts(key: tuple[float, ...]) -> tuple[Table, Table]:
        chosen = dict(zip(names, key, strict=True))
        return _of(buckets, chosen), _of(spans, chosen)

    keys = list(dict.fromkeys(zip(*(buckets[name].tolist() for name in names), strict=True)))
    key = next((key for key in reversed(keys) if _is_summed(*parts(key))), keys[-1])
    return int(key[0]), *parts(key)


def stacked(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """For each, the first row that is free when it begins: none is drawn over another."""
    rows, free = [0] * len(intervals), list[float]()
    for place in sorted(range(len(intervals)), key=lambda place: intervals[place]):
        began, ended = intervals[place]
        row = next((row for row, since in enumerate(free) if since <= began), len(free))
        free[row : row + 1] = [ended]
        rows[place] = row
    return rows


def bucket_rows(buckets: Table) -> tuple[NDArray[np.intp], int]:
    """The row of each bucket within its slot's lane, and how many rows a lane has.

    Buckets overlap where one is summed while others wait for slower slots. All lanes have as many
    rows, so that heights say nothing.
    """
    rows = np.zeros(len(buckets["slot"]), np.intp)
    began = buckets["launch_at"].astype(float)
    ended = np.fmax(buckets["done_at"].astype(float), began)
    for slot in np.unique(buckets["slot"]):
        own = buckets["slot"] == slot
        rows[own] = stacked(list(zip(began[own].tolist(), ended[own].tolist(), strict=True)))
    return rows, int(rows.max(initial=0)) + 1


def row_edges(place: tuple[float, float], row: int, num: int) -> tuple[float, float]:
    """The edges of one of so many rows between two edges."""
    first, last = place
    height = (last - first) / num
    return first + row * height, first + (row + 1) * height


def _is_summed(buckets: Table, spans: Table) -> bool:
    silent = set(spans["slot"].tolist()) - set(buckets["slot"].tolist()) if spans else set()
    return not silent and bool(np.isfinite(buckets["done_at"]).all())


def _sync(story: RunStory) -> Lanes:
    unit, buckets = "ms since the step began", story.tables.get("buckets")
    if buckets is None or not len(buckets["step"]):
        sentence = (
            "No bucket of gradients is known: none was summed, as where one rank trains alone "
            "or the model is cut into stages, or what was told of them is not kept."
        )
        return Lanes(unit=unit, sentence=sentence)
    last, buckets, spans = newest_sync(buckets, story.tables.get("spans", {}))
    starts = [buckets["launch_at"], *([spans["began_at"]] if spans else [])]
    zero = float(np.nanmin(np.concatenate(starts)))
    slots = np.unique(buckets["slot"]).astype(int).tolist()
    shown = slots[:MAX_LANES]
    bars = [bar for lane, slot in enumerate(shown) for bar in _step_bars(spans, slot, lane, zero)]
    rows, num_rows = bucket_rows(buckets)
    for lane, slot in enumerate(shown):
        for place in np.flatnonzero(buckets["slot"] == slot):
            began, ended = (float(buckets[n][place]) for n in ("launch_at", "done_at"))
            what, row = f"bucket {int(buckets['bucket'][place])}", int(rows[place])
            edges = row_edges(_LOWER, row, num_rows)
            bars += _bar(lane, edges, began - zero, ended - zero, _BUCKET_COLOUR, what)
    first, end = float(np.nanmin(buckets["ready_at"])), float(np.nanmax(buckets["done_at"]))
    num = len(np.unique(buckets["bucket"]))
    sentence = (
        f"Gradient sync of step {last}: {num} {'bucket' if num == 1 else 'buckets'} "
        f"on {len(slots)} slots, {(end - first) * 1000:.1f} ms from the first that was ready to "
        "the last sum. Above computing, below communication."
    )
    keys = tuple((colour, what) for what, colour in (*_SPANS.values(), ("bucket", _BUCKET_COLOUR)))
    return Lanes(unit=unit, sentence=sentence, names=_names(shown), bars=bars, keys=keys)


def _step_bars(spans: Table, slot: int, lane: int, zero: float) -> Iterator[Bar]:
    for place in np.flatnonzero(spans["slot"] == slot) if spans else ():
        kind = int(spans["kind"][place])
        if kind in _SPANS:
            what, colour = _SPANS[Kind(kind)]
            began, ended = (float(spans[n][place]) - zero for n in ("began_at", "ended_at"))
            yield from _bar(lane, _UPPER, began, ended, colour, what)


def _bar(
    lane: int, place: tuple[float, float], began: float, ended: float, colour: str, what: str
) -> Iterator[Bar]:
    """In ms; nothing where an end is not known."""
    top, bottom = place
    if np.isfinite(began) and np.isfinite(ended):
        yield Bar(
            lane=lane,
            top=top,
            bottom=bottom,
            began=began * 1000,
            ended=ended * 1000,
            colour=colour,
            what=what,
        )


def _pipeline(story: RunStory) -> Lanes:
    unit, passage = "ms since the batch began", newest_passage(story.tables)
    if passage is None:
        sentence = (
            "No step of a pipeline is known: the model was not cut into stages, or what was told "
            "of them is not kept."
        )
        return Lanes(unit=unit, sentence=sentence)
    shown, bars = passage.slots[:MAX_LANES], list[Bar]()
    for lane, slot in enumerate(shown):
        for wait in passage.waits:
            if wait.slot == slot:
                what = f"waits for micro-batch {wait.microbatch} from slot {wait.whom}"
                bars += _bar(lane, _PASSED, wait.began, wait.ended, WAIT_COLOUR, what)
        for part in passage.parts:
            if part.slot == slot:
                colour = COLOURS[part.action.kind]
                bars += _bar(lane, _PASSED, part.began, part.ended, colour, part.what)
        for part in passage.planned:
            if part.slot == slot:
                began, ended = (at * passage.forward_s for at in (part.began, part.ended))
                colour, what = PALE_COLOURS[part.action.kind], f"planned: {part.what}"
                bars += _bar(lane, _PLANNED, began, ended, colour, what)
    kinds = [kind for kind in NAMES if any(part.action.kind == kind for part in passage.parts)]
    keys = [(COLOURS[kind], NAMES[kind]) for kind in kinds]
    return Lanes(
        unit=unit,
        sentence=f"{passage.sentence} Above measured, below planned.",
        names=_names(shown),
        bars=bars,
        keys=(*keys, (WAIT_COLOUR, "waits"), (PALE_COLOURS["B"], "planned")),
    )


def _traffic(story: RunStory) -> Lanes:
    shown = traffic.flows(story.tables)
    slots = sorted({flow.slot for flow in shown})[:MAX_LANES]
    most = max((flow.sent_bytes for flow in shown), default=0.0)
    unit, scale = unit_of(most)
    bars, ends = list[Bar](), dict.fromkeys(slots, 0.0)
    for flow in shown:
        if flow.slot in ends and flow.sent_bytes:
            began = ends[flow.slot]
            ends[flow.slot] = began + flow.sent_bytes / scale
            bars.append(
                Bar(
                    lane=slots.index(flow.slot),
                    top=_WHOLE[0],
                    bottom=_WHOLE[1],
                    began=began,
                    ended=ends[flow.slot],
                    colour=traffic.road_colour(flow.road),
                    what=f"{flow.name}, {flow.calls:,.4g} calls",
                )
            )
    roads = dict.fromkeys(flow.road for flow in shown)
    return Lanes(
        unit=f"{unit} that a slot sends in a step",
        sentence=traffic.sentence(shown),
        names=_names(slots),
        bars=bars,
        keys=tuple((traffic.road_colour(road), traffic.road_name(road)) for road in roads),
    )


def _memory(story: RunStory) -> Lanes:
    shown = holdings.holdings(story.tables)
    unit, scale = unit_of(max((holding.now for holding in shown), default=0.0))
    slots = [holding.slot for holding in shown][:MAX_LANES]
    bars = []
    for lane, holding in enumerate(shown[:MAX_LANES]):
        has_device = np.isfinite(holding.device)
        rows = (
            ("most that was resident", holding.peak, holdings.PEAK_COLOUR, _WHOLE),
            ("resident", holding.now, palette.slot_colour(holding.slot), _UPPER),
            ("held on its GPU", holding.device, holdings.DEVICE_COLOUR, _LOWER),
        )
        for what, value, colour, place in rows:
            edges = _WHOLE if what == "resident" and not has_device else place
            if np.isfinite(value):
                bars.append(_length(lane, edges, value / scale, colour, what))
    return Lanes(
        unit=f"{unit} in memory",
        sentence=holdings.sentence(shown),
        names=_names(slots),
        bars=bars,
        keys=((holdings.PEAK_COLOUR, "most so far"),),
    )


def _length(lane: int, place: tuple[float, float], value: float, colour: str, what: str) -> Bar:
    top, bottom = place
    return Bar(lane=lane, top=top, bottom=bottom, began=0.0, ended=value, colour=colour, what=what)


def _distance(story: RunStory) -> Lanes:
    ages, drifts = distances.ages(story.tables), distances.drifts(story.tables)
    said = distances.sentence(ages, drifts)
    if ages:
        counts = distances.counts(ages, MAX_LANES)
        bars = [
            _length(lane, _WHOLE, num, distances.COLOUR, f"{num:,} updates")
            for lane, (_, num) in enumerate(counts)
        ]
        return Lanes(
            unit="updates that came after so many others",
            sentence=said,
            names=tuple(name for name, _ in counts),
            bars=bars,
        )
    bars = []
    for lane, drift in enumerate(drifts[:MAX_LANES]):
        colour = palette.slot_colour(drift.slot)
        most = 100 * drift.most
        bars.append(_length(lane, _WHOLE, most, holdings.PEAK_COLOUR, "most so far"))
        bars.append(_length(lane, _UPPER, 100 * drift.last, colour, "at the last outer step"))
    return Lanes(
        unit="% of the parameters' length from the mean",
        sentence=said,
        names=_names([drift.slot for drift in drifts][:MAX_LANES]),
        bars=bars,
        keys=((holdings.PEAK_COLOUR, "most so far"),) if drifts else (),
    )


def _agreement(story: RunStory) -> Lanes:
    return agreements.drawn(agreements.looks(story.tables), MAX_LANES)


def unit_of(num_bytes: float) -> tuple[str, float]:
    """A unit for values up to this, and how many bytes it has."""
    if num_bytes >= 2**30:
        return "GiB", 2.0**30
    return ("MiB", 2.0**20) if num_bytes >= 2**20 else ("KiB", 1024.0)


def _membership(story: RunStory) -> Lanes:
    unit, seats = "s since the first was there", story.tables.get("seats")
    if seats is None or not len(seats["at"]):
        sentence = "Who was in the job when is not known: the story does not tell it."
        return Lanes(unit=unit, sentence=sentence)
    at = seats["at"].astype(float)
    began, end = float(at.min()), float(at.max())
    if len(story.rows):
        end = max(end, float(story.rows["at"][-1]))
    slots = np.unique(seats["slot"]).astype(int).tolist()
    bars = []
    for lane, slot in enumerate(slots[:MAX_LANES]):
        places = np.flatnonzero(seats["slot"] == slot)
        edges = [*at[places], end]
        for place, start, until in zip(places, edges[:-1], edges[1:], strict=True):
            bars.append(_life(seats, int(place), lane, start - began, until - began))
        for silent, start, until in silences(story.incidents):
            if silent == slot:
                what, (top, bottom) = "silent, until it was ended", _WHOLE
                bars.append(
                    Bar(
                        lane=lane,
                        top=top,
                        bottom=bottom,
                        began=start - began,
                        ended=until - began,
                        colour=palette.SILENT,
                        what=what,
                    )
                )
    generations = len(set(seats["generation"].tolist()) - {0})
    sentence = (
        f"{counted(len(slots), 'slot')} over {end - began:.1f} s: "
        f"{counted(generations, 'generation')}, {counted(len(story.incidents), 'incident')}. "
        "Grey: in no group; dark: silent until it was ended."
    )
    return Lanes(unit=unit, sentence=sentence, names=_names(slots[:MAX_LANES]), bars=bars)


def _life(seats: Table, place: int, lane: int, began: float, ended: float) -> Bar:
    state, slot = STATES[int(seats["state"][place])], int(seats["slot"][place])
    is_member = state == "member"
    top, bottom = _WHOLE
    what = f"generation {int(seats['generation'][place])}" if is_member else state
    colour = palette.slot_ink(slot) if is_member else palette.FAINT
    return Bar(
        lane=lane, top=top, bottom=bottom, began=began, ended=ended, colour=colour, what=what
    )


def _names(slots: list[int]) -> tuple[str, ...]:
    return tuple(f"slot {slot}" for slot in slots)


def _of(table: Table, key: dict[str, float]) -> Table:
    """The rows of one attempt at a step."""
    if not table:
        return {}
    chosen: NDArray[np.bool_] = np.ones(len(table["step"]), np.bool_)
    for name, value in key.items():
        chosen &= table[name] == value
    return {column: values[chosen] for column, values in table.items()}


_MAKERS = {
    "sync": _sync,
    "pipeline": _pipeline,
    "traffic": _traffic,
    "memory": _memory,
    "distance": _distance,
    "agreement": _agreement,
    "membership": _membership,
}
