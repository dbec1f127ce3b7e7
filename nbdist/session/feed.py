"""Live views, as the kernel passes them on: subscribes, relays frames unopened, acknowledges.

Frames come in the link's thread and are handed to a callable there, which stores or sends them and
returns; it must neither wait nor print. Nothing is kept here, and no more frames are under way than
were asked for, so a page that takes none costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError
from nbdist.protocol import feed as fd
from nbdist.protocol.frames import WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.protocol.ids import RunId
    from nbdist.protocol.tables import View
    from nbdist.session.link import Link

    Relay = Callable[["Feed", fd.Frame], object]

SUBSCRIBE_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class Feed:
    """One subscription. Made by `Feeds.open`.

    Frames that arrive out of order are not passed on: where one is missing, a snapshot is asked
    for, and nothing is relayed before it has come.
    """

    def __init__(
        self, link: Link, order: fd.Subscribe, relay: Relay, ended: Callable[[str], object] | None
    ) -> None:
        self._link, self.order, self._relay, self._ended = link, order, relay, ended
        self.end = ""
        """Why no more frames come; empty while they do."""
        self.num_gaps = 0
        """Times at which a frame was missing."""
        self._next: int | None = None
        """Number of the next frame; None: a snapshot is awaited."""

    def acknowledge(self, seq: int) -> None:
        """The frames up to `seq` have arrived where they are shown. From any thread."""
        self._link.post(fd.Acknowledge(name=self.order.name, seq=seq))

    def resync(self) -> None:
        """Ask for a snapshot. From any thread; never waits."""
        self._next = None
        self._link.post(self.order)

    # ---- from the link's thread

    def hear(self, frame: fd.Frame) -> None:
        """A frame has come."""
        if not frame.is_snapshot and frame.seq != self._next:
            if self._next is not None:
                self.num_gaps += 1
                self.resync()
            return
        self._next = frame.seq + 1
        try:
            self._relay(self, frame)
        except Exception:
            # The link's thread, in which this runs, carries all that the kernel hears.
            log.exception("a live view (%s) takes no frames and is closed", self.order.name)
            self._link.post(fd.Unsubscribe(name=self.order.name))
            self.finish("its frames could not be passed on")

    def finish(self, reason: str) -> None:
        """No more frames come. From any thread."""
        if not self.end:
            self.end = reason
            if self._ended is not None:
                with contextlib.suppress(Exception):
                    self._ended(reason)


class Feeds:
    """The subscriptions of one cluster."""

    def __init__(self, link: Link) -> None:
        self._link = link
        link.subscriptions = self.subscriptions
        self._feeds: dict[str, Feed] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def open(
        self,
        relay: Relay,
        *,
        views: Sequence[View],
        width: int = 1_000,
        run: RunId | None = None,
        window: int = WINDOW,
        ended: Callable[[str], object] | None = None,
    ) -> Feed:
        """Subscribe.

        Args:
            relay: called with the feed and each frame, in the link's thread, perhaps before this
                returns; must return at once.
            views: what is wanted.
            width: of the widest chart, in pixels.
            run: only this run; None: always the newest.
            window: frames that may be on their way before `Feed.acknowledge` is called.
            ended: called with the reason when no more frames come; from any thread.

        Raises:
            WrongState: the run is not known, or too many views are open.
        """
        order = fd.Subscribe(
            name=f"view-{next(self._numbers)}",
            views=tuple(views),
            width=width,
            run=run,
            window=window,
        )
        feed = Feed(self._link, order, relay, ended)
        with self._lock:
            self._feeds[order.name] = feed
        try:
            self._link.ask(order, SUBSCRIBE_LIMIT_S)
        except (NbdistError, TimeoutError):
            self._forget(order.name)
            raise
        return feed

    def close(self, feed: Feed) -> None:
        """No more frames are wanted. From any thread; safe to call twice."""
        if self._forget(feed.order.name) is not None:
            self._link.post(fd.Unsubscribe(name=feed.order.name))
        feed.finish("it was closed")

    def close_all(self, reason: str) -> None:
        """The cluster ends, or its supervisor is gone for good."""
        with self._lock:
            feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.finish(reason)

    def subscriptions(self) -> tuple[fd.Subscribe, ...]:
        """What a supervisor that takes over is told."""
        with self._lock:
            return tuple(feed.order for feed in self._feeds.values())

    def hear(self, notice: Any) -> None:
        """From the link's thread."""
        match notice:
            case fd.Frame(name=name):
                if (feed := self._feeds.get(name)) is not None:
                    feed.hear(notice)
                    if feed.end:
                        self._forget(name)
            case fd.SubscriptionEnded(name=name, reason=reason):
                if (ended := self._forget(name)) is not None:
                    ended.finish(reason)

    def _forget(self, name: str) -> Feed | None:
        with self._lock:
            return self._feeds.pop(name, None)
