"""Where the main thread is, read from its stack by another thread, without stopping it.

A main thread waits when its innermost Python frame is torch's, stays at the same instruction, and
uses next to no CPU time. That covers collectives called by name, and those inside native code
(DDP's backward, autograd), which no wrapper in Python could see.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from nbdist.protocol.events import Where

if TYPE_CHECKING:
    from types import FrameType

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with file names of code objects
_DISTRIBUTED = os.path.join(_TORCH, "distributed")  # noqa: PTH118
_WRAPPERS = {
    "wrapper",
    "inner",
    "_fn",
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "decorate_context",
}
BUSY_SHARE = 0.2
"""A thread that uses more of a core than this is not waiting."""


class Whereabouts:
    """Looks at the main thread now and then; one looker."""

    def __init__(self, user_ns: dict[str, Any]) -> None:
        self._user_ns = user_ns
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._last: tuple[int, int, float, float] | None = None
        self._since = 0.0

    def look(self, now: float) -> Where | None:
        """What the main thread waits in since when, or None where it does not wait."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - its documented name
        cpu = time.clock_gettime(self._clock)
        if frame is None or not frame.f_code.co_filename.startswith(_TORCH):
            self._last = None
            return None
        last, self._last = self._last, (id(frame), frame.f_lasti, now, cpu)
        if (
            last is None
            or last[:2] != self._last[:2]
            or cpu - last[3] > BUSY_SHARE * (now - last[2])
        ):
            self._since = now
            return None
        operation, line = self._describe(frame)
        return Where(operation=operation, line=line, since_s=self._since)

    def _describe(self, frame: FrameType | None) -> tuple[str, str]:
        operation = "native wait"
        while frame is not None and _is_plumbing(frame):
            name = frame.f_code.co_name
            if frame.f_code.co_filename.startswith(_DISTRIBUTED) and name not in _WRAPPERS:
                operation = name
            frame = frame.f_back
        if frame is None:
            return operation, ""
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        place = "cell" if frame.f_globals is self._user_ns else frame.f_code.co_filename
        return operation, f"{place} line {frame.f_lineno}" + (f": {text}" if text else "")


def _is_plumbing(frame: FrameType) -> bool:
    """Whether a frame is torch's, or one of ours that torch calls."""
    name = frame.f_code.co_filename
    return name.startswith(_TORCH) or f"{os.sep}nbdist{os.sep}engine{os.sep}" in name
