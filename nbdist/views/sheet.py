"""A sheet with panels, axes and bars, drawn by Pillow for `views.picture`. In any process.

It has no ground, and colours that are read on any.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from nbdist.views import palette
from nbdist.views.ticks import tick_text, ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WIDTH = 960
"""In pixels of the page."""
_SCALE = 2
"""Pixels of the picture for one of the page."""
_NUM_COLOURS = 64
_DOT = 5
"""Width and height of a value that no line leads to."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Sheet:
    """A clear sheet on which things are placed in pixels of the page."""

    def __init__(self, width: int, height: int) -> None:
        # Clear, but of the text's colour: letters' edges, which are half clear, have no fringe.
        clear = (*ImageColor.getrgb(palette.INK), 0)
        self._image = Image.new("RGBA", (width * _SCALE, height * _SCALE), clear)
        self._pen = ImageDraw.Draw(self._image)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        colour: str = palette.INK,
        anchor: str = "lm",
        room: float = WIDTH,
    ) -> None:
        """A line of text; with more than fits into `room` it is cut, and says so."""
        font = _font(size * _SCALE)
        while len(text) > 1 and self._pen.textlength(text, font) > room * _SCALE:
            text = f"{text.rstrip('…')[:-1]}…"
        self._pen.text((x * _SCALE, y * _SCALE), text, fill=colour, font=font, anchor=anchor)

    def bar(self, box: Box, colour: str) -> None:
        """A filled box, at least a pixel wide and high."""
        left, top, right, bottom = (round(edge * _SCALE) for edge in box)
        self._pen.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), fill=colour)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        """One through these points."""
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._pen.line(scaled, fill=colour, width=round(width * _SCALE), joint="curve")

    def frame(self, box: Box) -> None:
        """The outline of a panel."""
        scaled = [edge * _SCALE for edge in box]
        self._pen.rounded_rectangle(scaled, radius=6 * _SCALE, outline=palette.FAINT, width=_SCALE)

    def png(self) -> bytes:
        """The bytes of its file."""
        file = io.BytesIO()
        self._image.quantize(_NUM_COLOURS, Image.Quantize.FASTOCTREE).save(file, "PNG")
        return file.getvalue()


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class Axes:
    """A panel with a title and room for a chart; maps values to places."""

    def __init__(
        self,
        sheet: Sheet,
        box: Box,
        title: str,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        unit: str,
        least: float = 0.0,
    ) -> None:
        left, top, right, bottom = box
        sheet.text(left + 10, top + 15, title, size=13)
        sheet.text(right - 10, bottom - 11, unit, size=11, anchor="rm")
        self.sheet = sheet
        self.left, self.top, self.right, self.bottom = left + 58, top + 34, right - 14, bottom - 32
        self._x, self._y = x, y
        for tick in ticks(*x, least=least):
            place = (self.at(tick, y[0])[0], self.bottom + 9)
            sheet.text(*place, tick_text(tick), size=11, anchor="mm")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a value is drawn."""
        width, height = self._x[1] - self._x[0] or 1.0, self._y[1] - self._y[0] or 1.0
        across = self.left + (self.right - self.left) * (x - self._x[0]) / width
        return across, self.bottom - (self.bottom - self.top) * (y - self._y[0]) / height

    def grid(self) -> None:
        """Lines and numbers of the upright axis."""
        for tick in ticks(*self._y):
            _, y = self.at(self._x[0], tick)
            self.sheet.line([(self.left, y), (self.right, y)], palette.FAINT)
            self.name(y, tick_text(tick))

    def curve(self, x: NDArray[np.generic], y: NDArray[np.generic], colour: str) -> None:
        """A line, parted where a value is not finite; a value that stands alone is a dot."""
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
        elif run:
            (x, y), radius = run[0], _DOT / 2
            self.sheet.bar((x - radius, y - radius, x + radius, y + radius), colour)

    def name(self, y: float, text: str) -> None:
        """What stands at the left of a row."""
        self.sheet.text(self.left - 6, y, text, size=11, anchor="rm")

    def lane(self, number: int, num: int) -> tuple[float, float]:
        """Top and bottom of one of several rows."""
        height = (self.bottom - self.top) / max(num, 1)
        return self.top + number * height, self.top + (number + 1) * height
