"""Looks at engines' processes: those that send no beats, and those that vanish unreported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from nbdist.protocol import events as ev
from nbdist.supervisor.hang import HangWatch, Observation

if TYPE_CHECKING:
    from nbdist.rundir import Owner
    from nbdist.supervisor.seats import Seat

PERIOD_S = 0.25
VANISHED_AFTER_S = 1.0
"""A process is gone for so long, and its parent, who would know how it ended, has said nothing."""
CLOSE_PERIOD_S = 0.05
"""Between looks while somebody is silent: what is added to `hang_timeout_s` before it is killed."""


@dataclass(frozen=True)
class Hung:
    """An engine that makes no progress."""

    seat: Seat
    since: float
    how: str


class Watchdog:
    """Clocks of all engines, by pid."""

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._watches: dict[int, HangWatch] = {}
        self._missing_since: dict[int, float] = {}
        self._next_look = 0.0
        self._stopped_since: float | None = None
        """Since when the controller is stopped."""

    def beat(self, pid: int, now: float) -> None:
        """An engine gave a sign of life."""
        if pid not in self._watches:
            self._watches[pid] = HangWatch(self._hang_timeout_s, now, now)
        self._watches[pid].beat(now)

    def forget(self, pid: int) -> None:
        """An engine is gone."""
        self._watches.pop(pid, None)
        self._missing_since.pop(pid, None)

    def what_ails(self, controller: Owner | None, now: float) -> str:
        """What is wrong with the controller, in words; empty where nothing is."""
        if controller is None:
            return ""
        seen = observe(controller.pid) if controller.is_alive() else None
        if seen is None:
            return "has ended; its log says why"
        if not seen.is_stopped:
            self._stopped_since = None
            return ""
        self._stopped_since = self._stopped_since or now
        is_over = now - self._stopped_since > self._hang_timeout_s
        return f"is stopped for {self._hang_timeout_s:g} s" if is_over else ""

    def look(
        self, seats: list[Seat], now: float, *, at_once: bool = False
    ) -> list[Hung | ev.EngineExited]:
        """Who hangs, and who is gone for so long that nobody else will report it."""
        if now < self._next_look and not at_once:
            return []
        is_any_silent = any(watch.is_silent(now) for watch in self._watches.values())
        self._next_look = now + (CLOSE_PERIOD_S if is_any_silent else PERIOD_S)
        found: list[Hung | ev.EngineExited] = []
        for seat in seats:
            if seat.pid is None:
                continue
            seen = observe(seat.pid)
            watch = self._watches.get(seat.pid)
            if seen is None:
                since = self._missing_since.setdefault(seat.pid, now)
                if now - since > VANISHED_AFTER_S:
                    found.append(_vanished(seat, since))
            elif watch is not None and watch.is_silent(now) and watch.is_hung(seen, now):
                how = "stopped" if seen.is_stopped else "without any progress"
                text = f"hung: {how} for {self._hang_timeout_s:g} s"
                found.append(Hung(seat, watch.last_progress, text))
        return found


def observe(pid: int) -> Observation | None:
    """Look at a process; None where it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE:
            return None
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return Observation(
        is_stopped=status == psutil.STATUS_STOPPED,
        is_traced=status == psutil.STATUS_TRACING_STOP,
        cpu_s=times.user + times.system,
    )


def _vanished(seat: Seat, since: float) -> ev.EngineExited:
    return ev.EngineExited(
        slot=seat.slot,
        pid=seat.pid or 0,
        signal=None,
        exit_code=None,
        detector="process",
        at=since,
    )
