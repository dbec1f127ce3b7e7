"""A run as one HTML page that opens without any network: facts, views, incidents, checks, record.

Runs in the kernel or a command's process. The page draws the same views as the live dashboard, by
the same code, from a frame that it holds. Without scripts a picture and the tables stand there.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import partial
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jinja2

from nbdist._version import __version__
from nbdist.errors import FileUnwritable
from nbdist.protocol.record import story_lines
from nbdist.protocol.tables import View
from nbdist.views import palette
from nbdist.views.bundle import bokehjs, figures_json, page_settings, report_module
from nbdist.views.facts import (
    Check,
    Table,
    describe,
    headlines,
    incident_table,
    series_table,
    step_table,
    story_checks,
)
from nbdist.views.picture import picture
from nbdist.views.playback import story_frame
from nbdist.views.sheet import WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.protocol.story import RunStory

__all__ = ["Check", "write_report"]

VIEWS: tuple[View, ...] = tuple(view for view in get_args(View) if view != "ranks")
"""Those of a dashboard that say something of a run that is over."""
MAX_RECORD_BYTES = 3_000_000
"""Packed; a larger record is not held by the page."""
MAX_PACKING = 12
"""A file that is so many times as large is not even tried."""

MAX_KEYS = 16
"""Of more slots the key names those only to which something happened."""

_SERIES = (
    ("compute_s", "Forward and backward", 1e3, "ms"),
    ("memory_rss_bytes", "Memory of each engine", 2**-20, "MiB"),
)


def write_report(
    path: str | PathLike[str],
    story: RunStory,
    *,
    checks: Sequence[Check] = (),
    reference: RunStory | None = None,
    record: Path | None = None,
) -> Path:
    """Write the report of a run; an older file of that name is replaced.

    Args:
        path: where to; its folder must exist.
        story: the run.
        checks: what else was checked, shown with what the story itself can tell.
        reference: a run to compare with; its loss is drawn beneath.
        record: the file that the run wrote, for the page to hold; None, or one that is too large:
            the page holds the record that its story makes.

    Returns:
        The path.

    Raises:
        TypeError: the path is none.
        ValueError: it is empty.
        FileUnwritable: it cannot be written there; the message says why.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path={path!r}: the name of a file")
    if not fspath(path):
        raise ValueError("path='': the name of a file, as in run.report('run.html')")
    path = Path(path)
    text = page(story, checks=checks, reference=reference, record=record)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileUnwritable(f"{path} cannot be written: {error.strerror}") from error
    return path


def page(
    story: RunStory,
    *,
    checks: Sequence[Check] = (),
    reference: RunStory | None = None,
    record: Path | None = None,
) -> str:
    """The report's HTML."""
    frame = story_frame(story)
    template = files("nbdist.views").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        _words(story, [*story_checks(story), *checks]),
        picture=_as_text(picture(frame)),
        picture_width=WIDTH,
        compared=_compared(reference),
        held=_held(frame, reference),
        bokehjs=_script(bokehjs()),
        module=_script(report_module()),
        **_record(story, record),
    )


def _words(story: RunStory, checks: list[Check]) -> dict[str, Any]:
    """What the page says in words and tables."""
    touched = {slot for incident in story.incidents for slot in incident.slots}
    slots = sorted(touched if len(story.series) > MAX_KEYS else {*story.series, *touched})
    kinds = {incident.kind for incident in story.incidents}
    return {
        "title": story.title,
        "facts": headlines(story),
        "checks": checks,
        "num_failed": sum(not check.holds for check in checks),
        "sentences": " ".join(dict.fromkeys(describe(story, name) for name in _DESCRIBED)),
        "incidents": incident_table(story.incidents),
        "kinds": [(symbol, kind) for kind, symbol in palette.SYMBOLS.items() if kind in kinds],
        "slots": [(slot, palette.slot_colour(slot)) for slot in slots],
        "tables": _tables(story),
        "evaluations": _evaluations(story),
        "notes": story.notes,
        "font": palette.FONT,
        "version": __version__,
    }


_DESCRIBED = ("loss", "throughput", "world")


def _tables(story: RunStory) -> list[tuple[str, Table]]:
    tables = [("Steps", step_table(story))]
    for name, title, scale, unit in _SERIES:
        table = series_table(story, name, scale, unit)
        if table.rows:
            tables.append((title, table))
    return tables


def _compared(reference: RunStory | None) -> str:
    if reference is None:
        return ""
    return f"For comparison, {reference.title}: {describe(reference, 'loss')}"


def _held(frame: bytes, reference: RunStory | None) -> list[tuple[str, str]]:
    """What the page's script reads: name of the element -> its text."""
    held = {
        "nbdist-frame": _packed(frame),
        "nbdist-settings": json.dumps(page_settings(VIEWS, ())),
        "nbdist-figures": figures_json(),
    }
    if reference is not None:
        held["nbdist-reference"] = _packed(story_frame(reference))
    return [(name, text.replace("<", "\\u003c")) for name, text in held.items()]  # JSON or base64


def _record(story: RunStory, path: Path | None) -> dict[str, str]:
    makers: dict[str, Callable[[], bytes]] = {}
    if path is not None and path.stat().st_size <= MAX_PACKING * MAX_RECORD_BYTES:
        makers["as it was written"] = path.read_bytes
    makers["as this report has it"] = partial(story_lines, story, nbdist=__version__)
    for what, make in makers.items():
        lines = make()
        packed = gzip.compress(lines, mtime=0)
        if len(packed) <= MAX_RECORD_BYTES:
            note = f"JSON lines, {len(lines) / 1000:,.0f} kB, {what}; nbdist replay reads it."
            return {"record": _as_text(packed), "record_note": note}
    return {"record": "", "record_note": "The record is too large to be a part of this page."}


def _evaluations(story: RunStory) -> Table:
    names = sorted({name for evaluation in story.evaluations for name in evaluation.metrics})
    return Table(
        header=("steps before", *names),
        rows=[
            (f"{e.step}", *(f"{e.metrics[n]:.4g}" if n in e.metrics else "–" for n in names))
            for e in story.evaluations
        ],
    )


def _packed(data: bytes) -> str:
    return _as_text(gzip.compress(data, mtime=0))


def _as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _script(text: str) -> str:
    """Code as a script element may hold it."""
    return text.replace("</script", "<\\/script")
