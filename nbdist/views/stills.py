"""Pictures in the place of a live view, for front ends in which no page answers.

Some show a widget but let it say nothing (Colab, to cells that ran before), some forbid the code
that it needs. Used in the kernel: the waiting is a timer's, the pictures come from a thread of
their own, seldom, in bounded number, and only while somebody may look.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_WORD_LIMIT_S = 8.0
"""A page that draws has spoken by then, once the kernel could hear it."""
DEAF_LIMIT_S = 3.0
"""The same where pages are known to say nothing."""
PERIOD_S = 2.0
LATE_PERIOD_S = 10.0
NUM_OFTEN = 30
"""Pictures that come once in `PERIOD_S`; those after them once in `LATE_PERIOD_S`."""
MAX_PICTURES = 400
REASON = (
    "nbdist: no page has answered, so these are pictures that are renewed from time to time. "
    "Live views need a front end that runs widgets (JupyterLab, Notebook 7, VS Code). "
    "Orders: %dist_kill, %dist_pause and the like."
)

log = logging.getLogger(__name__)


class Stills:
    """Waits for a page to speak; shows pictures where none does.

    Args:
        show: shows a picture; whether there may be others later.
        when_idle: calls its argument once the kernel has heard what was said before.
    """

    def __init__(
        self, show: Callable[[], bool], when_idle: Callable[[Callable[[], None]], None]
    ) -> None:
        self._show, self._when_idle = show, when_idle
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._is_watching = False
        self.is_on = False
        """Pictures stand where the live view was."""

    def watch(self) -> None:
        """A live view was displayed; called at each display."""
        with self._lock:
            if self._is_watching or self._stopped.is_set():
                return
            self._is_watching = True
        is_deaf = "google.colab" in sys.modules
        limit_s = DEAF_LIMIT_S if is_deaf else FIRST_WORD_LIMIT_S
        timer = threading.Timer(limit_s, self._begin if is_deaf else self._ask)
        timer.name, timer.daemon = "nbdist-stills-timer", True
        timer.start()

    def stop(self) -> None:
        """A page has spoken, or nothing more is to be shown; for any thread."""
        self._stopped.set()

    def _ask(self) -> None:
        # While a cell runs, a kernel without subshells hears no page: that says nothing about one.
        if not self._stopped.is_set():
            self._when_idle(self._begin)

    def _begin(self) -> None:
        if not self._stopped.is_set():
            threading.Thread(target=self._run, name="nbdist-stills", daemon=True).start()

    def _run(self) -> None:
        self.is_on = True
        for number in range(MAX_PICTURES):
            try:
                if not self._show():
                    return
            except Exception:
                # The end of a thread of its own: nobody is there to catch it.
                log.exception("a dashboard's picture could not be shown; no more will be")
                return
            if self._stopped.wait(PERIOD_S if number < NUM_OFTEN else LATE_PERIOD_S):
                return
