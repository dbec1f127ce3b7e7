"""How slow the user makes ranks, and what may come of it. No threads, no sockets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.protocol.orders import SeatView


def slow_factor(factor: object) -> float:
    """How slow an engine is to be: any number that Python or numpy has.

    Raises:
        ValueError: it is no finite number of at least 1.
    """
    try:
        is_other = isinstance(factor, bool | str | bytes)
        number = math.nan if is_other else float(factor)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 1 <= number < math.inf:
        raise ValueError(f"factor={factor!r}: a finite number, at least 1; 1 ends it")
    return number


def risk_of(
    factor: float, seats: Iterable[SeatView], usual_s: float | None, hang_timeout_s: float
) -> list[str]:
    """A warning where ranks that are made so slow will be taken for hung; else nothing.

    Args:
        factor: how slow they will be.
        seats: as they are now; the steps so far were as slow as the slowest of them.
        usual_s: duration of a step so far; None: not known.
        hang_timeout_s: who keeps the others waiting for longer is ended.
    """
    if usual_s is None or factor == 1:
        return []
    step_s = usual_s / max((seat.slow_factor for seat in seats), default=1.0)
    if step_s * factor <= hang_timeout_s:
        return []
    return [
        f"a step takes {step_s:.2g} s, and {factor:g} times that is more than "
        f"hang_timeout_s={hang_timeout_s:g}: a rank that keeps the others waiting for so long is "
        "ended as hung; a factor of 1 ends its rest at once"
    ]
