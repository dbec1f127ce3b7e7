"""A run as one still picture, for notebooks that nobody looks at live. In any process, no browser.

Drawn from a snapshot frame, so it says what the live views say. Opaque and light, since a notebook
may be read anywhere.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from nbdist.protocol import frames as fr
from nbdist.views import palette
from nbdist.views.facts import OVER_THE_RUN, counted, loss_text, pace, silences, steps_text
from nbdist.views.lanes import newest_sync
from nbdist.views.passages import COLOURS, NAMES, PALE_COLOURS, is_pipeline, newest_passage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

WIDTH = 960
"""In pixels of the page."""
_SCALE = 2
"""Pixels of the picture for one of the page."""
_MARGIN, _HEAD, _PANEL = 14, 62, 230
_NUM_COLOURS = 64
_TICKS = 4
_MAX_LANES = 16
_MAX_INCIDENTS = 5
_MEMBER = fr.STATES.index("member")
_EMPTY_COLOUR = "#d9dce0"
_SILENT_COLOUR = palette.TEXT
"""Of an engine that hung, until it was ended."""
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

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def picture(frame: bytes) -> bytes:
    """A PNG of a snapshot; shown at `WIDTH` pixels it is sharp."""
    header, tables = fr.unpack(frame)
    sheet = _Sheet(WIDTH, _HEAD + 2 * (_PANEL + _MARGIN) + _MARGIN)
    _draw_head(sheet, header, tables)
    half = (WIDTH - 3 * _MARGIN) / 2
    boxes: list[Box] = [
        (x, y, x + half, y + _PANEL)
        for y in (_HEAD, _HEAD + _PANEL + _MARGIN)
        for x in (_MARGIN, 2 * _MARGIN + half)
    ]
    for box in boxes:
        sheet.frame(box)
    _draw_loss(sheet, boxes[0], tables)
    _draw_compute(sheet, boxes[1], tables)
    (_draw_pipeline if is_pipeline(tables) else _draw_sync)(sheet, boxes[2], tables)
    _draw_membership(sheet, boxes[3], header, tables)
    return sheet.png()


class _Sheet:
    """A white sheet on which things are placed in pixels of the page."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
        self._pen = ImageDraw.Draw(self._image)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        colour: str = palette.TEXT,
        anchor: str = "lm",
        room: float = WIDTH,
    ) -> None:
        """A line of text; with more than fits into `room` it is cut, and says so."""
        font = _font(size * _SCALE)
        while len(text) > 1 and self._pen.textlength(text, font) > room * _SCALE:
            text = f"{text.rstrip('…')[:-1]}…"
        self._pen.text((x * _SCALE, y * _SCALE), text, fill=colour, font=font, anchor=anchor)

    def bar(self, box: Box, colour: str) -> None:
        left, top, right, bottom = (round(edge * _SCALE) for edge in box)
        self._pen.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), fill=colour)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._pen.line(scaled, fill=colour, width=round(width * _SCALE), joint="curve")

    def frame(self, box: Box) -> None:
        scaled = [edge * _SCALE for edge in box]
        self._pen.rounded_rectangle(scaled, radius=6 * _SCALE, outline=_EMPTY_COLOUR, width=_SCALE)

    def png(self) -> bytes:
        file = io.BytesIO()
        self._image.quantize(_NUM_COLOURS, Image.Quantize.FASTOCTREE).save(file, "PNG")
        return file.getvalue()


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class _Axes:
    """A panel with a title and room for a chart; maps values to places."""

    def __init__(
        self,
        sheet: _Sheet,
        box: Box,
        title: str,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        unit: str,
    ) -> None:
        left, top, right, bottom = box
        sheet.text(left + 10, top + 15, title, size=13)
        sheet.text(right - 10, bottom - 11, unit, size=11, colour=palette.MUTED, anchor="rm")
        self.sheet = sheet
        self.left, self.top, self.right, self.bottom = left + 58, top + 34, right - 14, bottom - 32
        self._x, self._y = x, y
        for tick in np.linspace(*x, _TICKS + 1):
            place = (self.at(tick, y[0])[0], self.bottom + 9)
            sheet.text(*place, f"{tick:,.0f}", size=11, colour=palette.MUTED, anchor="mm")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a value is drawn."""
        width, height = self._x[1] - self._x[0] or 1.0, self._y[1] - self._y[0] or 1.0
        across = self.left + (self.right - self.left) * (x - self._x[0]) / width
        return across, self.bottom - (self.bottom - self.top) * (y - self._y[0]) / height

    def grid(self) -> None:
        """Lines and numbers of the upright axis."""
        for tick in np.linspace(*self._y, _TICKS):
            _, y = self.at(self._x[0], tick)
            self.sheet.line([(self.left, y), (self.right, y)], palette.GRID)
            text = f"{tick:.3g}" if abs(tick) < 1e4 else f"{tick:,.0f}"
            self.name(y, text)

    def curve(self, x: NDArray[np.generic], y: NDArray[np.generic], colour: str) -> None:
        """A line, parted where a value is not finite."""
        run: list[tuple[float, float]] = []
        for one, other in zip(x.astype(float), y.astype(float), strict=True):
            if np.isfinite(other):
                run.append(self.at(one, other))
                continue
            self._draw(run, colour)
            run = []
        self._draw(run, colour)

    def _draw(self, run: list[tuple[float, float]], colour: str) -> None:
        if len(run) > 1:
            self.sheet.line(run, colour, 1.5)

    def name(self, y: float, text: str) -> None:
        """What stands at the left of a row."""
        self.sheet.text(self.left - 6, y, text, size=11, colour=palette.MUTED, anchor="rm")

    def lane(self, number: int, num: int) -> tuple[float, float]:
        """Top and bottom of one of several rows."""
        height = (self.bottom - self.top) / max(num, 1)
        return self.top + number * height, self.top + (number + 1) * height


def _draw_head(sheet: _Sheet, header: fr.Header, tables: dict[str, fr.Table]) -> None:
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
    sheet.text(_MARGIN, 44, "   ·   ".join(facts), colour=palette.MUTED)


def _draw_loss(sheet: _Sheet, box: Box, tables: dict[str, fr.Table]) -> None:
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


def _draw_compute(sheet: _Sheet, box: Box, tables: dict[str, fr.Table]) -> None:
    title, steps = "Who is slow? Compute of each slot", tables.get("steps")
    if steps is None or not np.isfinite(steps["compute_s"]).any():
        _draw_nothing(sheet, box, title, "no times of steps are known")
        return
    values = steps["compute_s"].astype(float) * 1000
    axes = _axes(sheet, box, title, steps["step"], values, unit="ms over steps")
    for slot in np.unique(steps["slot"]).astype(int):
        own = steps["slot"] == slot
        axes.curve(steps["step"][own], values[own], palette.slot_colour(slot))
    slots = np.unique(steps["slot"]).astype(int)[: _MAX_LANES // 2]
    _draw_keys(sheet, box, [(palette.slot_colour(slot), f"{slot}") for slot in slots])


def _draw_sync(sheet: _Sheet, box: Box, tables: dict[str, fr.Table]) -> None:
    buckets = tables.get("buckets")
    if buckets is None or not len(buckets["step"]):
        why = "no bucket of gradients was summed, or none is kept"
        _draw_nothing(sheet, box, "When is each bucket summed?", why)
        return
    step, buckets, spans = newest_sync(buckets, tables.get("spans", {}))
    bars = _bars(buckets, "launch_at", "done_at")
    if spans:
        bars = _bars(spans, "began_at", "ended_at") + bars
    zero, end = min(bar.began_at for bar in bars), max(bar.ended_at for bar in bars)
    title = f"When is each bucket summed? Step {step}"
    across = (0.0, (end - zero) * 1000)
    axes = _Axes(sheet, box, title, x=across, y=(0, 1), unit="ms")
    slots = sorted({bar.slot for bar in bars})[:_MAX_LANES]
    for lane, slot in enumerate(slots):
        top, bottom = axes.lane(lane, len(slots))
        middle = (top + bottom) / 2
        axes.name(middle, f"slot {slot}")
        for bar in bars:
            if bar.slot == slot:
                high, low = (middle, bottom - 3) if bar.kind == _BUCKET else (top + 3, middle)
                left, right = (
                    axes.at((at - zero) * 1000, 0)[0] for at in (bar.began_at, bar.ended_at)
                )
                sheet.bar((left, high, right, low), _COLOURS[bar.kind])
    keys = [(_COLOURS[kind], name) for kind, name in _KINDS.items()]
    _draw_keys(sheet, box, keys)


def _draw_pipeline(sheet: _Sheet, box: Box, tables: dict[str, fr.Table]) -> None:
    title, passage = "Where is the bubble?", newest_passage(tables)
    if passage is None:
        _draw_nothing(sheet, box, title, "no step of the pipeline is known")
        return
    unit_s, slots = passage.forward_s, passage.slots[:_MAX_LANES]
    end = max([passage.end, *(part.ended * unit_s for part in passage.planned)])
    idle = f"{passage.idle:.0%} in step {passage.step}"
    planned = f", {passage.idle_planned:.0%} planned" if passage.planned else ""
    axes = _Axes(sheet, box, f"{title} {idle}{planned}", x=(0.0, end * 1000), y=(0, 1), unit="ms")
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


def _bars(table: fr.Table, began: str, ended: str) -> list[_Bar]:
    kinds = table.get("kind", np.full(len(table["slot"]), _BUCKET))
    columns = (table["slot"], table[began], table[ended], kinds)
    found = [
        _Bar(int(slot), float(start), float(end), int(kind))
        for slot, start, end, kind in zip(*columns, strict=True)
    ]
    return [bar for bar in found if bar.kind in _COLOURS and np.isfinite(bar.ended_at)]


def _draw_membership(
    sheet: _Sheet, box: Box, header: fr.Header, tables: dict[str, fr.Table]
) -> None:
    title, seats = "Who was in the job, and what did each failure cost?", tables.get("seats")
    left, top, right, bottom = box
    texts = [_incident_line(numbered) for numbered in header.incidents[-_MAX_INCIDENTS:]]
    if (num := _num_incidents(header)) > len(texts):
        texts.insert(0, f"the last {len(texts)} of {num} incidents:")
    height = 15 * len(texts)
    if seats is None or not len(seats["at"]):
        _draw_nothing(sheet, box, title, "" if texts else "nothing is known of seats")
    else:
        began, now = float(seats["at"].min()), header.clock_s
        upper = (left, top, right, bottom - height)
        axes = _Axes(
            sheet, upper, title, x=(0, now - began), y=(0, 1), unit="s since the cluster began"
        )
        slots = np.unique(seats["slot"]).astype(int)[:_MAX_LANES]
        for lane, slot in enumerate(slots):
            _draw_life(axes, lane, len(slots), seats, slot, now)
            for silent, start, end in silences(n.incident for n in header.incidents):
                if silent == slot:
                    x0, x1 = axes.at(start - began, 0)[0], axes.at(end - began, 0)[0]
                    high, low = axes.lane(lane, len(slots))
                    sheet.bar((x0, high + 2, x1, low - 2), _SILENT_COLOUR)
    for number, text in enumerate(texts):
        y = bottom - height + 15 * number
        sheet.text(left + 10, y, text, size=11, colour=palette.MUTED, room=right - left - 20)


def _draw_life(axes: _Axes, lane: int, num: int, seats: fr.Table, slot: int, now: float) -> None:
    top, bottom = axes.lane(lane, num)
    axes.name((top + bottom) / 2, f"slot {slot}")
    began = float(seats["at"].min())
    places = np.flatnonzero(seats["slot"] == slot)
    edges = [*seats["at"][places].astype(float), now]
    for place, start, end in zip(places, edges[:-1], edges[1:], strict=True):
        is_member = int(seats["state"][place]) == _MEMBER
        colour = palette.slot_colour(slot) if is_member else _EMPTY_COLOUR
        x0, x1 = axes.at(start - began, 0)[0], axes.at(end - began, 0)[0]
        axes.sheet.bar((x0, top + 2, x1, bottom - 2), colour)


def _num_incidents(header: fr.Header) -> int:
    """Since the run began; of very many only the last ones are in a frame."""
    return max((numbered.number for numbered in header.incidents), default=0)


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
    sheet: _Sheet,
    box: Box,
    title: str,
    x: NDArray[np.generic],
    y: NDArray[np.generic],
    *,
    unit: str,
) -> _Axes:
    known = y[np.isfinite(y.astype(float))].astype(float)
    room = 0.06 * (float(known.max() - known.min()) or 1.0)
    across = float(x.min()), float(x.max())
    low = float(known.min())
    upright = low - room if low < 0 or low > room else 0.0, float(known.max()) + room
    axes = _Axes(sheet, box, title, x=across, y=upright, unit=unit)
    axes.grid()
    return axes


def _draw_keys(sheet: _Sheet, box: Box, keys: Iterable[tuple[str, str]]) -> None:
    x, y = box[0] + 10, box[3] - 11
    for colour, name in keys:
        sheet.bar((x, y - 4, x + 9, y + 4), colour)
        sheet.text(x + 13, y, name, size=11, colour=palette.MUTED)
        x += 19 + 6 * len(name)


def _draw_nothing(sheet: _Sheet, box: Box, title: str, why: str) -> None:
    sheet.text(box[0] + 10, box[1] + 15, title, size=13)
    middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    sheet.text(*middle, why, colour=palette.MUTED, anchor="mm")
