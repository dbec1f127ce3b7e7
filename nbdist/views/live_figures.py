"""The charts of the live views as bokeh figures without data; the page fills their sources.

Made in the kernel, once, for `views.bundle`. Colours of text and axes are the page's: it gives them
by style variables, so that a change of theme needs a repaint only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.core.properties import field, value
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure as bokeh_figure

from nbdist.views import palette

if TYPE_CHECKING:
    from bokeh.models.renderers import GlyphRenderer

LOSS_FORMAT: dict[str, Any] = {"@loss": "printf"}
"""Of what hovers: the only one that writes a loss of any size to so many digits."""
LOSS_TIP = "@loss{%.5g}"

_MARK_COLUMNS = ("x", "y", "number", "what", "colour", "marker", "ink")


def live_figures() -> dict[str, bokeh_figure]:
    """Name -> figure; names of sources are those that the page's views fill."""
    return {
        "loss": _loss(),
        "rate": _over_steps("rate", "samples/s, all ranks", "@rate{0,0} samples/s", height=170),
        "compute": _compute(),
        "sync": _sync(),
        "pipeline": _pipeline(),
        "traffic": _lengths(),
        "bytes": _bytes(),
        "memory": _lengths(),
        "growth": _growth(),
        "distance": _lengths(),
        "agreement": _agreement(),
        "membership": _membership(),
        "incidents": _incidents(),
    }


def _loss() -> bokeh_figure:
    chart = _over_steps("loss", "loss", LOSS_TIP)
    _beneath(chart)
    return chart


def _bytes() -> bokeh_figure:
    """Loss over what was sent."""
    chart = _empty("MiB sent by all ranks", "loss", 230)
    source = _source("curve", "x", "loss", "step", "ranks", "unit")
    line = chart.line(
        "x", "loss", source=source, line_width=1.8, line_color=palette.SLOT_COLOURS[0]
    )
    _dots(chart, _source("curve_dots", "x", "y"), palette.SLOT_COLOURS[0])
    tips = [("", LOSS_TIP), ("sent", "@x{0,0.0} @unit"), ("step", "@step"), ("ranks", "@ranks")]
    chart.add_tools(HoverTool(renderers=[line], tooltips=tips, formatters=LOSS_FORMAT))
    _marks(chart)
    _beneath(chart)
    return chart


def _beneath(chart: bokeh_figure) -> None:
    """The loss of another run."""
    beneath = _source("reference", "x", "value")
    chart.line(
        "x",
        "value",
        source=beneath,
        line_width=6,
        line_color=palette.REFERENCE,
        line_alpha=0.8,
        level="underlay",
    )


def _over_steps(name: str, y_label: str, tip: str, height: int = 230) -> bokeh_figure:
    chart = _empty("step", y_label, height)
    tick_steps(chart)
    source = _source(name, "x", name, "step", "generation", "ranks")
    line = chart.line("x", name, source=source, line_width=1.8, line_color=palette.SLOT_COLOURS[0])
    _dots(chart, _source(f"{name}_dots", "x", "y"), palette.SLOT_COLOURS[0])
    tips = [("", tip), ("step", "@step"), ("ranks", "@ranks"), ("generation", "@generation")]
    hover = HoverTool(renderers=[line], tooltips=tips, mode="vline", formatters=LOSS_FORMAT)
    chart.add_tools(hover)
    _marks(chart)
    return chart


def _dots(chart: bokeh_figure, source: ColumnDataSource, colour: Any) -> None:
    """Values that stand alone: a line of one point is nothing."""
    chart.scatter("x", "y", source=source, size=5, fill_color=colour, line_color=None)


def tick_steps(chart: bokeh_figure) -> None:
    """Half a step is none."""
    for axis in chart.xaxis:
        axis.ticker = BasicTicker(min_interval=1)


def _marks(chart: bokeh_figure) -> None:
    source = _source("marks", *_MARK_COLUMNS)
    marks = mark_steps(chart, source, edge=None, ink="ink")
    chart.add_tools(HoverTool(renderers=[marks], tooltips=[("incident", "@number"), ("", "@what")]))


def mark_steps(
    chart: bokeh_figure, source: ColumnDataSource, *, edge: str | None, ink: str
) -> GlyphRenderer[Any]:
    """Numbered markers at steps, each with an upright line; returns what a pointer can hover over.

    Args:
        chart: gets them.
        source: where (x, y) and what each is (number, colour, marker).
        edge: colour around a marker.
        ink: colour of the numbers, or the column that has them.
    """
    chart.vspan("x", source=source, line_color="colour", line_width=1.2, line_dash=[4, 3])
    marks = chart.scatter(
        "x",
        "y",
        source=source,
        marker=field("marker"),
        size=11,
        fill_color="colour",
        line_color=edge,
        line_width=1,
    )
    chart.text(
        "x",
        "y",
        "number",
        source=source,
        x_offset=8,
        text_baseline="middle",
        **{**_TEXT, "text_color": ink},
    )
    return marks


def _compute() -> bokeh_figure:
    chart = _empty("step", "compute, ms", 170)
    tick_steps(chart)
    lines = _slot_lines(chart, "compute")
    _dots(chart, _source("compute_dots", "x", "y", "colour"), field("colour"))
    heat = _source("heat", "left", "right", "bottom", "top", "colour", "slot", "ms")
    cells = quads(chart, heat)
    tips = [("slot", "@slot"), ("step", "$x{0}"), ("compute", "$y{0.0} ms")]
    chart.add_tools(HoverTool(renderers=[lines], tooltips=tips))
    chart.add_tools(
        HoverTool(renderers=[cells], tooltips=[("slot", "@slot"), ("compute", "@ms{0.0} ms")])
    )
    return chart


def _sync() -> bokeh_figure:
    chart = _empty("ms since the step began", "", 260, x_range=_told_range())
    chart.y_range = Range1d(start=1, end=0)
    bars = _source(
        "bars",
        *(
            "left",
            "right",
            "bottom",
            "top",
            "colour",
            "hatch",
            "what",
            "who",
            "ms",
            "size",
            "letter",
        ),
        *("middle", "height"),
    )
    drawn = _bars(chart, bars, hatch_alpha=0.25, hatch_color="white")
    _letters(chart)
    tips = [("", "@what"), ("", "@who"), ("takes", "@ms{0.00} ms"), ("size", "@size")]
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    _lanes(chart)
    return chart


def _letters(chart: bokeh_figure) -> None:
    """On bars that have room for one."""
    letters = _source("letters", "x", "y", "letter")
    chart.text(
        "x",
        "y",
        "letter",
        source=letters,
        text_align="center",
        text_baseline="middle",
        **{**_TEXT, "text_color": "white", "text_font_style": "bold"},
    )


def _pipeline() -> bokeh_figure:
    chart = _empty("ms since the batch began", "", 260, x_range=_told_range())
    chart.y_range = Range1d(start=1, end=0)
    edges = ("left", "right", "bottom", "top", "colour", "hatch")
    bars = _source("bars", *edges, "what", "who", "ms", "size", "letter", "edge")
    drawn = _bars(chart, bars, hatch_alpha=0.6, hatch_color="gray")
    drawn.glyph.update(line_color=field("edge"), line_width=0.8)  # else neighbours run together
    chain = _source("chain", "left", "right", "bottom", "top", "ink")
    chart.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        source=chain,
        fill_color=None,
        line_color="ink",
        line_width=1.5,
    )
    _letters(chart)
    tips = [("", "@what"), ("", "@who"), ("takes", "@ms{0.00} ms")]
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    _lanes(chart)
    return chart


def _lengths() -> bokeh_figure:
    """Bars of bytes."""
    chart = _empty("MiB", "", 170, x_range=_told_range())
    chart.y_range = Range1d(start=1, end=0)
    edges = ("left", "right", "bottom", "top", "colour", "hatch")
    bars = _bars(chart, _source("lengths", *edges, "slot", "what", "size", "detail"))
    tips = [("slot", "@slot"), ("", "@what"), ("", "@size"), ("", "@detail")]
    chart.add_tools(HoverTool(renderers=[bars], tooltips=tips))
    _lanes(chart)
    return chart


def _agreement() -> bokeh_figure:
    """Cells, each with a letter."""
    chart = _lengths()
    tick_steps(chart)  # half a block is none, either
    _letters(chart)
    return chart


def _growth() -> bokeh_figure:
    chart = _empty("s since the cluster began", "MiB", 150)
    moments = _source("moments", "x", "text")
    marks = chart.vspan("x", source=moments, line_color="gray", line_width=1, line_dash=[2, 2])
    lines = _slot_lines(chart, "growth")
    chart.add_tools(HoverTool(renderers=[lines], tooltips=[("slot", "@slot"), ("", "$y{0.0}")]))
    chart.add_tools(HoverTool(renderers=[marks], tooltips=[("", "@text")]))
    return chart


def _slot_lines(chart: bokeh_figure, name: str) -> GlyphRenderer[Any]:
    """A line for each slot."""
    source = _source(name, "xs", "ys", "colour", "dash", "slot")
    return chart.multi_line(
        "xs", "ys", source=source, line_color="colour", line_dash=field("dash"), line_width=1.5
    )


def _membership() -> bokeh_figure:
    chart = _empty("s since the cluster began", "", 200)
    chart.y_range = Range1d(start=1, end=0)
    source = _source("lives", "left", "right", "bottom", "top", "colour", "hatch", "slot", "state")
    lives = _bars(chart, source, hatch_alpha=0.6, hatch_color="gray")
    tips = [("slot", "@slot"), ("", "@state"), ("from", "@left{0.0} s"), ("to", "@right{0.0} s")]
    chart.add_tools(HoverTool(renderers=[lives], tooltips=tips))
    generations = _source("generations", "x", "y", "text", "ink")
    chart.vspan("x", source=generations, line_color="gray", line_width=1, line_dash=[2, 2])
    chart.text(
        "x",
        "y",
        "text",
        source=generations,
        x_offset=3,
        text_baseline="top",
        text_color="ink",
        **_TEXT,
    )
    _lanes(chart)
    return chart


def _incidents() -> bokeh_figure:
    # Side by side on a log axis: parts of a millisecond and of ten seconds are both to be seen.
    chart = _empty("ms, on a log axis", "", 140, x_axis_type="log", x_range=_told_range())
    chart.y_range = Range1d(start=1, end=0)
    chart.xaxis.ticker = FixedTicker(ticks=[10.0**power for power in range(-3, 8)])
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    source = _source(
        "parts", "left", "right", "bottom", "top", "colour", "hatch", "number", "part", "ms"
    )
    parts = _bars(chart, source, hatch_alpha=0.5, hatch_color="white")
    tips = [("incident", "@number"), ("", "@part"), ("takes", "@ms{0,0.[00]} ms")]
    chart.add_tools(HoverTool(renderers=[parts], tooltips=tips))
    _lanes(chart)
    return chart


def _told_range() -> Range1d:
    """For a chart whose page says where its axis ends: one that follows its data would, too."""
    return Range1d(start=1, end=2)


_TEXT: dict[str, Any] = {"text_font": value(palette.FONT), "text_font_size": "11px"}


def quads(chart: bokeh_figure, source: ColumnDataSource, **look: Any) -> GlyphRenderer[Any]:
    """Boxes, by the columns that say where each edge is and what colour each has."""
    return chart.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        source=source,
        fill_color="colour",
        line_color=None,
        **look,
    )


def _bars(chart: bokeh_figure, source: ColumnDataSource, **look: Any) -> GlyphRenderer[Any]:
    """Boxes that tell by a hatch, too, what they are."""
    return quads(chart, source, hatch_pattern=field("hatch"), hatch_scale=6, **look)


def _lanes(chart: bokeh_figure) -> None:
    """Rows that have names instead of numbers; the page sets them."""
    chart.yaxis.ticker = FixedTicker(ticks=[])
    chart.ygrid.grid_line_color = None
    chart.yaxis.axis_line_color = chart.yaxis.major_tick_line_color = None


def _source(name: str, *columns: str) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _empty(x_label: str, y_label: str, height: int, **options: Any) -> bokeh_figure:
    options.setdefault("x_range", DataRange1d(range_padding=0.02, only_visible=False))
    chart = bokeh_figure(
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset",
        active_drag="box_zoom",
        active_scroll=None,
        x_axis_label=x_label,
        y_axis_label=y_label,
        y_range=DataRange1d(range_padding=0.1),
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=76,
        min_border_right=12,
        **options,
    )
    chart.toolbar_location = (
        None  # the page has a button; each toolbar costs a third of a first draw
    )
    for axis in chart.axis:
        axis.minor_tick_line_color = None
        axis.axis_label_text_font = axis.major_label_text_font = palette.FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
    chart.xgrid.grid_line_color = None
    return chart
