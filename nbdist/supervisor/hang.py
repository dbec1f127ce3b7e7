"""When is an engine that sends no beats taken for dead? Pure: observations in, a verdict out.

A beat is no threshold. In a cell or idle, an engine is killed only when its process makes no
progress at all for `hang_timeout_s`: it is stopped, or uses no CPU time. Busy without a beat is
native code that holds the interpreter, and is left alone; so is a process that a debugger holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """A look at a process."""

    is_stopped: bool
    is_traced: bool
    cpu_s: float


@dataclass
class HangWatch:
    """One engine's clock."""

    hang_timeout_s: float
    last_beat: float
    last_progress: float
    cpu_s: float | None = None

    def beat(self, now: float) -> None:
        """A beat came."""
        self.last_beat = self.last_progress = now
        self.cpu_s = None

    def is_silent(self, now: float) -> bool:
        """Whether beats have been missing long enough to look at the process."""
        return now - self.last_beat > min(1.0, self.hang_timeout_s / 2)

    def is_hung(self, seen: Observation, now: float) -> bool:
        """Judge a look at a silent engine; call it a few times a second."""
        if self.cpu_s is None:
            # One look convicts nobody: if the watcher itself stood still, beats are waiting.
            self.cpu_s = seen.cpu_s
            return False
        used_cpu = seen.cpu_s > self.cpu_s and not seen.is_stopped
        self.cpu_s = seen.cpu_s
        if seen.is_traced or used_cpu:
            self.last_progress = now
        return now - self.last_progress > self.hang_timeout_s
