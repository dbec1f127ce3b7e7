"""What a dashboard asks of the IPython kernel that it lives in, if it lives in one.

Used in the kernel, by any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from IPython import get_ipython

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE_S = 1.0
"""So long after a cell has ended, what pages said meanwhile is heard."""


def kernel() -> Any:
    """The kernel; None where there is none."""
    return getattr(get_ipython(), "kernel", None)


def has_viewer() -> bool:
    """Whether the running cell was sent by a front end, not by a command that runs notebooks."""
    own = kernel()
    if own is None:
        return False
    request: dict[str, Any] = own.get_parent()
    return bool(request.get("content", {}).get("allow_stdin"))


class Place(NamedTuple):
    """Where something was displayed."""

    cell: str
    """Empty where the front end does not say."""
    request: str
    """Which run of that cell."""

    def is_replaced_at(self, now: Place) -> bool:
        """Its output is gone, since the same cell runs again."""
        return bool(self.cell) and self.cell == now.cell and self.request != now.request


def place() -> Place:
    """What runs now."""
    own = kernel()
    request: dict[str, Any] = {} if own is None else own.get_parent()
    cell = request.get("metadata", {}).get("cellId", "")
    return Place(cell, request.get("header", {}).get("msg_id", ""))


def when_idle(act: Callable[[], None]) -> None:
    """Have it called in the kernel's loop, when no cell runs and what came before is heard."""
    own = kernel()
    if own is not None:
        loop = own.io_loop
        loop.add_callback(lambda: loop.call_later(IDLE_S, act))
