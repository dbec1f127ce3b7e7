"""A chart that displays itself: a small drawing that needs neither network nor scripts, and a text.

Made in the kernel, when a cell shows it. bokeh's own page holds megabytes of JavaScript; a saved
notebook holds a few kilobytes of this instead.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.views import palette, sent
from nbdist.views.facts import lonely, place, throughput
from nbdist.views.figures import check_name, figure, text_of
from nbdist.views.lanes import LANE_NAMES, lanes, unit_of
from nbdist.views.ticks import tick_text, ticks

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from nbdist.protocol.story import RunStory
    from nbdist.views.bars import Lanes

__all__ = ["Chart"]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 26, 34
_LANE = 40
_CHARACTER = 6.6
"""Width of one, about."""
_LINE_CHARACTERS = 92
_MAX_POINTS = 600
"""Of a line; of a longer one, the least and the greatest of each stretch are drawn."""
_UNITS = {"loss": "loss", "throughput": "samples/s", "world": "ranks", "bytes": "loss"}


@dataclass(frozen=True)
class Chart:
    """A chart of a run, which draws itself where a cell shows it.

    Args:
        story: the run.
        name: "loss", "throughput", "world", "bytes", "sync", "pipeline", "traffic", "memory",
            "distance", "agreement", "membership".

    Raises:
        ValueError: there is no chart of that name.
    """

    story: RunStory
    name: str

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def bokeh(self) -> Any:
        """The same as a bokeh figure, made anew: to change, or to show with `bokeh.io.show`."""
        return figure(self.story, self.name)

    @property
    def text(self) -> str:
        """What it shows, in a sentence or two."""
        return text_of(self.story, self.name)

    @property
    def svg(self) -> str:
        """The drawing, as the text of an SVG file."""
        if self.name in LANE_NAMES:
            return "\n".join(_lanes(lanes(self.story, self.name)))
        if self.name == "bytes":
            return "\n".join(_over_bytes(self.story, self.text))
        return "\n".join(_over_steps(self.story, self.name, self.text))

    def __repr__(self) -> str:
        return f"<chart: {self.text}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "image/svg+xml": self.svg}


@dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def _over_steps(story: RunStory, name: str, text: str) -> list[str]:
    """The lines of the SVG file."""
    lines = _head(text, f"{_UNITS[name]} over steps")
    steps, values = story.rows["step"].astype(float), _values(story, name)
    if np.isfinite(values).any():
        x = _Scale(steps[0], max(steps[-1], steps[0] + 1), _LEFT, _WIDTH - _RIGHT)
        y = _upright(values, from_zero=name != "loss")
        lines += [*_axes(x, y, least=1.0), *_curve(steps, values, x, y), *_incidents(story, x)]
    else:
        lines.append(f'<text x="{_LEFT}" y="{_HEIGHT / 2}">{escape(text)}</text>')
    return [*lines, "</svg>"]


def _over_bytes(story: RunStory, text: str) -> list[str]:
    """Likewise, of the loss over what was sent."""
    shown = sent.curve(story)
    if not np.isfinite(shown.losses).any():
        return _said(text)
    unit, scale = unit_of(shown.sent_bytes.max())
    lines, gone = _head(text, f"loss over {unit} sent by all ranks"), shown.sent_bytes / scale
    x = _Scale(0.0, float(gone[-1]) or 1.0, _LEFT, _WIDTH - _RIGHT)
    y = _upright(shown.losses, from_zero=False)
    lines += [*_axes(x, y), *_curve(gone, shown.losses, x, y)]
    marks = _incidents(story, x, lambda step: shown.at(step) / scale)
    return [*lines, *marks, "</svg>"]


def _upright(values: NDArray[np.float64], *, from_zero: bool) -> _Scale:
    """With some room around the values."""
    known = values[np.isfinite(values)]
    low = 0.0 if from_zero else float(known.min())
    high = max(float(known.max()), low)
    margin = 0.06 * (high - low) or 0.5
    return _Scale(0.0 if from_zero else low - margin, high + margin, _HEIGHT - _BOTTOM, _TOP)


def _head(text: str, title: str, height: int = _HEIGHT) -> list[str]:
    """The file's beginning."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" font-family="{escape(palette.FONT)}" '
        f'font-size="12" fill="{palette.INK}">',
        f"<title>{escape(text)}</title>",
        f'<text x="{_LEFT}" y="16">{escape(title)}</text>',
    ]


def _said(sentence: str) -> list[str]:
    """Likewise, where there is nothing to draw."""
    parts = textwrap.wrap(sentence, _LINE_CHARACTERS)
    lines = _head(sentence, "", _TOP + 18 * len(parts))
    for number, part in enumerate(parts):
        lines.append(f'<text x="8" y="{_TOP + 18 * number}">{escape(part)}</text>')
    return [*lines, "</svg>"]


def _lanes(shown: Lanes) -> list[str]:
    """Likewise, with a lane for each slot; what a bar is is told where the mouse rests."""
    if not shown.bars:
        return _said(shown.sentence)
    height = _TOP + _LANE * len(shown.names) + _BOTTOM
    lines = _head(shown.sentence, shown.unit, height)
    end = max(bar.ended for bar in shown.bars)
    x = _Scale(0, end or 1.0, _LEFT, _WIDTH - _RIGHT)
    for lane, name in enumerate(shown.names):
        y = _TOP + _LANE * (lane + 0.5)
        lines.append(f'<text x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{name}</text>')
    for bar in shown.bars:
        left, width = x(bar.began), max(0.5, x(bar.ended) - x(bar.began))
        y, deep = _TOP + _LANE * (bar.lane + bar.top), _LANE * (bar.bottom - bar.top)
        size = f": {bar.ended - bar.began:.2f} {shown.unit.split()[0]}" if shown.is_measured else ""
        told = escape(bar.what + size)
        lines.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{deep:.1f}" '
            f'fill="{bar.colour}"><title>{told}</title></rect>'
        )
    lines += [*_ticks_below(x, height), *_keys(shown)]
    return [*lines, "</svg>"]


def _keys(shown: Lanes) -> list[str]:
    """From the right, in the line of the title."""
    lines, x = [], float(_WIDTH - _RIGHT)
    for colour, what in reversed(shown.keys):
        x -= _CHARACTER * len(what)
        lines.append(f'<text x="{x:.0f}" y="16">{escape(what)}</text>')
        lines.append(f'<rect x="{x - 14:.0f}" y="6" width="10" height="10" fill="{colour}"/>')
        x -= 24
    return lines


def _values(story: RunStory, name: str) -> NDArray[np.float64]:
    if name == "throughput":
        return throughput(story.rows)
    values: NDArray[np.float64] = story.rows["loss" if name == "loss" else "world_size"]
    return values.astype(float)


def _axes(x: _Scale, y: _Scale, *, least: float = 0.0) -> list[str]:
    lines = []
    for tick in ticks(y.low, y.high):
        at = f"{y(tick):.1f}"
        lines.append(f'<path d="M{x.begin} {at}H{x.end}" stroke="{palette.FAINT}"/>')
        told = f'y="{at}" dy="4" text-anchor="end">{tick_text(tick)}</text>'
        lines.append(f'<text x="{_LEFT - 8}" {told}')
    return lines + _ticks_below(x, _HEIGHT, least=least)


def _ticks_below(x: _Scale, height: int, *, least: float = 0.0) -> list[str]:
    return [
        f'<text x="{x(tick):.1f}" y="{height - 12}" text-anchor="middle">{tick_text(tick)}</text>'
        for tick in ticks(x.low, x.high, least=least)
    ]


def _curve(
    steps: NDArray[np.float64], values: NDArray[np.float64], x: _Scale, y: _Scale
) -> list[str]:
    """The line; parted where a value is no finite number. A value that stands alone is a dot."""
    path, is_down = [], False
    picked = _picked(values)
    for index in picked:
        if is_finite := bool(np.isfinite(values[index])):
            command = "L" if is_down else "M"
            path.append(f"{command}{x(steps[index]):.1f} {y(values[index]):.1f}")
        is_down = is_finite
    colour = palette.slot_colour(0)
    dots = [
        f'<circle cx="{x(steps[index]):.1f}" cy="{y(values[index]):.1f}" r="2.5" fill="{colour}"/>'
        for index in picked[lonely(values[picked])]
    ]
    return [
        *dots,
        f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'stroke-linecap="round" stroke-linejoin="round"/>',
    ]


def _picked(values: NDArray[np.float64]) -> NDArray[np.intp]:
    if len(values) <= _MAX_POINTS:
        return np.arange(len(values))
    picked = [0, len(values) - 1]
    for begin, end in pairwise(np.linspace(0, len(values), _MAX_POINTS // 2 + 1).astype(int)):
        part = values[begin:end]
        if np.isfinite(part).all():
            picked += [begin + int(part.argmin()), begin + int(part.argmax())]
        else:  # the gap is to be seen, and what is beside it
            wild = np.flatnonzero(~np.isfinite(part))
            picked += [begin, begin + int(wild[0]), end - 1]
    return np.unique(picked)


def _incidents(story: RunStory, x: _Scale, place_of: Callable[[float], float] = float) -> list[str]:
    """A mark for each above the curve; what it was is told where the mouse rests."""
    lines = []
    for incident in story.incidents:
        step = place(incident, story.rows)
        if step is not None and x.low <= place_of(step) <= x.high:
            at, slots = f"{x(place_of(step)):.1f}", ", ".join(map(str, incident.slots))
            told = escape(f"step {step}: slot {slots} {incident.kind} ({incident.cause})")
            lines.append(
                f'<g><title>{told}</title><path d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}" '
                f'stroke="{palette.INK}" stroke-dasharray="2 3"/>'
                f'<text x="{at}" y="{_TOP}" text-anchor="middle">'
                f"{palette.SYMBOLS[incident.kind]}</text></g>"
            )
    return lines
