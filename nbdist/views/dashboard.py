"""The dashboard: one widget that shows a run while it goes on, and gives orders.

Lives in the kernel. Frames come from the session's feed and go to the page unopened, in whatever
thread the feed calls. What may have to wait is done in threads of the dashboard's own: orders,
which may take as long as a recovery, and apart from them what is asked of the supervisor. The one
thing displayed from there is the picture at the end.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import uuid
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import IPython.display

from nbdist.errors import NbdistError
from nbdist.protocol.tables import View
from nbdist.views.bundle import bundle, page_settings
from nbdist.views.host import Place, has_viewer, kernel, place, when_idle
from nbdist.views.pages import Pages, Worker
from nbdist.views.picture import picture
from nbdist.views.sheet import WIDTH
from nbdist.views.stills import REASON, Stills
from nbdist.views.widget import TEXT, WIDGET_VIEW, Widget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.views.feed import Feed, Subscription

log = logging.getLogger(__name__)

VIEWS: tuple[View, ...] = get_args(View)
TARGET = "nbdist.view"
"""Name under which a page opens a comm of its own."""
LINGER_S = 1.0
"""After a run's end, for what is told of it last."""
MAX_DISPLAYS = 8
"""So many of its places are remembered."""


class Dashboard:
    """A live dashboard; show it as the last value of a cell.

    Args:
        feed: where frames come from.
        actions: name of an order -> what carries it out, with the page's values as keywords. Those
            that are missing have no buttons.
        views: which views, in whatever order; none: all.
        freezes: a picture takes its place when its run is over.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        actions: Mapping[str, Callable[..., object]] | None = None,
        views: Sequence[View] = (),
        freezes: bool = True,
    ) -> None:
        self.freezes = freezes
        self._feed, self._actions = feed, dict(actions or {})
        self._shown_views = tuple(views or VIEWS)
        self._pages = Pages()
        self._lock = threading.Lock()
        self._subscription: Subscription | None = None
        self._is_opening = False
        self._num_ended = 0
        """Subscriptions that have ended by themselves."""
        self._is_unseen = False
        """It was displayed where nobody looks: by a command that runs notebooks."""
        self._freezing = threading.Lock()
        self._orders = Worker("nbdist-dashboard-orders")
        self._errands = Worker("nbdist-dashboard-errands")
        """Whatever else may have to wait for the supervisor."""
        self._display_ids: deque[str] = deque(maxlen=MAX_DISPLAYS)
        """Of each time it was shown: one name for all would have pages show them all anew."""
        self._frozen: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Data and metadata of the picture, once there is one."""
        self._stills = Stills(self._show_still, when_idle)
        self._still = ""
        """The newest picture that stands for a live view."""
        self._places: set[Place] = set()
        self._is_removed = False
        """Every page that showed it has said so."""
        self._widget: Widget | None = None
        """Made when somebody looks: whoever runs notebooks unseen would store it."""
        self._id = uuid.uuid4().hex

    @property
    def widget(self) -> Widget:
        """What pages show; made when it is asked for first."""
        with self._lock:
            if self._widget is None:
                self._widget = Widget(
                    widget_id=self._id,
                    version=bundle().version,
                    settings=page_settings(self._shown_views, tuple(self._actions)),
                )
                self._widget.own_model_id = self._widget.model_id
                self._widget.on_msg(self._on_message)
                _DASHBOARDS[self._id] = self
        return self._widget

    # ---- showing

    def __repr__(self) -> str:
        return TEXT

    def _ipython_display_(self) -> None:
        """Show it under a new name, so that a picture can take its place."""
        if has_viewer():
            if self._frozen is None:
                self._push()
            self._is_removed = False
            data, metadata = self._frozen or self._live()
        else:  # whoever runs notebooks unseen keeps what is shown, and never asks for frames
            self._is_unseen = True
            data, metadata = self._picture() or ({"text/plain": TEXT}, {})
        self._places.add(place())
        self._display_ids.append(uuid.uuid4().hex)
        _show(data, metadata=metadata, display_id=self._display_ids[-1])
        if WIDGET_VIEW in data:
            self._stills.watch()

    def _live(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a notebook keeps of a widget; with a run that is over a picture stands in there.

        The page puts it in the widget's place when the kernel ends, whatever it has drawn till
        then; whoever has no model of the widget shows it.
        """
        made = self._picture() if self._feed.is_over else None
        data, metadata = made or ({"text/plain": TEXT}, {})
        return data | self.widget.view, metadata

    def _push(self) -> None:
        """Send code and frames unasked: a page that asks would wait for the cell that shows it."""
        assert self.widget.comm  # it is there before anything is sent on it
        self._send_code()
        self._pages.expect()
        self._errands.do(self._give_snapshot)

    def freeze(self) -> None:
        """Put a picture where notebooks hold this widget; from any thread that may wait.

        Where nobody looks there is nothing to replace; a page that comes later is told then.
        """
        if not (self._is_unseen or self._stills.is_on) and self._pages.is_empty:
            return
        self._stills.stop()
        with self._freezing:
            if self._frozen is not None:
                return
            made = self._picture()
            if made is not None and self._widget is not None:
                made[1]["nbdist"] = {"widget": self._widget.own_model_id}  # for a thaw
            self._frozen = made
        if made is None:
            return
        data, metadata = made
        # Reaches what the kernel's clients keep, and pages that saw the display itself; a page that
        # was loaded again has forgotten its name, so the widget there is told too.
        for display_id in tuple(self._display_ids):
            _show(data, metadata=metadata, display_id=display_id, update=True)
        self._tell({"type": "freeze", "metadata": metadata, "picture": data["image/png"]})

    def finish(self) -> None:
        """Its run is over: freeze soon, unless another one begins; from any thread."""
        timer = threading.Timer(LINGER_S, self._errands.do, (self._freeze_if_over,))
        timer.name, timer.daemon = "nbdist-dashboard-end", True
        timer.start()

    def _freeze_if_over(self) -> None:
        if self.freezes and self._feed.is_over:
            self.freeze()

    def thaw(self) -> None:
        """Another run begins: live again where a picture took its place; from any thread."""
        self.freezes = True
        self._errands.do(self._thaw)

    def _thaw(self) -> None:
        with self._freezing:
            frozen, self._frozen = self._frozen, None
        if frozen is None or self._widget is None:
            return
        data, metadata = self._live()
        for display_id in tuple(self._display_ids):  # as in `freeze`
            _show(data, metadata=metadata, display_id=display_id, update=True)
        self._tell({"type": "thaw", "view": self.widget.view})

    def _picture(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        frame = self._feed.snapshot()
        if frame is None:
            return None
        image = base64.b64encode(picture(frame, self._shown_views)).decode()
        return {"text/plain": TEXT, "image/png": image}, {"image/png": {"width": WIDTH}}

    def _show_still(self) -> bool:
        """A picture in the place of the live view that no page draws."""
        self._pages.expect_none()
        if self._pages.is_empty:
            self._close_feed()
        with self._freezing:
            made = None if self._frozen is not None else self._picture()
            if made is not None and made[0]["image/png"] != self._still:
                self._still = made[0]["image/png"]
                image = f'<img width="{WIDTH}" src="data:image/png;base64,{self._still}">'
                data = {
                    "text/plain": f"{TEXT}\n{REASON}",
                    "text/html": f"<p>{REASON}</p>{image}",
                }
                _show(data, metadata={}, display_id=self._display_ids[-1], update=True)
            return self._frozen is None and not self._feed.is_over

    def close(self) -> None:
        """End it: no frame, no order, no comm. Displayed again, it begins anew."""
        self._stills.stop()
        self._close_feed()
        _DASHBOARDS.pop(self._id, None)
        with self._lock:
            widget, self._widget = self._widget, None
        if widget is not None:
            widget.close()

    @property
    def is_left(self) -> bool:
        """It was shown, and is shown no more."""
        now = place()
        gone = [shown.is_replaced_at(now) for shown in self._places]
        return self._is_removed or (bool(gone) and all(gone))

    # ---- from the page

    def _on_message(self, _: object, message: dict[str, Any], __: object) -> None:
        self.hear(message)

    def hear(self, message: dict[str, Any], *, is_direct: bool = False) -> None:
        """What a page says, by whatever comm, in whatever thread; waits for nobody.

        `is_direct`: by a comm that is served while a cell runs.
        """
        kind, view = message.get("type"), str(message.get("view"))
        if kind == "bye":
            self._pages.leave(view)
            if self._pages.is_empty:
                self._close_feed()
                # A picture that took its place stays there, and may have to be thawed.
                self._is_removed = bool(message.get("is_removed")) and self._frozen is None
            return
        self._stills.stop()
        # A page asks before it knows that it was sent frames unasked; what it says by the shell
        # that runs cells may come when it has been answered by another way.
        if message.get("is_early") and self._pages.is_served(view):
            return
        self._pages.hear(view, is_direct=is_direct)
        if kind == "hello":
            self._greet(has_code=bool(message.get("has_code")))
        elif kind == "order":
            self._answer(message, "taken")
            self._orders.do(partial(self._carry_out, message))
        elif kind == "ack" and (subscription := self._subscription) is not None:
            subscription.ack(int(message.get("seq", 0)))

    def _greet(self, *, has_code: bool) -> None:
        if not has_code:
            self._send_code()
        if self._frozen is not None:
            data, metadata = self._frozen
            self._tell({"type": "freeze", "metadata": metadata, "picture": data["image/png"]})
        elif self.freezes and self._feed.is_over:
            self._errands.do(self.freeze)
        else:
            self._errands.do(self._give_snapshot)

    def _carry_out(self, message: dict[str, Any]) -> None:
        own = ("type", "view", "id", "action")
        values = {name: value for name, value in message.items() if name not in own}
        action = str(message.get("action"))
        try:
            self._actions[action](**values)
        except (NbdistError, ValueError, TypeError, KeyError, TimeoutError) as error:
            log.warning("order %s of a dashboard: %s", action, error)
            self._answer(message, "failed", str(error) or type(error).__name__)
        else:
            self._answer(message, "done")

    def _answer(self, message: dict[str, Any], state: str, text: str = "") -> None:
        # By the widget's own comm, never by the page's: the kernel sends what comes by a comm to
        # the shell that spoke on it last.
        self._tell({"type": "answer", "id": message.get("id"), "state": state, "text": text})

    # ---- frames

    def _give_snapshot(self) -> None:
        if not self._subscribe() and (subscription := self._subscription) is not None:
            subscription.resync()

    def _subscribe(self) -> bool:
        """Whether it began now; False: it goes on already, or cannot."""
        with self._lock:
            if self._subscription is not None or self._is_opening:
                return False
            self._is_opening = True
            num_ended = self._num_ended
        try:
            # Without the lock: it may wait for the thread in which frames come.
            subscription = self._feed.subscribe(self._shown_views, self._take, self._ended)
        except (NbdistError, TimeoutError) as error:
            log.warning("a dashboard has no frames: %s", error)
            self._tell({"type": "ended", "text": str(error)})
            return False
        finally:
            self._is_opening = False
        with self._lock:
            if self._num_ended == num_ended:
                self._subscription = subscription
        return True

    def _take(self, seq: int, frame: bytes) -> None:
        if self._pages.is_empty:
            self._close_feed()
            return
        self._tell({"type": "frame"}, frame)
        # Pages that cannot be heard while a cell runs are sent frames all the same, until they
        # have been silent for too long.
        if not self._pages.has_direct and (subscription := self._subscription) is not None:
            subscription.ack(seq)

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._num_ended += 1
            self._subscription = None
        self._tell({"type": "ended", "text": reason})
        self._errands.do(self._freeze_if_over)

    def _close_feed(self) -> None:
        with self._lock:
            subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _send_code(self) -> None:
        code = bundle()
        self._tell({"type": "code", "version": code.version}, *code.buffers)

    def _tell(self, message: dict[str, Any], *buffers: bytes) -> None:
        if self._widget is not None:
            with contextlib.suppress(RuntimeError):  # the kernel is ending: its comm is closed
                self._widget.send(message, list(buffers))


_DASHBOARDS: dict[str, Dashboard] = {}
"""Those of this kernel, by the id that pages name."""


def listen() -> None:
    """Let pages open comms of their own; called once in a kernel."""
    own = kernel()
    if own is not None:
        own.comm_manager.register_target(TARGET, _opened)


def _opened(comm: Any, message: dict[str, Any]) -> None:
    """A page's own comm; in the thread of whatever shell serves it."""
    dashboard = _DASHBOARDS.get(str(message["content"]["data"].get("widget")))
    if dashboard is None:
        comm.close()
        return
    is_direct = threading.current_thread() is not threading.main_thread()
    comm.on_msg(lambda m: dashboard.hear(m["content"]["data"], is_direct=is_direct))


def _show(data: dict[str, Any], **options: Any) -> None:
    display: Callable[..., object] = IPython.display.display
    display(data, raw=True, **options)
