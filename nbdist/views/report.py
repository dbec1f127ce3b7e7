"""A run as one HTML page that opens without any network: facts, charts, incidents, checks.

Runs in the kernel or a command's process. The page holds bokeh's own JavaScript; each chart has a
sentence and a table that say what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from bokeh.embed import file_html
from bokeh.resources import INLINE

from nbdist._version import __version__
from nbdist.errors import FileUnwritable
from nbdist.views import palette
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
from nbdist.views.figures import NAMES, SERIES_CHARTS, figure, series_figure

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from bokeh.plotting import figure as bokeh_figure

    from nbdist.protocol.story import RunStory

__all__ = ["Check", "figure", "write_report"]

_TITLES = {"loss": "Loss", "throughput": "Throughput", "world": "Ranks and generations"}


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """A chart, its sentence and its table."""

    title: str
    sentence: str
    chart: bokeh_figure
    table: Table
    is_over_steps: bool


def write_report(
    path: str | os.PathLike[str],
    story: RunStory,
    *,
    checks: Sequence[Check] = (),
    reference: RunStory | None = None,
) -> Path:
    """Write the report of a run; an older file of that name is replaced.

    Args:
        path: where to; its folder must exist.
        story: the run.
        checks: what else was checked, shown with what the story itself can tell.
        reference: a run to compare with; its loss is drawn beneath.

    Returns:
        The path.

    Raises:
        FileUnwritable: it cannot be written there; the message says why.
    """
    path = Path(path)
    text = page(story, checks=checks, reference=reference)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileUnwritable(f"{path} cannot be written: {error.strerror}") from error
    return path


def page(
    story: RunStory, *, checks: Sequence[Check] = (), reference: RunStory | None = None
) -> str:
    """The report's HTML."""
    panels = _panels(story, reference)
    all_checks = [*story_checks(story), *checks]
    slots = sorted({*story.series, *(slot for i in story.incidents for slot in i.slots)})
    variables = {
        "facts": headlines(story),
        "checks": all_checks,
        "num_failed": sum(not check.holds for check in all_checks),
        "panels": panels,
        "incidents": incident_table(story.incidents),
        "kinds": [(palette.SYMBOLS[k], k) for k in palette.SYMBOLS if _has_kind(story, k)],
        "slots": [(slot, palette.slot_colour(slot)) for slot in slots],
        "evaluations": _evaluations(story),
        "notes": story.notes,
        "font": palette.FONT,
        "version": __version__,
    }
    template = files("nbdist.views").joinpath("report.html").read_text(encoding="utf-8")
    charts = [panel.chart for panel in panels]
    return file_html(charts, INLINE, story.title, template=template, template_variables=variables)


def _panels(story: RunStory, reference: RunStory | None) -> list[_Panel]:
    steps = step_table(story)
    beneath = f" Beneath, in grey: {reference.title}." if reference is not None else ""
    panels = [
        _Panel(
            title=_TITLES[name],
            sentence=describe(story, name) + (beneath if name == "loss" else ""),
            chart=figure(story, name, reference=reference),
            table=steps,
            is_over_steps=True,
        )
        for name in NAMES
    ]
    for panel in panels[1:]:
        panel.chart.x_range = panels[0].chart.x_range
    for wanted in SERIES_CHARTS:
        chart = series_figure(story, wanted)
        if chart is not None:
            table = series_table(story, wanted.name, wanted.scale, wanted.unit)
            sentence = f"A line for each slot, in {wanted.unit} over the seconds of the run."
            panels.append(
                _Panel(
                    title=wanted.title,
                    sentence=sentence,
                    chart=chart,
                    table=table,
                    is_over_steps=False,
                )
            )
    return panels


def _evaluations(story: RunStory) -> Table:
    names = sorted({name for evaluation in story.evaluations for name in evaluation.metrics})
    return Table(
        header=("steps before", *names),
        rows=[
            (f"{e.step}", *(f"{e.metrics[n]:.4g}" if n in e.metrics else "–" for n in names))
            for e in story.evaluations
        ],
    )


def _has_kind(story: RunStory, kind: str) -> bool:
    return any(incident.kind == kind for incident in story.incidents)
