"""What a dashboard asks of whoever has frames for it: protocols, and nothing that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.protocol.tables import View


class Subscription(Protocol):
    """What the session gives for a subscription to frames. For any thread; none of these waits."""

    def ack(self, seq: int) -> None:
        """The page has this frame and those before it."""

    def resync(self) -> None:
        """Send a snapshot."""

    def close(self) -> None:
        """Send nothing more; may be called twice."""


class Feed(Protocol):
    """Where frames come from."""

    def subscribe(
        self,
        views: Sequence[View],
        take: Callable[[int, bytes], None],
        ended: Callable[[str], None],
    ) -> Subscription:
        """Begin with a snapshot.

        `take` is called with each frame and its number, `ended` with the reason when no more
        frames come; from a thread that must not be kept waiting.
        """

    @property
    def is_over(self) -> bool:
        """Nothing new will come, whoever asks."""

    def snapshot(self) -> bytes | None:
        """All that there is to know, as one frame; None: nothing. May wait."""
