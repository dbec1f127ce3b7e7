"""What charts of lanes consist of: bars, and what they are called. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that lasted."""

    lane: int
    top: float
    """From the lane's upper edge, as a share of its height."""
    bottom: float
    began: float
    ended: float
    colour: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A chart of them."""

    unit: str
    """Of the times."""
    sentence: str
    """What it shows, or why it shows nothing."""
    names: tuple[str, ...] = ()
    bars: list[Bar] = field(default_factory=list)
    keys: tuple[tuple[str, str], ...] = ()
    """Colour and what it stands for, where slots have not their own."""
    is_measured: bool = True
    """A bar's length says something."""
