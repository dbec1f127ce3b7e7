"""A run as one still picture, for notebooks that nobody looks at live. In any process, no browser.

Drawn from a snapshot frame, so it says what the live views say. Without a ground, in colours that
are read on any, since a notebook may be read anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.views import palette
from nbdist.views.facts import OVER_THE_RUN, counted, loss_text, pace, silences, steps_text
from nbdist.views.lanes import bucket_rows, newest_sync, row_edges
from nbdist.views.passages import COLOURS, NAMES, PALE_COLOURS, is_pipeline, newest_passage
from nbdist.views.sheet import WIDTH, Axes, Box, Sheet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

_MARGIN, _HEAD, _PANEL = 14, 62, 230
_ROW_GAP = 0.5
_MAX_LANES = 16
_MAX_INCIDENTS = 5
_MEMBER = tb.STATES.index("member")
_BUCKET = 0
"""Stands for buckets among the kinds of spans."""
_COLOURS = {
    _BUCKET: "#D55E00",
    3: "#56B4E9",
    4: "#0072B2",
    5: "#CC79A7",
    6: "#009E73",
    8: "#8c959f",
}
_KINDS = {8: "data", 3: "forward", 4: "backward", 5: "vote", 6: "optimizer", _BUCKET: "bucket"}


_PANELS: tuple[tb.View, ...] = ("loss", "throughput", "sync", "pipeline", "membership")
"""Views of which there are pictures, in the order in which they are drawn."""


def picture(frame: bytes, views: Collection[tb.View] = ()) -> bytes:
    """A PNG of a snapshot; shown at `WIDTH` pixels it is sharp.

    Args:
        frame: the snapshot.
        views: those that are drawn, as far as there are pictures of them; where there is none of
            any, and where none is named, all are.
    """
    header, tables = fr.unpack(frame)
    chosen = _chosen(views, is_pipe=is_pipeline(tables))
    num_rows, num_columns = (len(chosen) + 1) // 2, min(len(chosen), 2)
    sheet = Sheet(WIDTH, _HEAD + num_rows * (_PANEL + _MARGIN) + _MARGIN)
    _draw_head(sheet, header, tables)
    width = (WIDTH - (num_columns + 1) * _MARGIN) / num_columns
    draw = {
        "loss": lambda box: _draw_loss(sheet, box, tables),
        "throughput": lambda box: _draw_compute(sheet, box, header, tables),
        "sync": lambda box: _draw_sync(sheet, box, tables),
        "pipeline": lambda box: _draw_pipeline(sheet, box, tables),
        "membership": lambda box: _draw_membership(sheet, box, header, tables),
    }
    for number, view in enumerate(chosen):
        row, column = divmod(number, 2)
        x, y = _MARGIN + column * (width + _MARGIN), _HEAD + row * (_PANEL + _MARGIN)
        box: Box = (x, y, x + width, y + _PANEL)
        sheet.frame(box)
        draw[view](box)
    return sheet.png()


def _chosen(views: Collection[tb.View], *, is_pipe: bool) -> list[tb.View]:
    """Of sync and pipeline the one that fits, where both are wanted; pages go by the same rule."""
    wanted = [view for view in _PANELS if view in views] or list(_PANELS)
    if {"sync", "pipeline"} <= set(wanted):
        wanted.remove("sync" if is_pipe else "pipeline")
    return wanted


def _draw_head(sheet: Sheet, header: fr.Header, tables: dict[str, tb.Table]) -> None:
    run, world, rows = header.run, header.world, tables.get("rows")
    name = run.name or "run" if run else "no run"
    state = f"{run.state} after {steps_text(run)}" if run else ""
    sheet.text(_MARGIN, 20, f"{name}: {state}", size=17, room=WIDTH - 2 * _MARGIN)
    facts = [f"{counted(world.world_size, 'rank')}, generation {world.generation}"]
    if run is not None and rows is not None and len(rows["loss"]):
        first, last = (loss_text(float(rows["loss"][place])) for place in (0, -1))
        facts.append(f"loss {first} to {last}")
        facts.append(f"{pace(run.samples, run.seconds):,.0f} samples/s {OVER_THE_RUN}")
    stalls = [n.incident.stall_s for n in header.incidents if n.incident.stall_s is not None]
    longest = f", longest stall {max(stalls) * 1000:,.0f} ms" if stalls else ""
    facts.append(f"{counted(_num_incidents(header), 'incident')}{longest}")
    sheet.text(_MARGIN, 44, "   ·   ".join(facts))


def _draw_loss(sheet: Sheet, box: Box, tables: dict[str, tb.Table]) -> None:
    title, rows = "Is it learning, and did recovery disturb it?", tables.get("rows")
    if rows is None or not np.isfinite(rows["loss"]).any():
        _draw_nothing(sheet, box, title, "no step was committed")
        return
    axes = _axes(sheet, box, title, rows["step"], rows["loss"], unit="loss over steps")
    changes = rows["step"][1:][np.diff(rows["generation"].astype(float)) != 0]
    for step in changes.astype(float):
        x, _ = axes.at(step, 0)
        sheet.line([(x, axes.top), (x, axes.bottom)], palette.REFERENCE)
    axes.curve(rows["step"], rows["loss"], palette.SLOT_COLOURS[0])


def _draw_compute(sheet: Sheet, box: Box, header: fr.Header, tables: dict[str, tb.Table]) -> None:
    title, steps = "Who is slow? Compute of each slot", tables.get("steps")
    if steps is None or not np.isfinite(steps["compute_s"]).any():
        _draw_nothing(sheet, box, title, "no times of steps are known")
        return
    values = steps["compute_s"].astype(float) * 1000
    axes = _axes(sheet, box, title, steps["step"], values, unit="ms over steps")
    for slot in np.unique(steps["slot"]).astype(int):
        own = np.flatnonzero(steps["slot"] == slot)
        for places in np.split(own, _returns(header, steps, own) + 1):
            axes.curve(steps["step"][places], values[places], palette.slot_ink(slot))
    slots = np.unique(steps["slot"]).astype(int)[: _MAX_LANES // 2]
    _draw_keys(sheet, box, [(palette.slot_ink(slot), f"{slot}") for slot in slots])


def _returns(header: fr.Header, steps: tb.Table, own: NDArray[np.intp]) -> NDArray[np.intp]:
    """After which of a slot's steps it was away: no line goes across. Pages go by the same rule.

    Where only some steps are sent, one that is missing says nothing: only incidents do.
    """
    slot, generations = int(steps["slot"][own[0]]), steps["generation"][own].astype(float)
    away = np.diff(steps["step"][own]) > 1
    if "steps" in header.thinned:
        away &= False
    for incident in (numbered.incident for numbered in header.incidents):
        if incident.kind != "joined" and slot in incident.slots:
            last = incident.generation_before
            away |= (generations[:-1] <= last) & (generations[1:] > last)
    return np.flatnonzero(away)


def _draw_sync(sheet: Sheet, box: Box, tables: dict[str, tb.Table]) -> None:
    buckets = tables.get("buckets")
    if buckets is None or not len(buckets["step"]):
        why = "no bucket of gradients was summed, or none is kept"
        _draw_nothing(sheet, box, "When is each bucket summed?", why)
        return
    step, buckets, spans = newest_sync(buckets, tables.get("spans", {}))
    rows, num_rows = bucket_rows(buckets)
    bars = _bars(buckets, "launch_at", "done_at", rows)
    if spans:
        bars = _bars(spans, "began_at", "ended_at") + bars
    zero, end = min(bar.began_at for bar in bars), max(bar.ended_at for bar in bars)
    title = f"When is each bucket summed? Step {step}"
    across = (0.0, (end - zero) * 1000)
    axes = Axes(sheet, box, title, x=across, y=(0, 1), unit="ms")
    slots = sorted({bar.slot for bar in bars})[:_MAX_LANES]
    for lane, slot in enumerate(slots):
        top, bottom = axes.lane(lane, len(slots))
        middle = (top + bottom) / 2
        axes.name(middle, f"slot {slot}")
        for bar in bars:
            if bar.slot == slot:
                high, low = top + 3, middle
                if bar.kind == _BUCKET:
                    high, low = row_edges((middle, bottom - 3), bar.row, num_rows)
                    low -= _ROW_GAP
                left, right = (
                    axes.at((at - zero) * 1000, 0)[0] for at in (bar.began_at, bar.ended_at)
                )
                sheet.bar((left, high, right, low), _COLOURS[bar.kind])
    keys = [(_COLOURS[kind], name) for kind, name in _KINDS.items()]
    _draw_keys(sheet, box, keys)


def _draw_pipeline(sheet: Sheet, box: Box, tables: dict[str, tb.Table]) -> None:
    title, passage = "Where is the bubble?", newest_passage(tables)
    if passage is None:
        _draw_nothing(sheet, box, title, "no step of the pipeline is known")
        return
    unit_s, slots = passage.forward_s, passage.slots[:_MAX_LANES]
    end = max([passage.end, *(part.ended * unit_s for part in passage.planned)])
    idle = f"{passage.idle:.0%} in step {passage.step}"
    planned = f", {passage.idle_planned:.0%} planned" if passage.planned else ""
    axes = Axes(sheet, box, f"{title} {idle}{planned}", x=(0.0, end * 1000), y=(0, 1), unit="ms")
    for lane, slot in enumerate(slots):
        top, bottom = axes.lane(lane, len(slots))
        middle = top + 0.62 * (bottom - top)
        axes.name((top + bottom) / 2, f"slot {slot}")
        rows = (
            (passage.parts, COLOURS, 1000, top + 3, middle - 1),
            (passage.planned, PALE_COLOURS, 1000 * unit_s, middle + 1, bottom - 3),
        )
        for parts, colours, scale, high, low in rows:
            for part in parts:
                if part.slot == slot:
                    left, right = (axes.at(at * scale, 0)[0] for at in (part.began, part.ended))
                    sheet.bar((left, high, right - 0.5, low), colours[part.action.kind])
    kinds = {part.action.kind for part in passage.parts}
    keys = [(COLOURS[kind], name) for kind, name in NAMES.items() if kind in kinds]
    _draw_keys(sheet, box, [*keys, (PALE_COLOURS["B"], "planned")])


class _Bar(NamedTuple):
    """Something that a slot did in a step."""

    slot: int
    began_at: float
    ended_at: float
    kind: int
    row: int
    """Of the lane's part that bars of its kind have."""


def _bars(
    table: tb.Table, began: str, ended: str, rows: NDArray[np.intp] | None = None
) -> list[_Bar]:
    kinds = table.get("kind", np.full(len(table["slot"]), _BUCKET))
    places = np.zeros(len(kinds), np.intp) if rows is None else rows
    columns = (table["slot"], table[began], table[ended], kinds, places)
    found = [
        _Bar(int(slot), float(start), float(end), int(kind), int(row))
        for slot, start, end, kind, row in zip(*columns, strict=True)
    ]
    return [bar for bar in found if bar.kind in _COLOURS and np.isfinite(bar.ended_at)]


def _draw_membership(
    sheet: Sheet, box: Box, header: fr.Header, tables: dict[str, tb.Table]
) -> None:
    title, seats = "Who was in the job, and what did each failure cost?", tables.get("seats")
    left, top, right, bottom = box
    listed, is_longest_added = _listed(header.incidents)
    texts = [_incident_line(numbered) for numbered in listed]
    if (num := _num_incidents(header)) > len(texts):
        last = f"the last {len(texts) - is_longest_added} of {num} incidents"
        longest = ", and before them the one of the longest stall" if is_longest_added else ""
        texts.insert(0, f"{last}{longest}:")
    height = 15 * len(texts)
    if seats is None or not len(seats["at"]):
        _draw_nothing(sheet, box, title, "" if texts else "nothing is known of seats")
    else:
        began, now = float(seats["at"].min()), header.clock_s
        upper = (left, top, right, bottom - height)
        axes = Axes(
            sheet, upper, title, x=(0, now - began), y=(0, 1), unit="s since the cluster began"
        )
        slots = np.unique(seats["slot"]).astype(int)[:_MAX_LANES]
        for lane, slot in enumerate(slots):
            _draw_life(axes, lane, len(slots), seats, slot, now)
            for silent, start, end in silences(n.incident for n in header.incidents):
                if silent == slot:
                    x0, x1 = axes.at(start - began, 0)[0], axes.at(end - began, 0)[0]
                    high, low = axes.lane(lane, len(slots))
                    sheet.bar((x0, high + 2, x1, low - 2), palette.SILENT)
    for number, text in enumerate(texts):
        y = bottom - height + 15 * number
        sheet.text(left + 10, y, text, size=11, room=right - left - 20)


def _draw_life(axes: Axes, lane: int, num: int, seats: tb.Table, slot: int, now: float) -> None:
    top, bottom = axes.lane(lane, num)
    axes.name((top + bottom) / 2, f"slot {slot}")
    began = float(seats["at"].min())
    places = np.flatnonzero(seats["slot"] == slot)
    edges = [*seats["at"][places].astype(float), now]
    for place, start, end in zip(places, edges[:-1], edges[1:], strict=True):
        is_member = int(seats["state"][place]) == _MEMBER
        colour = palette.slot_ink(slot) if is_member else palette.FAINT
        x0, x1 = axes.at(start - began, 0)[0], axes.at(end - began, 0)[0]
        axes.sheet.bar((x0, top + 2, x1, bottom - 2), colour)


def _num_incidents(header: fr.Header) -> int:
    """Since the run began; of very many only the last ones are in a frame."""
    return max((numbered.number for numbered in header.incidents), default=0)


def _listed(incidents: Sequence[fr.Numbered]) -> tuple[Sequence[fr.Numbered], bool]:
    """Those that have room, and whether the first is an older one: the one that cost most."""
    last = incidents[-_MAX_INCIDENTS:]
    older = incidents[:-_MAX_INCIDENTS]
    longest = max(older, key=_stall_s, default=None)
    if longest is None or _stall_s(longest) <= max(map(_stall_s, last)):
        return last, False
    return [longest, *last[1:]], True


def _stall_s(numbered: fr.Numbered) -> float:
    return numbered.incident.stall_s or 0.0


def _incident_line(numbered: fr.Numbered) -> str:
    incident = numbered.incident
    parts = [
        f"{name} {seconds * 1000:,.0f}"
        for name, seconds in (
            ("detect", incident.detect_s),
            ("regroup", incident.regroup_s),
            ("restore", incident.restore_s),
            ("stall", incident.stall_s),
        )
        if seconds is not None
    ]
    slots = ", ".join(map(str, incident.slots))
    took = f": {', '.join(parts)} ms" if parts else ""
    return f"{numbered.number}  {incident.kind}, slot {slots}{took}"


def _axes(
    sheet: Sheet,
    box: Box,
    title: str,
    x: NDArray[np.generic],
    y: NDArray[np.generic],
    *,
    unit: str,
) -> Axes:
    known = y[np.isfinite(y.astype(float))].astype(float)
    room = 0.06 * (float(known.max() - known.min()) or 1.0)
    across = float(x.min()), float(x.max())
    low = float(known.min())
    upright = low - room if low < 0 or low > room else 0.0, float(known.max()) + room
    axes = Axes(sheet, box, title, x=across, y=upright, unit=unit, least=1.0)
    axes.grid()
    return axes


def _draw_keys(sheet: Sheet, box: Box, keys: Iterable[tuple[str, str]]) -> None:
    x, y = box[0] + 10, box[3] - 11
    for colour, name in keys:
        sheet.bar((x, y - 4, x + 9, y + 4), colour)
        sheet.text(x + 13, y, name, size=11)
        x += 19 + 6 * len(name)


def _draw_nothing(sheet: Sheet, box: Box, title: str, why: str) -> None:
    sheet.text(box[0] + 10, box[1] + 15, title, size=13)
    middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    sheet.text(*middle, why, anchor="mm")
