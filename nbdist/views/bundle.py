"""The code that a page needs once to draw views: BokehJS, our modules, figures without data.

Made in the kernel, once, when the first dashboard is shown, or for a report. BokehJS is the
installed package's own file, so that Python and page always agree and nothing is fetched from
outside.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import bokeh
from bokeh.embed import json_item
from bokeh.util.paths import bokehjs_path

from nbdist.views import palette
from nbdist.views.live_figures import live_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULES = (
    "format",
    "store",
    "charts",
    "panel",
    "steps",
    "loss",
    "throughput",
    "sync",
    "pipeline",
    "traffic",
    "sent",
    "memory",
    "distance",
    "agreement",
    "overview",
    "ranks",
    "membership",
    "dashboard",
)
"""Each after those that it imports; the last one's `show` is what the page calls."""
WIDGET_MODULES = ("frame", "kept")
"""What the widget's own module imports."""
REPORT_MODULES = ("frame", "report")
"""Of a report's page, after those."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)
_GZIP_LEVEL = 6


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a page is sent."""

    version: str
    """The same for the same bytes; a page keeps one copy of each version."""
    buffers: tuple[bytes, bytes, bytes]
    """BokehJS, the views' module, the figures as JSON; each compressed by gzip."""


@cache
def bundle() -> Bundle:
    """The code for a page; made once in a process."""
    views = views_module()
    figures = figures_json()
    digest = hashlib.sha256((views + figures).encode()).hexdigest()[:12]
    parts = (bokehjs().encode(), views.encode(), figures.encode())
    first, second, third = (gzip.compress(part, _GZIP_LEVEL, mtime=0) for part in parts)
    return Bundle(version=f"{bokeh.__version__}-{digest}", buffers=(first, second, third))


def widget_module() -> str:
    """The small module that a widget carries itself."""
    parts = [*map(_wrapped, WIDGET_MODULES), _imported(_text("widget.js"))]
    return "\n".join(parts)


def views_module() -> str:
    """Our modules as one: a page that gets its code in a message has no place to import from.

    Each becomes a function that is called once and returns what it exports.
    """
    return f"{_joined(MODULES)}\nexport const {{ pictured, show }} = _{MODULES[-1]};\n"


def report_module() -> str:
    """The same for a page that holds its run itself: it draws it at once."""
    return f"{_joined((*MODULES, *REPORT_MODULES))}\nvoid _report.open(Bokeh);\n"


def page_settings(views: Sequence[str], actions: Sequence[str]) -> dict[str, Any]:
    """What a page's views are told: which are wanted, what buttons there are, how things look."""
    return {
        "views": list(views),
        "actions": list(actions),
        "colours": list(palette.SLOT_COLOURS),
        "dashes": list(palette.DASHES),
        "symbols": dict(palette.SYMBOLS),
        "markers": dict(palette.MARKERS),
    }


@cache
def figures_json() -> str:
    """The figures without data, by name."""
    return json.dumps({name: json_item(figure) for name, figure in live_figures().items()})


@cache
def bokehjs() -> str:
    """The installed package's own BokehJS."""
    return (bokehjs_path() / "js" / "bokeh.min.js").read_bytes().decode()


def _joined(names: tuple[str, ...]) -> str:
    styles = f"const STYLES = {json.dumps(_text('dashboard.css'))};"
    return "\n".join([styles, *map(_wrapped, names)])


def _wrapped(name: str) -> str:
    text = _text(f"{name}.js")
    exported = ", ".join(found for _, found in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1", _imported(text))
    return f"const _{name} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"


def _imported(text: str) -> str:
    return _IMPORT.sub(r"const \1 = _\2;", text)


def _text(name: str) -> str:
    return (files("nbdist.views") / "static" / name).read_text(encoding="utf-8")
