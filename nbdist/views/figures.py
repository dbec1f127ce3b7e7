"""Charts of a run, as bokeh figures: loss, throughput and world over steps, lanes of slots.

Made in the kernel or a command's process; each call makes new models, nothing is kept.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure as bokeh_figure

from nbdist.views import palette, sent
from nbdist.views.facts import describe, lonely, place, throughput
from nbdist.views.lanes import LANE_NAMES, lanes, unit_of
from nbdist.views.live_figures import LOSS_FORMAT, LOSS_TIP, mark_steps, quads, tick_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from nbdist.protocol.story import RunStory
    from nbdist.views.bars import Lanes

NAMES = ("loss", "throughput", "world", "bytes", *LANE_NAMES)
"""The first ones over steps, which every run has."""

MAX_POINTS = 4_000
"""Of a line; of a longer one, the least and the greatest of each stretch are drawn."""

_MIN_LABEL_SHARE = 0.1
"""A generation that takes less of the width has no room for its number."""

_HEADROOM = 0.16
_TOOLS = "xpan,xwheel_zoom,box_zoom,reset,save"


def check_name(name: str) -> None:
    """Raises ValueError where there is no chart of that name."""
    if name not in NAMES:
        raise ValueError(f"no chart {name!r}: there are {', '.join(NAMES)}")


def text_of(story: RunStory, name: str) -> str:
    """What a chart shows, in a sentence or two, or why it shows nothing."""
    if name in LANE_NAMES:
        return lanes(story, name).sentence
    if name == "bytes":
        return sent.sentence(sent.curve(story))
    return describe(story, name)


def figure(story: RunStory, name: str) -> bokeh_figure:
    """One chart.

    Args:
        story: the run.
        name: one of `NAMES`.

    Raises:
        ValueError: there is no chart of that name.
    """
    check_name(name)
    if name in LANE_NAMES:
        return _lanes(lanes(story, name))
    if name in ("loss", "bytes"):
        return _loss(story) if name == "loss" else _bytes(story)
    return _throughput(story) if name == "throughput" else _world(story)


def _lanes(shown: Lanes) -> bokeh_figure:
    chart = _empty("", shown.unit, shown.sentence)
    num = len(shown.names)
    chart.y_range = Range1d(start=max(1, num), end=0)
    chart.height = 90 + 44 * max(1, num)
    columns: dict[str, list[Any]] = {
        "left": [bar.began for bar in shown.bars],
        "right": [bar.ended for bar in shown.bars],
        "top": [bar.lane + bar.top for bar in shown.bars],
        "bottom": [bar.lane + bar.bottom for bar in shown.bars],
        "colour": [bar.colour for bar in shown.bars],
        "what": [bar.what for bar in shown.bars],
        "takes": [bar.ended - bar.began for bar in shown.bars],
    }
    bars = quads(chart, ColumnDataSource(columns))
    tips = [("", "@what")]
    if shown.is_measured:
        tips.append(("takes", f"@takes{{0.00}} {shown.unit.split()[0]}"))
    chart.add_tools(HoverTool(renderers=[bars], tooltips=tips))
    ticks = [place + 0.5 for place in range(num)]
    chart.yaxis.ticker = FixedTicker(ticks=ticks)
    chart.yaxis.major_label_overrides = dict(zip(ticks, shown.names, strict=True))
    chart.ygrid.grid_line_color = None
    return chart


def _loss(story: RunStory) -> bokeh_figure:
    chart = _empty("loss", "step", describe(story, "loss"))
    if len(story.rows):
        losses = story.rows["loss"]
        top = _set_y_range(chart, losses, from_zero=False)
        chart.yaxis.formatter = BasicTickFormatter()  # a small loss would be 0.00 in the other one
        _line_of_steps(chart, story, losses)
        _mark_incidents(chart, story, top)
    return chart


def _bytes(story: RunStory) -> bokeh_figure:
    shown = sent.curve(story)
    unit, scale = unit_of(shown.sent_bytes.max(initial=0.0))
    chart = _empty("loss", f"{unit} sent by all ranks", sent.sentence(shown))
    if len(shown.places):
        picked = _thinned(shown.losses)
        top = _set_y_range(chart, shown.losses, from_zero=False)
        chart.yaxis.formatter = BasicTickFormatter()
        columns = {
            unit: shown.sent_bytes[picked] / scale,
            "loss": shown.losses[picked],
            "step": shown.steps[picked],
            "ranks": story.rows["world_size"][shown.places[picked]],
        }
        source = ColumnDataSource(columns)
        line = chart.line(unit, "loss", source=source, color=palette.TEXT, line_width=1.8)
        chart.add_tools(_hover([line], ("loss", unit, "step", "ranks")))
        _mark_incidents(chart, story, top, lambda step: shown.at(step) / scale)
    return chart


def _throughput(story: RunStory) -> bokeh_figure:
    chart = _empty("samples/s", "step", describe(story, "throughput"))
    if len(story.rows):
        rates = throughput(story.rows)
        top = _set_y_range(chart, rates, from_zero=True)
        _line_of_steps(chart, story, rates)
        _mark_incidents(chart, story, top)
    return chart


def _line_of_steps(chart: bokeh_figure, story: RunStory, values: NDArray[Any]) -> Any:
    rows, picked = story.rows, _thinned(values)
    source = ColumnDataSource(
        {
            "step": rows["step"][picked],
            "value": values[picked],
            "loss": rows["loss"][picked],
            "ms": rows["seconds"][picked] * 1000,
            "ranks": rows["world_size"][picked],
            "generation": rows["generation"][picked],
        }
    )
    line = chart.line("step", "value", source=source, color=palette.TEXT, line_width=1.8)
    if len(alone := lonely(values[picked])):
        chart.scatter(
            rows["step"][picked][alone], values[picked][alone], color=palette.TEXT, size=5
        )
    chart.add_tools(_hover([line], ("step", "loss", "ms", "ranks", "generation")))
    return line


def _world(story: RunStory) -> bokeh_figure:
    rows = story.rows
    chart = _empty("ranks", "step", describe(story, "world"))
    if not len(rows):
        return chart
    steps, sizes = rows["step"].astype(float), rows["world_size"].astype(float)
    starts = np.flatnonzero(np.diff(rows["generation"], prepend=rows["generation"][0] - 1))
    ends = np.append(steps[starts[1:]], steps[-1] + 1)
    top = _set_y_range(chart, sizes, from_zero=True)
    bands: dict[str, list[float]] = {"left": [], "right": []}
    labels: dict[str, list[Any]] = {"x": [], "text": []}
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if number % 2 == 0:
            bands["left"].append(steps[start])
            bands["right"].append(end)
        if (end - steps[start]) >= _MIN_LABEL_SHARE * (ends[-1] - steps[0]):
            labels["x"].append((steps[start] + end) / 2)
            labels["text"].append(f"generation {rows['generation'][start]}")
    chart.vstrip(
        x0="left",
        x1="right",
        source=ColumnDataSource(bands),
        fill_color=palette.BAND,
        line_color=None,
        level="underlay",
    )
    # A corner wherever a generation or the size changes is all that a line of steps needs.
    corners = np.union1d(starts, np.flatnonzero(np.diff(sizes, prepend=-1)))
    x = np.append(steps[corners], steps[-1] + 1)
    y = np.append(sizes[corners], sizes[-1])
    source = ColumnDataSource(
        {
            "step": x,
            "ranks": y,
            "generation": np.append(rows["generation"][corners], rows["generation"][-1]),
        }
    )
    colour = palette.slot_colour(0)
    chart.varea_step(
        "step", 0, "ranks", source=source, fill_color=colour, fill_alpha=0.12, step_mode="after"
    )
    line = chart.step("step", "ranks", source=source, color=colour, line_width=2, mode="after")
    chart.text(
        "x",
        0.35,
        "text",
        source=ColumnDataSource(labels),
        text_align="center",
        text_baseline="middle",
        text_color=palette.MUTED,
        text_font_size="11px",
        text_font=value(palette.FONT),
    )
    chart.add_tools(_hover([line], ("step", "ranks", "generation")))
    chart.yaxis.ticker = sorted({0, *map(int, np.unique(sizes))})
    _mark_incidents(chart, story, top)
    return chart


def _mark_incidents(
    chart: bokeh_figure, story: RunStory, y: float, place_of: Callable[[float], float] = float
) -> None:
    """A line and a numbered marker for each incident: shape by kind, colour by slot.

    Args:
        chart: gets them.
        story: the run.
        y: where their numbers stand.
        place_of: from a step to its place.
    """
    columns: dict[str, list[Any]] = {
        key: [] for key in ("x", "y", "number", "what", "cause", "colour", "marker")
    }
    for number, incident in enumerate(story.incidents, 1):
        x = place(incident, story.rows)
        if x is None:
            continue
        slots = ", ".join(map(str, incident.slots))
        columns["x"].append(place_of(x))
        columns["y"].append(y)
        columns["number"].append(str(number))
        columns["what"].append(f"{incident.kind}: slot {slots}")
        columns["cause"].append(incident.cause)
        colour = palette.slot_colour(incident.slots[0]) if incident.slots else palette.MUTED
        columns["colour"].append(colour)
        columns["marker"].append(palette.MARKERS[incident.kind])
    if not columns["x"]:
        return
    source = ColumnDataSource(columns)
    marks = mark_steps(chart, source, edge="white", ink=palette.TEXT)
    hover = HoverTool(renderers=[marks])
    hover.tooltips = [("incident", "@number"), ("", "@what"), ("cause", "@cause")]
    chart.add_tools(hover)


def _set_y_range(chart: bokeh_figure, values: NDArray[Any], *, from_zero: bool) -> float:
    """Room for the values, and above them for markers; returns the height of those."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    height = (high - low) or abs(high) or 1.0
    floor = low if from_zero else low - 0.06 * height
    chart.y_range = Range1d(start=floor, end=high + _HEADROOM * height)
    return high + _HEADROOM / 2 * height


def _thinned(values: NDArray[Any]) -> NDArray[np.intp]:
    """Indices to draw: all, or the least and the greatest of each of many stretches."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), MAX_POINTS // 2 + 1).astype(int)
    filled = np.nan_to_num(values.astype(float), nan=np.inf)
    picked = [0, len(values) - 1]
    for start, end in pairwise(edges):
        part = filled[start:end]
        picked += [start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(picked)


def _hover(renderers: list[Any], names: tuple[str, ...]) -> HoverTool:
    known = {"loss": LOSS_TIP, "ms": "@ms{0}"}
    known |= {unit: f"@{unit}{{0,0.0}}" for unit in ("KiB", "MiB", "GiB")}
    tips = [(name, known.get(name, f"@{name}")) for name in names]
    return HoverTool(renderers=renderers, tooltips=tips, mode="vline", formatters=LOSS_FORMAT)


def _empty(y_label: str, x_label: str, description: str) -> bokeh_figure:
    chart = bokeh_figure(
        height=280,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="box_zoom",
        x_axis_label=x_label,
        y_axis_label=y_label,
        y_range=Range1d(start=0, end=1),
        output_backend="svg",
    )
    if x_label == "step":
        tick_steps(chart)
    chart.name = description
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.outline_line_color = None
    chart.min_border_left = 70
    chart.x_range.range_padding = 0.02  # type: ignore[attr-defined]
    for axis in chart.axis:
        axis.axis_line_color = palette.GRID
        axis.major_tick_line_color = palette.GRID
        axis.minor_tick_line_color = None
        axis.axis_label_text_font = axis.major_label_text_font = palette.FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_label_text_color = axis.major_label_text_color = palette.MUTED
    chart.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    chart.xgrid.grid_line_color = None
    chart.ygrid.grid_line_color = palette.GRID
    return chart
