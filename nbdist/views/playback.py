"""A run that is over, or was recorded, as one frame: so that a page draws it without engines. Pure.

Its buckets are not in a story, so its gradient sync is not shown; what happened to seats is told as
far as incidents and rows tell it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol import frames as fr
from nbdist.protocol.ids import Generation, RunId, Slot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nbdist.protocol.story import Evaluation, RunStory

_NO_COUNTERS = fr.Counters(
    records=0,
    missing=0,
    dropped=0,
    late=0,
    malformed=0,
    no_room=0,
    rows_dropped=0,
    incidents_left_out=0,
    delayed=0,
)


def story_frame(story: RunStory, *, name: str, state: str, target: int | None = None) -> bytes:
    """A snapshot after which nothing follows.

    Args:
        story: the run.
        name: of its trainer.
        state: in which it ended.
        target: steps after which it was to end; None: those that it has.
    """
    rows = story.rows
    num_steps = int(rows["step"][-1]) + 1 if len(rows) else 0
    incidents = tuple(
        fr.Numbered(number=number, incident=incident)
        for number, incident in enumerate(story.incidents, 1)
    )
    header = fr.Header(
        seq=1,
        kind="snapshot",
        clock_s=float(rows["at"][-1]) if len(rows) else 0.0,
        cluster="",
        run=fr.Run(
            run=RunId(story.title),
            name=name,
            state=state,
            first=int(rows["step"][0]) if len(rows) else 0,
            step=num_steps,
            target=num_steps if target is None else target,
            durable=num_steps,
            until=None,
            usual_s=float(np.median(rows["seconds"])) if len(rows) else 0.0,
            fault="",
        ),
        is_live=False,
        world=_world(story),
        incidents=incidents,
        evaluations=tuple(map(_evaluated, story.evaluations)),
        counters=_NO_COUNTERS,
    )
    return fr.pack(header, _tables(story))


def _evaluated(evaluation: Evaluation) -> fr.Evaluated:
    metrics = {n: v if math.isfinite(v) else None for n, v in evaluation.metrics.items()}
    return fr.Evaluated(step=evaluation.step, at=evaluation.at, metrics=metrics)


def _world(story: RunStory) -> fr.World:
    rows = story.rows
    size = int(rows["world_size"][-1]) if len(rows) else 0
    return fr.World(
        phase="ended",
        generation=Generation(int(rows["generation"][-1]) if len(rows) else 0),
        world_size=size,
        size=size,
        healthy=True,
        reason="",
        seats=(),
    )


def _tables(story: RunStory) -> dict[str, fr.Table]:
    rows = story.rows
    tables: dict[str, fr.Table] = {}
    if len(rows):
        tables["rows"] = {column: rows[column] for column in fr.TABLES["rows"]}
        changes = np.flatnonzero(np.diff(rows["generation"], prepend=-1))
        began_at = rows["at"][changes] - rows["seconds"][changes]
        tables["phases"] = {
            "at": began_at,
            "phase": np.full(len(changes), fr.PHASES.index("running")),
            "generation": rows["generation"][changes],
            "world_size": rows["world_size"][changes],
        }
    parts = [_steps(slot, curves, story) for slot, curves in sorted(story.series.items())]
    parts = [part for part in parts if len(part["step"])]
    if parts:
        tables["steps"] = {
            column: np.concatenate([part[column] for part in parts])
            for column in fr.TABLES["steps"]
        }
    return tables


def _steps(
    slot: Slot,
    curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    story: RunStory,
) -> fr.Table:
    """Attempts at steps of one slot: those times that a story keeps, the others not known."""
    at, _ = curves.get("step_s", curves.get("compute_s", (np.empty(0), None)))
    known = {column: np.full(len(at), np.nan) for column in fr.TABLES["steps"]}
    rows = story.rows
    if not len(rows):
        return {column: values[:0] for column, values in known.items()}
    place = np.minimum(np.searchsorted(rows["at"], at), len(rows) - 1)
    known["step"] = rows["step"][place].astype(float)
    known["generation"] = rows["generation"][place].astype(float)
    known["ended_at"] = at
    known["slot"] = np.full(len(at), float(slot))
    known["attempt"] = np.zeros(len(at))
    for name in ("step_s", "compute_s", "exposed_s", "wait_s", "data_s", "optimizer_s"):
        if name in curves and len(curves[name][1]) == len(at):
            known[name] = curves[name][1]
    return dict(known)
