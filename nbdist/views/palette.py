"""One look for all views: a fixed colour for each slot, a marker for each kind of incident. Pure.

The colours are those that Okabe and Ito chose, which people with any colour vision tell apart.
Nothing is told by colour alone: numbers and markers say it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.protocol.events import IncidentKind

SLOT_COLOURS = (
    "#0072B2",  # blue
    "#E69F00",  # orange
    "#009E73",  # green
    "#D55E00",  # vermilion
    "#CC79A7",  # purple
    "#56B4E9",  # sky
    "#000000",  # black
    "#F0E442",  # yellow: last, since a thin line of it is hard to see on white
)

DASHES = ("solid", "dashed", "dotted", "dotdash")
"""Of slots 0 to 7, 8 to 15 and so on, which share their colours."""

TEXT = "#1b1f24"
MUTED = "#57606a"
GRID = "#e6e8eb"
BAND = "#f4f6f8"
REFERENCE = "#8c959f"

INK = "#73787e"
"""Of text on a ground that nobody knows: on white and on black alike its contrast is above 4."""
FAINT = "#80808052"
"""There, of lines, and of what is empty."""
SILENT = "#50555b"
"""Of an engine that hung, until it was ended; on dark pages, too."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"

MARKERS: dict[IncidentKind, str] = {
    "lost": "inverted_triangle",
    "hung": "diamond",
    "joined": "triangle",
    "scaled": "square",
}
"""Bokeh's names."""

SYMBOLS: dict[IncidentKind, str] = {"lost": "▼", "hung": "◆", "joined": "▲", "scaled": "■"}
"""The same as characters."""


def slot_colour(slot: int) -> str:
    """The colour of a slot, the same in every view."""
    return SLOT_COLOURS[slot % len(SLOT_COLOURS)]


def slot_ink(slot: int) -> str:
    """The same on a ground that nobody knows: black is for light ones only."""
    colour = slot_colour(slot)
    return INK if colour == "#000000" else colour


def slot_dash(slot: int) -> str:
    """How a line of this slot is dashed."""
    return DASHES[slot // len(SLOT_COLOURS) % len(DASHES)]
