"""What kernel and supervisor say to one another about live views. Pure.

A kernel subscribes under a name of its own, any number of times at once; it is sent frames, passes
them on unopened and acknowledges them. What is in a frame `frames` says.
"""

from __future__ import annotations

import msgspec

from nbdist.protocol.frames import WINDOW
from nbdist.protocol.ids import RunId
from nbdist.protocol.tables import View


class FeedMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of these orders and notices; the tag on the wire is the class name."""


# ---- kernel -> supervisor


class Subscribe(FeedMessage, frozen=True, kw_only=True):
    """Send frames from now on, a snapshot first. Answered with `Done`.

    Said again under the same name, it takes the place of what was said before: so one asks for a
    snapshot, or for other views.
    """

    name: str
    """Names the subscription among those of a kernel."""
    views: tuple[View, ...]
    width: int = 1_000
    """Of the widest chart, in pixels: series need no more points."""
    run: RunId | None = None
    """Only this run; where it is over, one frame comes and no more. None: always the newest."""
    window: int = WINDOW
    """So many frames may be on their way; up to `frames.MAX_WINDOW`."""


class Acknowledge(FeedMessage, frozen=True, kw_only=True):
    """The frames up to `seq` have arrived. Not answered."""

    name: str
    seq: int


class Unsubscribe(FeedMessage, frozen=True, kw_only=True):
    """Send no more. Not answered."""

    name: str


class QuerySnapshot(FeedMessage, frozen=True, kw_only=True):
    """Answered with one `Frame`: a snapshot of a run, with all that there is."""

    run: RunId


FeedOrder = Subscribe | Acknowledge | Unsubscribe | QuerySnapshot


# ---- supervisor -> kernel


class Frame(FeedMessage, frozen=True, kw_only=True):
    """A frame; its number and kind stand in its header too."""

    name: str
    """Of the subscription; empty in an answer to `QuerySnapshot`."""
    seq: int
    is_snapshot: bool
    data: bytes
    """As `frames.pack` makes it."""


class SubscriptionEnded(FeedMessage, frozen=True, kw_only=True):
    """Nothing more comes under this name."""

    name: str
    reason: str
