"""Round numbers along an axis, as BokehJS chooses them in the live views. Pure."""

from __future__ import annotations

import math

MAX_INTERVALS = 6
"""Between ticks: more are hard to read in a small chart."""

_ROUNDING = 1e-9
"""Of a division: a tick at the very end is not to be lost."""


def ticks(low: float, high: float, *, least: float = 0.0) -> list[float]:
    """Ones, twos or fives times a power of ten, between two values; at least two of them.

    Args:
        low: the axis' beginning.
        high: its end; where that is not beyond the beginning, this is the only tick.
        least: no two are nearer to one another: 1 where only whole numbers are values.
    """
    if not low < high:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / MAX_INTERVALS))
    units = (size * number for number in (1, 2, 5, 10))
    unit = max(least, next(u for u in units if (high - low) / u <= MAX_INTERVALS))
    first, last = math.ceil(low / unit - _ROUNDING), math.floor(high / unit + _ROUNDING)
    return [float(f"{number * unit:.10g}") for number in range(first, last + 1)]


def tick_text(tick: float) -> str:
    """As it is written at the axis."""
    return f"{tick:,.10g}"
