"""The dashboards of one cluster: what they show, and what their buttons do.

Used in the kernel. Frames come in the link's thread; orders are carried out in a dashboard's own.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbdist.errors import NbdistError, TargetError, WrongState
from nbdist.protocol import feed as fd
from nbdist.protocol.frames import MAX_WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.protocol import orders as od
    from nbdist.protocol.ids import RunId
    from nbdist.protocol.story import RunStory
    from nbdist.protocol.tables import View
    from nbdist.session.feed import Feed, Feeds
    from nbdist.session.status import RankStatus
    from nbdist.views.dashboard import Dashboard

    Ask = Callable[[od.KernelOrder, float | None], Any]

SNAPSHOT_LIMIT_S = 5.0


class _Run(Protocol):
    """What is asked of a `session.run.Run`, which opens dashboards itself."""

    target: int | None

    @property
    def id(self) -> RunId: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    def story(self) -> RunStory: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def step(self, n: int = 1) -> None: ...
    def stop(self) -> None: ...


class _Cluster(Protocol):
    """What is asked of a `session.cluster.Cluster`, likewise."""

    feeds: Feeds

    @property
    def runs(self) -> Sequence[_Run]: ...
    def status(self) -> list[RankStatus]: ...
    def kill(self, ranks: int, *, signal: Literal["KILL", "STOP"]) -> None: ...
    def slow(self, ranks: int, factor: float) -> None: ...


class Dashboards:
    """Those that were opened in this kernel.

    Args:
        cluster: whose they are.
        ask: asks the supervisor (order, timeout in seconds or None).
    """

    def __init__(self, cluster: _Cluster, ask: Ask) -> None:
        self._cluster, self._ask = cluster, ask
        self._lock = threading.Lock()
        self._open: list[tuple[Dashboard, RunFeed]] = []

    def open(self, *views: View, run: _Run | None = None) -> Dashboard:
        """A new one.

        Args:
            *views: which views; none: all.
            run: which run; None: always the newest.

        Raises:
            ValueError: there is no view of that name.
        """
        # Loads a plotting library and a widget library, which a kernel without dashboards need not.
        from nbdist.views import dashboard as db  # noqa: PLC0415

        if unknown := [view for view in views if view not in db.VIEWS]:
            text = f"no view {', '.join(map(repr, unknown))}: there are {', '.join(db.VIEWS)}"
            raise ValueError(text)
        db.listen()
        feed = RunFeed(self._cluster.feeds, self._ask, partial(self._run, run), run)
        actions, freezes = self._actions(run), not feed.is_over
        made = db.Dashboard(feed, actions=actions, views=views, freezes=freezes)
        with self._lock:
            # Cells that are run again and again would fill notebook and kernel with what nobody
            # sees any more.
            left = [pair for pair in self._open if pair[0].is_left]
            self._open = [pair for pair in self._open if pair not in left]
            self._open.append((made, feed))
        for dashboard, _ in left:
            dashboard.close()
        return made

    def settle(self, run: _Run | None = None) -> None:
        """Put pictures in the place of dashboards: of those that show a run, or of all."""
        with self._lock:
            chosen = [
                (d, f) for d, f in self._open if run is None or (f.shown is run and d.freezes)
            ]
            # Those that follow the newest run are thawed when the next one begins.
            kept = [pair for pair in chosen if run is not None and pair[1].run is None]
            self._open = [pair for pair in self._open if pair not in chosen or pair in kept]
        for dashboard, _ in chosen:
            with contextlib.suppress(NbdistError, TimeoutError):
                dashboard.freeze()

    def begun(self) -> None:
        """Another run: whoever follows the newest one shows it live. Never waits."""
        for dashboard in self._followers():
            dashboard.thaw()

    def ended(self) -> None:
        """The newest run is over: whoever follows it freezes soon. Never waits."""
        for dashboard in self._followers():
            dashboard.finish()

    def _followers(self) -> list[Dashboard]:
        with self._lock:
            return [dashboard for dashboard, feed in self._open if feed.run is None]

    # ---- what buttons do

    def _actions(self, run: _Run | None) -> dict[str, Callable[..., object]]:
        return {
            "kill": partial(self._signal, "KILL"),
            "stop": partial(self._signal, "STOP"),
            "slow": self._slow,
            "pause": lambda: self._steered(run).pause(),
            "resume": lambda: self._steered(run).resume(),
            "step": lambda: self._steered(run).step(),
            "stop_run": lambda: self._steered(run).stop(),
        }

    def _signal(self, signal: Literal["KILL", "STOP"], slot: int, pid: int, **_: object) -> None:
        self._cluster.kill(self._rank(slot, pid), signal=signal)

    def _slow(self, slot: int, pid: int, factor: float) -> None:
        self._cluster.slow(self._rank(slot, pid), factor)

    def _rank(self, slot: int, pid: int) -> int:
        """Of the engine that was on the page when its button was pressed; it may be gone by now."""
        for seat in self._cluster.status():
            if seat.slot == slot and seat.pid == pid and seat.rank is not None:
                return seat.rank
        raise TargetError(f"the engine on slot {slot} (process {pid}) is not in the group any more")

    def _run(self, run: _Run | None) -> _Run | None:
        if run is not None:
            return run
        runs = self._cluster.runs
        return runs[-1] if runs else None

    def _steered(self, run: _Run | None) -> _Run:
        chosen = self._run(run)
        if chosen is None:
            raise WrongState("no run has been begun on this cluster; %dist_train begins one")
        return chosen


class RunFeed:
    """Frames about a run: from the supervisor, or where that knows it no more, from its story.

    Args:
        feeds: the subscriptions of the cluster.
        ask: asks the supervisor.
        newest: the run that a snapshot is of.
        run: which run; None: always the newest.
    """

    def __init__(
        self, feeds: Feeds, ask: Ask, newest: Callable[[], _Run | None], run: _Run | None
    ) -> None:
        self.run = run
        self._feeds, self._ask, self._newest = feeds, ask, newest

    def subscribe(
        self,
        views: Sequence[View],
        take: Callable[[int, bytes], None],
        ended: Callable[[str], None],
    ) -> Subscribed:
        """As `views.dashboard.Feed` says."""
        run, subscribed = self.run, Subscribed(self._feeds, ended)
        try:
            subscribed.feed = self._feeds.open(
                lambda _, frame: take(frame.seq, frame.data),
                views=views,
                run=None if run is None else run.id,
                window=MAX_WINDOW,
                ended=subscribed.end,
            )
        except NbdistError:
            if run is None or not run.is_over:
                raise
            take(1, _told(run))
        return subscribed

    @property
    def is_over(self) -> bool:
        """As `views.dashboard.Feed` says."""
        run = self.shown
        return run is not None and run.is_over

    @property
    def shown(self) -> _Run | None:
        """The run that it is about now."""
        return self._newest()

    def snapshot(self) -> bytes | None:
        """As `views.dashboard.Feed` says."""
        run = self.shown
        if run is None:
            return None
        try:
            frame: fd.Frame = self._ask(fd.QuerySnapshot(run=run.id), SNAPSHOT_LIMIT_S)
        except (NbdistError, TimeoutError):
            return _told(run)
        return frame.data


class Subscribed:
    """As `views.dashboard.Subscription` says.

    Args:
        feeds: the subscriptions of the cluster.
        ended: called with the reason when it ends by itself.
    """

    def __init__(self, feeds: Feeds, ended: Callable[[str], None]) -> None:
        self.feed: Feed | None = None
        """None until it is opened; for good where a story was told."""
        self._feeds, self._ended = feeds, ended
        self._is_closed = False

    def ack(self, seq: int) -> None:
        """The page has this frame and those before it."""
        if self.feed is not None:
            self.feed.acknowledge(seq)

    def resync(self) -> None:
        """Send a snapshot."""
        if self.feed is not None:
            self.feed.resync()

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        if self.feed is not None:
            self._feeds.close(self.feed)

    def end(self, reason: str) -> None:
        """No more frames come; said on, unless that was wanted."""
        if not self._is_closed:
            self._ended(reason)


def _told(run: _Run) -> bytes:
    """A run as this kernel knows it."""
    from nbdist.views.playback import story_frame  # noqa: PLC0415 - as above

    return story_frame(run.story(), name=run.name, state=run.state, target=run.target)
