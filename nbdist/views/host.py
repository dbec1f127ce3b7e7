"""What a dashboard asks of the IPython kernel that it lives in, if it lives in one.

Used in the kernel, by any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def when_idle(act: Callable[[], None]) -> None:
    """Have it called in the kernel's loop, when no cell runs and what came before is heard."""
    own = kernel()
    if own is not None:
        loop = own.io_loop
        loop.add_callback(lambda: loop.call_later(IDLE_S, act))
