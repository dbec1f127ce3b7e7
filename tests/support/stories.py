"""A made-up run as a story, whole: as a report or a replay has it."""

from __future__ import annotations

import numpy as np
from synthetic import SyntheticRun

from nbdist.protocol import frames as fr
from nbdist.protocol.story import ROWS, RunStory, curves_of


def synthetic_story(run: SyntheticRun | None = None, *, title: str = "trainer, run r1") -> RunStory:
    """The whole course of a synthetic run."""
    run = run or SyntheticRun()
    header, tables = fr.unpack(run.frame(run.length_s + 1))
    rows = np.empty(len(tables["rows"]["step"]), ROWS)
    for name in ROWS.names or ():
        rows[name] = tables["rows"][name]
    others = {name: table for name, table in tables.items() if name != "rows"}
    return RunStory(
        title=title,
        rows=rows,
        incidents=[numbered.incident for numbered in header.incidents],
        tables=others,
        series=curves_of(others),
        state="finished",
    )
