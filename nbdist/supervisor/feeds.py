"""Sends frames to those who subscribe. Called by the supervisor's one thread, between events.

Without subscribers it does nothing but note what changes in the world, and keep one frame of each
run that is over.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from nbdist.protocol import feed as fd
from nbdist.protocol import orders as od
from nbdist.protocol.frames import MAX_WINDOW
from nbdist.protocol.ids import RunId
from nbdist.protocol.tables import TABLES_OF
from nbdist.supervisor.flow import DROP_S, Flow
from nbdist.supervisor.packing import Packer, Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from nbdist.protocol.tables import View
    from nbdist.supervisor.run import Run

MAX_SUBSCRIPTIONS = 16
NUM_KEPT = 5
"""Runs that are over of which a frame is kept."""
LINGER_S = 0.5
"""After a run's end, for the last telemetry of it."""
MIN_WIDTH, MAX_WIDTH = 100, 2_000
_EVERYTHING = tuple(TABLES_OF)
_NO_RUN = RunId("")

log = logging.getLogger(__name__)


class Subscription:
    """One, of a kernel."""

    def __init__(self, order: fd.Subscribe) -> None:
        self.order = order
        self.flow = Flow(min(max(1, order.window), MAX_WINDOW))
        self.packer: Packer | None = None


class Feeds:
    """Of one cluster.

    Args:
        sources: what frames are made from.
        send: sends a message to a kernel (identity, message).
    """

    def __init__(self, sources: Sources, send: Callable[[bytes, msgspec.Struct], None]) -> None:
        self._sources, self._send = sources, send
        self._subscriptions: dict[tuple[bytes, str], Subscription] = {}
        self._began: dict[RunId, float] = {}
        self._ended: dict[RunId, float] = {}
        self._kept: dict[RunId, bytes] = {}
        """The last frame of each run that is over."""
        self._view: od.WorldView | None = None

    def take(self, identity: bytes, order: fd.FeedOrder, now: float) -> od.AnswerBody | None:
        """Carry out an order of a kernel; its answer, where it has one."""
        match order:
            case fd.Subscribe():
                return self._subscribe(identity, order)
            case fd.Acknowledge(name=name, seq=seq):
                if (subscription := self._subscriptions.get((identity, name))) is not None:
                    subscription.flow.acknowledge(seq, now)
            case fd.Unsubscribe(name=name):
                self._subscriptions.pop((identity, name), None)
            case fd.QuerySnapshot(run=name):
                return self._snapshot(name, now)
        return None

    def look(self, view: od.WorldView, now: float) -> None:
        """Send what is due, to one subscriber at most: others have their turn soon.

        `view`: the world as it was last shown.
        """
        if view is not self._view:
            self._view = view
            self._sources.changes.note(view, now)
        self._watch_runs(now)
        due = [
            (subscription.flow.last_sent, key)
            for key, subscription in list(self._subscriptions.items())
            if self._is_due(key, subscription, now)
        ]
        if due:
            _, key = min(due)
            try:
                self._serve(key, self._subscriptions[key], now)
            except Exception:
                # Views must not take the supervisor down: the next one would be asked for the same.
                log.exception("no frame could be made for %s", key)
                self._end(key, "no frame could be made for it; the supervisor's log says more")

    # ---- runs

    def _watch_runs(self, now: float) -> None:
        runs = self._sources.machine.runs
        if runs.present is not None and runs.present.state != "binding":
            self._began.setdefault(runs.present.spec.run, now)
        for run in runs.past:
            name = run.spec.run
            if name in self._began and name not in self._kept:
                since = self._ended.setdefault(name, now)
                if now - since >= LINGER_S or runs.present is not None:
                    self._keep(run, now)

    def _keep(self, run: Run, now: float) -> None:
        self._kept[run.spec.run] = self._whole(run, now)
        while len(self._kept) > NUM_KEPT:
            oldest = next(iter(self._kept))
            for kept in (self._kept, self._began, self._ended):
                del kept[oldest]

    def _whole(self, run: Run, now: float) -> bytes:
        """A snapshot with all there is; empty where it could not be made."""
        packer = self._packer(run, _EVERYTHING, MAX_WIDTH)
        try:
            return packer.pack(1, now, is_live=not run.is_over) or b""
        except Exception:  # as above
            log.exception("no frame could be made of the run %s", run.spec.run)
            return b""

    def _packer(self, run: Run | None, views: tuple[View, ...], width: int) -> Packer:
        # Of a run that another supervisor saw begin, telemetry cannot be told from that of others.
        since = self._began.get(run.spec.run, math.inf) if run is not None else math.inf
        return Packer(self._sources, run, since=since, views=views, width=width)

    def _snapshot(self, name: RunId, now: float) -> od.AnswerBody:
        run = self._sources.machine.runs.find(name)
        data = self._kept.get(name, b"")
        if not data and run is not None:
            data = self._whole(run, now)
        if not data:
            text = "nothing is kept of this run; of the last ones there is, and of this cluster"
            return od.Refused(kind="WrongState", message=text)
        return fd.Frame(name="", seq=1, is_snapshot=True, data=data)

    def _wanted(self, order: fd.Subscribe) -> Run | None:
        runs = self._sources.machine.runs
        if order.run is not None:
            return runs.find(order.run)
        if runs.present is not None and runs.present.state != "binding":
            return runs.present
        return runs.past[-1] if runs.past else None

    # ---- subscribers

    def _subscribe(self, identity: bytes, order: fd.Subscribe) -> od.AnswerBody:
        key = (identity, order.name)
        if order.run is not None and self._wanted(order) is None and order.run not in self._kept:
            text = "this run is not known here; the last ones are, and those of this cluster only"
            return od.Refused(kind="WrongState", message=text)
        before = self._subscriptions.get(key)
        if before is None and len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            text = (
                f"{MAX_SUBSCRIPTIONS} live views are open on this cluster, and no more may be: "
                "delete the output of another one, or close its page"
            )
            return od.Refused(kind="WrongState", message=text)
        subscription = Subscription(order)
        if before is not None:
            subscription.flow.go_on_from(before.flow)
        self._subscriptions[key] = subscription
        return od.Done()

    def _is_due(self, key: tuple[bytes, str], subscription: Subscription, now: float) -> bool:
        if subscription.flow.is_gone(now):
            self._end(key, f"nothing was acknowledged for {DROP_S:g} s")
            return False
        return subscription.flow.is_due(now)

    def _serve(self, key: tuple[bytes, str], subscription: Subscription, now: float) -> None:
        flow, order, packer = subscription.flow, subscription.order, subscription.packer
        run, is_last = self._wanted(order), self._is_past(order)
        seq, is_snapshot = flow.num_sent + 1, True
        is_new = packer is None or flow.needs_snapshot or packer.run is not run
        data: bytes | None = self._kept.get(order.run or _NO_RUN) if is_new else None
        if data:
            seq = 1  # as it was packed
        else:
            if packer is None or is_new:
                packer = self._packer(run, order.views, self._width(order))
            subscription.packer, is_snapshot = packer, packer.is_first
            data = packer.pack(seq, now, is_live=not is_last, delayed=flow.num_delayed)
        if data is None:
            flow.looked(now)
            return
        flow.sent(now)
        identity, name = key
        self._send(identity, fd.Frame(name=name, seq=seq, is_snapshot=is_snapshot, data=data))
        if is_last:
            self._end(key, "the run is over")

    def _is_past(self, order: fd.Subscribe) -> bool:
        """Whether only one run is wanted, and nothing more will come of it."""
        run = self._wanted(order)
        if order.run is None or (run is not None and not run.is_over):
            return False
        return order.run in self._kept or order.run not in self._began

    def _end(self, key: tuple[bytes, str], reason: str) -> None:
        del self._subscriptions[key]
        identity, name = key
        self._send(identity, fd.SubscriptionEnded(name=name, reason=reason))

    def _width(self, order: fd.Subscribe) -> int:
        return min(max(MIN_WIDTH, order.width), MAX_WIDTH)
