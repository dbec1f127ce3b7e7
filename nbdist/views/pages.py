"""Which pages look at a dashboard, and the thread that does what they ask for.

Used in the kernel, by any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_LIMIT_S = 120.0
"""A page that has said nothing for so long is not there any more."""
_EXPECTED = "expected"
"""Stands for pages that were sent frames unasked and have not answered yet."""

log = logging.getLogger(__name__)


class Pages:
    """The views on pages, by the names that they give themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        """View -> when it was last heard of."""
        self._direct: set[str] = set()

    def expect(self) -> None:
        """Somebody may look, but has not said so."""
        with self._lock:
            self._heard[_EXPECTED] = time.monotonic()

    def expect_none(self) -> None:
        """Nobody has said so."""
        with self._lock:
            self._drop(_EXPECTED)

    def hear(self, view: str, *, is_direct: bool = False) -> None:
        """A view is there; `is_direct`: it can be heard while a cell runs."""
        with self._lock:
            self._heard.pop(_EXPECTED, None)
            self._heard[view] = time.monotonic()
            if is_direct:
                self._direct.add(view)

    def is_served(self, view: str) -> bool:
        """It was sent frames unasked and has not answered yet, or has been heard before."""
        with self._lock:
            return view in self._heard or _EXPECTED in self._heard

    def leave(self, view: str) -> None:
        """A view is closed; it may have been sent frames unasked and said nothing until now."""
        with self._lock:
            self._drop(_EXPECTED)
            self._drop(view)

    @property
    def is_empty(self) -> bool:
        """Nobody looks."""
        with self._lock:
            self._expire()
            return not self._heard

    @property
    def has_direct(self) -> bool:
        """Somebody looks who acknowledges frames while a cell runs."""
        with self._lock:
            return bool(self._direct)

    def _expire(self) -> None:
        now = time.monotonic()
        for view in [v for v, at in self._heard.items() if now - at > SILENT_LIMIT_S]:
            self._drop(view)

    def _drop(self, view: str) -> None:
        self._heard.pop(view, None)
        self._direct.discard(view)


class Worker:
    """Does one thing after another, in a thread that lives while there is something to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._todo: deque[Callable[[], object]] = deque()
        self._is_busy = False

    def do(self, act: Callable[[], object]) -> None:
        """Have it done; never waits."""
        with self._lock:
            self._todo.append(act)
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (act := self._next()) is not None:
            try:
                act()
            except Exception:
                # One errand that fails must not end the thread that does all the others.
                log.exception("a dashboard could not do what it was asked for")

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._is_busy = bool(self._todo)
            return self._todo.popleft() if self._todo else None
