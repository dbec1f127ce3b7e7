"""When a subscriber may be sent a frame: not too often, not before it has taken others. Pure."""

from __future__ import annotations

from nbdist.protocol.frames import PERIOD_S

PAUSE_S = 10.0
"""Whoever has acknowledged nothing for so long, though something was sent, is sent no more; when it
does at last, it gets a snapshot."""
DROP_S = 60.0
"""Whoever has not for so long is forgotten."""


class Flow:
    """Of one subscriber.

    Args:
        window: frames that may be on their way.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.num_sent = 0
        self.num_delayed = 0
        """Times at which a frame was due and the window was full."""
        self.needs_snapshot = True
        self._num_acknowledged = 0
        self._last_sent: float | None = None
        self._waits_since: float | None = None
        """Since when a frame waits to be acknowledged, or others since the last one that was."""
        self._is_delayed = False

    def go_on_from(self, before: Flow) -> None:
        """It subscribes again: numbers go on, and frames come no more often."""
        self.num_sent = self._num_acknowledged = before.num_sent
        self.num_delayed, self._last_sent = before.num_delayed, before._last_sent

    @property
    def last_sent(self) -> float:
        """When the last frame was sent."""
        return self._last_sent or 0.0

    def sent(self, now: float) -> int:
        """A frame is sent; its number, from 1."""
        self.num_sent += 1
        self._last_sent, self._is_delayed, self.needs_snapshot = now, False, False
        if self._waits_since is None:
            self._waits_since = now
        return self.num_sent

    def looked(self, now: float) -> None:
        """A frame was due, and there was nothing to send."""
        self._last_sent = now

    def acknowledge(self, seq: int, now: float) -> None:
        """All frames up to `seq` have arrived; a number that cannot be is passed over."""
        if not self._num_acknowledged < seq <= self.num_sent:
            return
        self.needs_snapshot = self.needs_snapshot or self.is_paused(now)
        self._num_acknowledged = seq
        self._waits_since = now if seq < self.num_sent else None

    def is_due(self, now: float) -> bool:
        """Whether a frame is to be sent now."""
        if self._last_sent is not None and now - self._last_sent < PERIOD_S:
            return False
        if self.num_sent - self._num_acknowledged < self._window and not self.is_paused(now):
            return True
        self.num_delayed += not self._is_delayed
        self._is_delayed = True
        return False

    def is_paused(self, now: float) -> bool:
        """Whether it has been silent for long."""
        return self._waits_since is not None and now - self._waits_since >= PAUSE_S

    def is_gone(self, now: float) -> bool:
        """Whether it has been silent for so long that it is forgotten."""
        return self._waits_since is not None and now - self._waits_since >= DROP_S
