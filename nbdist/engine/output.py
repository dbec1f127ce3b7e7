"""Standard output and error of an engine: to whoever runs the cell, and to the slot's log."""

from __future__ import annotations

import os
from typing import Any, TextIO

from ipykernel.iostream import OutStream

_log: TextIO | None = None


def open_log() -> TextIO:
    """The slot's log, on a descriptor of its own: the standard ones are about to be captured."""
    global _log  # noqa: PLW0603 - one process, one log
    if _log is None:
        _log = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    return _log


class LoggedStream(OutStream):
    """A stream of the kernel's that also writes to the log."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **kwargs: Any) -> None:
        super().__init__(session, pub_thread, name, echo=open_log(), **kwargs)
