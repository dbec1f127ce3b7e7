"""Standard output and error of an engine: to whoever runs the cell, and to the slot's log."""

from __future__ import annotations

import os
import threading
from typing import TextIO

from ipykernel.iostream import OutStream

_log: TextIO | None = None


def open_log() -> TextIO:
    """The slot's log, on a descriptor of its own: the standard ones are about to be captured."""
    global _log  # noqa: PLW0603 - one process, one log
    if _log is None:
        _log = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    return _log


class LoggedStream(OutStream):
    """A stream of the kernel's that also writes to the log.

    What native code writes to the descriptor, ipykernel itself copies to where it went before: the
    log. So only what Python writes is copied here.
    """

    def write(self, string: str) -> int:
        """Write text to whoever runs the cell, and to the log."""
        if threading.current_thread() is not getattr(self, "watch_fd_thread", None):
            open_log().write(string)
        return super().write(string) or 0
