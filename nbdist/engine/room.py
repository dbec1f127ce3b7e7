"""Memory that nothing needs goes back to the system.

Runs in the engine's main thread, or in a process of its own.
"""

from __future__ import annotations

import ctypes
import gc

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc has it."""


def give_back() -> None:
    """Let go of what only cycles hold, and of what malloc keeps for the next who ask.

    Where there is a limit, what malloc keeps counts: threads of the next group would find no room.
    """
    gc.collect()
    if _trim is not None:
        _trim(0)
