"""What a command prints while it works: headings, facts, a live line, checks that hold or not."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nbdist.cli.table import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.views.facts import Check

_REWRITE = "\r\x1b[2K"
"""Back to the line's beginning, and clear it."""


class Transcript:
    """Prints to standard output; remembers the checks."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        """All so far."""
        self._started = time.monotonic()
        self._is_terminal = _is_terminal()
        self._is_live = False
        """The last line may be written over."""

    @property
    def failed(self) -> list[Check]:
        """Those that do not hold."""
        return [check for check in self.checks if not check.holds]

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._print(f"\n{text}")

    def say(self, text: str) -> None:
        """Print some lines, indented."""
        self._print("\n".join(f"  {line}" for line in text.splitlines()))

    def live(self, text: str) -> None:
        """Print a line that the next one replaces; where output is no terminal, a plain line."""
        if not self._is_terminal:
            self.say(text)
            return
        width = shutil.get_terminal_size().columns
        print(f"{_REWRITE}  {text}"[: len(_REWRITE) + width - 1], end="", flush=True)
        self._is_live = True

    def check(self, check: Check) -> None:
        """Print one check."""
        self.checks.append(check)
        detail = f": {check.detail}" if check.detail else ""
        self._print(f"  {'ok' if check.holds else 'FAILED':6}  {check.name}{detail}")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Say how long something took."""
        started = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - started:.2f} s")

    def close(self) -> int:
        """Print the verdict; returns the exit code."""
        took = duration(time.monotonic() - self._started)
        if self.failed:
            self.heading(f"{len(self.failed)} of {len(self.checks)} checks FAILED, in {took}:")
            self.say("\n".join(check.name for check in self.failed))
        else:
            self.heading(f"All {len(self.checks)} checks hold, in {took}.")
        return int(bool(self.failed))

    def _print(self, text: str) -> None:
        if self._is_live:
            print()
            self._is_live = False
        print(text, flush=True)


def _is_terminal() -> bool:
    return sys.stdout.isatty()
