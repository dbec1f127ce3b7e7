"""A page with the widget alone: no server, no kernel; a test says what the kernel would say."""

from __future__ import annotations

import base64
import gzip
from typing import TYPE_CHECKING, Any

from PIL import ImageFont

from nbdist.views import palette
from nbdist.views.bundle import Bundle, bundle, page_settings, widget_module
from nbdist.views.dashboard import VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_MS = 60_000
ACTIONS = ("kill", "stop", "slow", "pause", "resume", "step", "stop_run")
_PAGE = """<!doctype html><html><head><meta charset="utf-8"><style>
  @font-face { font-family: nbdist-test; src: url(data:font/ttf;base64,%s); }
  body { margin: 0; --jp-ui-font-family: nbdist-test; }
  @media (prefers-color-scheme: dark) { body { background: #16191d; } }
</style></head><body></body></html>"""
_START = """async ([text, values]) => {
  await document.fonts.load("12px nbdist-test");
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const listeners = new Set();
  window.sent = [];
  window.model = {
    get: (name) => values[name],
    on: (name, act) => name === "msg:custom" && listeners.add(act),
    off: (name, act) => listeners.delete(act),
    send: (message) => window.sent.push(message),
  };
  window.give = (message, buffers) => {
    const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const views = buffers.map((text) => new DataView(bytes(text).buffer));
    for (const act of [...listeners]) act(message, views);
  };
  window.view = () => {
    const el = document.body.appendChild(document.createElement("div"));
    const aborter = new AbortController();
    widget.render({ model: window.model, el, signal: aborter.signal });
    return () => (aborter.abort(), el.remove());
  };
  widget.initialize({ model: window.model });
  window.closeView = window.view();
}"""
VIEW = "[...window[Symbol.for('nbdist')].views].at(-1)"


class BarePage:
    """One page with one view of a widget, to which no kernel belongs.

    Args:
        browser: Playwright's.
        size: of the page.
        is_dark: what the system's colours are.
        views: which views, in whatever order; none: all.
    """

    def __init__(
        self,
        browser: Any,
        *,
        size: tuple[int, int] = (1300, 2400),
        is_dark: bool = False,
        views: Sequence[str] = (),
    ) -> None:
        self.errors: list[str] = []
        width, height = size
        self.page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if is_dark else "light",
            reduced_motion="reduce",
            locale="en-US",
        )
        self.page.set_default_timeout(LIMIT_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.set_content(_PAGE % _font())
        self._code = _code()
        values = {
            "widget_id": "w",
            "version": self._code.version,
            "text": "nbdist dashboard",
            "own_model_id": "m",
            "settings": page_settings(tuple(views or VIEWS), ACTIONS),
        }
        self.page.evaluate(_START, [widget_module(), values])

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def give(self, message: dict[str, Any], *buffers: bytes) -> None:
        """What the kernel says."""
        packed = [base64.b64encode(part).decode() for part in buffers]
        self.page.evaluate("([m, b]) => window.give(m, b)", [message, packed])

    def give_code(self) -> None:
        """What a page needs to draw."""
        self.give({"type": "code", "version": self._code.version}, *self._code.buffers)

    def give_frame(self, frame: bytes) -> None:
        """One frame."""
        self.give({"type": "frame"}, frame)

    def show(self, frame: bytes) -> None:
        """Code and a snapshot; returns when what is seen of it is drawn."""
        self.give_code()
        self.give_frame(frame)
        self.drawn()

    def drawn(self) -> None:
        """Wait until every panel that is seen has its charts, and they are painted."""
        self.page.wait_for_function(
            f"() => {{ const d = {VIEW}.shown; "
            "return d?.seen.size && d.panels.every((p) => !d.seen.has(p.root) || p.isReady); }",
            timeout=LIMIT_MS,
        )
        for _ in range(3):
            self.page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What the page has said of one kind."""
        return [message for message in self.page.evaluate("sent") if message["type"] == kind]

    def close(self) -> None:
        """Close the page."""
        self.page.close()


def _font() -> str:
    """One font that is the same on every machine: the one that Pillow carries."""
    return base64.b64encode(ImageFont.load_default(12).font_bytes).decode()


def _code() -> Bundle:
    """The code of a page, with that font in its charts."""
    known = bundle()
    bokeh, views, figures = known.buffers
    text = gzip.decompress(figures).decode().replace(palette.FONT, "nbdist-test")
    return Bundle(
        version=f"{known.version}-test", buffers=(bokeh, views, gzip.compress(text.encode(), 6))
    )
