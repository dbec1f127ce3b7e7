"""Where the main thread is, read from its stack by another thread, without stopping it.

A main thread waits when its innermost Python frame is torch's, stays at the same instruction, and
uses next to no CPU time. That covers collectives called by name, and those inside native code
(DDP's backward, autograd), which no wrapper in Python could see. Where a cell itself calls native
code (`work.wait()`), or nbdist's own does (what `then` of a future returns has no frame), it waits
if it also stands in a futex: a sleep does not. One that waits again and again at the same place,
with little to do between, does not wait all the time: waits of nbdist's own are counted.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.engine.works import WORKS
from nbdist.protocol.events import NATIVE_CODE, OWN_STEP, Where

if TYPE_CHECKING:
    from types import FrameType

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with file names of code objects
_OURS = [str(Path(__file__).parents[1] / room) + os.sep for room in ("engine", "train")]
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
        self._last: tuple[int, int, int, float, float] | None = None
        self._since = 0.0

    def look(self, now: float) -> Where | None:
        """What the main thread waits in since when, or None where it does not wait."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented
        cpu = time.clock_gettime(self._clock)
        if frame is None or not self._may_wait(frame):
            self._last = None
            return None
        last, self._last = self._last, (id(frame), frame.f_lasti, WORKS.num_begun, now, cpu)
        is_still = last is not None and last[:3] == self._last[:3]
        if last is None or not is_still or cpu - last[4] > BUSY_SHARE * (now - last[3]):
            self._since = now
            return None
        if not frame.f_code.co_filename.startswith(_TORCH) and not self._stands_in_futex():
            return None
        operation, line = self._describe(frame)
        return Where(operation=operation, line=line, since_s=self._since)

    def _may_wait(self, frame: FrameType) -> bool:
        """Whether it stands in torch, or in what may have called native code itself."""
        return _is_plumbing(frame) or frame.f_globals is self._user_ns

    @staticmethod
    def _stands_in_futex() -> bool:
        """Whether the main thread waits for another thread; a sleep is something else."""
        try:  # the main thread's number is the process's; `native_id` is the zygote's after a fork
            wchan = Path(f"/proc/self/task/{os.getpid()}/wchan").read_text()
        except OSError:
            return False
        return wchan.startswith("futex")

    def _describe(self, frame: FrameType | None) -> tuple[str, str]:
        operation = NATIVE_CODE
        while frame is not None and _is_plumbing(frame):
            name = frame.f_code.co_name
            if frame.f_code.co_filename.startswith(_DISTRIBUTED) and name not in _WRAPPERS:
                operation = name
            frame = frame.f_back
        if frame is None:
            return operation, ""
        if frame.f_globals.get("__name__", "").startswith("asyncio"):
            return operation, OWN_STEP
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        place = "cell" if frame.f_globals is self._user_ns else frame.f_code.co_filename
        return operation, f"{place} line {frame.f_lineno}" + (f": {text}" if text else "")


def _is_plumbing(frame: FrameType) -> bool:
    """Whether a frame is torch's, or one of ours between torch and the user."""
    return frame.f_code.co_filename.startswith((_TORCH, *_OURS))
