"""A run that is over, or was recorded, as one frame: so that a page draws it without engines. Pure.

What a story does not hold is not shown, and the page says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.protocol.ids import Generation, Rank, RunId, Slot
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.thinning import thin

if TYPE_CHECKING:
    from nbdist.protocol.story import Evaluation, RunStory

MAX_ROWS = {
    "rows": 4_000,
    "steps": 24_000,
    "sent": 4_000,
    "memory": 4_000,
    "distance": 4_000,
}
"""Of longer tables the extremes are told; a page keeps no more than some thousand rows either."""


def story_frame(
    story: RunStory, *, name: str = "", state: str = "", target: int | None = None
) -> bytes:
    """A snapshot after which nothing follows.

    Args:
        story: the run.
        name: of its trainer.
        state: in which it ended; empty: what the story says.
        target: steps after which it was to end; None: what the story says.
    """
    rows = story.rows
    num_steps = int(rows["step"][-1]) + 1 if len(rows) else 0
    incidents = tuple(
        fr.Numbered(number=number, incident=incident)
        for number, incident in enumerate(story.incidents, 1)
    )
    first = int(rows["step"][0]) if len(rows) else 0
    tables, thinned = _tables(story)
    header = fr.Header(
        seq=1,
        kind="snapshot",
        clock_s=float(rows["at"][-1]) if len(rows) else 0.0,
        cluster="",
        run=fr.Run(
            run=RunId(story.title),
            name=name,
            state=state or story.state or "recorded",
            first=first if story.first is None else story.first,
            step=num_steps,
            target=target or story.target or 0,
            durable=num_steps,
            until=None,
            usual_s=float(np.median(rows["seconds"])) if len(rows) else 0.0,
            fault=story.fault,
            samples=int(rows["samples"].sum()),
            seconds=float(np.nansum(rows["seconds"])),
        ),
        is_live=False,
        world=_world(story),
        incidents=incidents,
        evaluations=tuple(map(_evaluated, story.evaluations)),
        counters=fr.NO_COUNTERS,
        thinned=thinned,
    )
    return fr.pack(header, tables)


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
        seats=_seats(story),
    )


def _seats(story: RunStory) -> tuple[fr.Seat, ...]:
    """As they were when the last step was committed, as far as the story has them."""
    seats, memory = story.tables.get("seats"), story.tables.get("memory")
    if seats is None or not len(story.rows):
        return ()
    until = float(story.rows["at"][-1])
    found = {}
    for place in np.flatnonzero(seats["at"].astype(float) <= until).tolist():
        slot, rank = int(seats["slot"][place]), int(seats["rank"][place])
        found[slot] = fr.Seat(
            slot=Slot(slot),
            rank=None if rank < 0 else Rank(rank),
            state=tb.STATES[int(seats["state"][place])],
            pid=None,
            host="",
            device="",
            generation=Generation(int(seats["generation"][place])),
            memory_bytes=_last_memory(memory, slot),
            activity="",
            slow_factor=1.0,
            num_not_restored=0,
        )
    return tuple(seat for _, seat in sorted(found.items()))


def _last_memory(memory: tb.Table | None, slot: int) -> int:
    if memory is None:
        return 0
    known = memory["bytes"][(memory["slot"] == slot) & (memory["kind"] == Kind.MEMORY_RSS)]
    return int(known[-1]) if len(known) else 0


def _tables(story: RunStory) -> tuple[dict[str, tb.Table], tuple[str, ...]]:
    """Tables that fit, and the names of those of which some rows are left out."""
    rows = story.rows
    whole = dict(story.tables)
    if len(rows):
        whole["rows"] = {column: rows[column] for column in tb.TABLES["rows"]}
        whole.setdefault("phases", _phases(story))
    tables = {name: _fitted(name, table) for name, table in whole.items()}
    thinned = [name for name, table in tables.items() if table is not whole[name]]
    return tables, tuple(thinned)


def _phases(story: RunStory) -> tb.Table:
    """As far as rows tell: when each generation began to run."""
    rows = story.rows
    changes = np.flatnonzero(np.diff(rows["generation"], prepend=-1))
    return {
        "at": rows["at"][changes] - rows["seconds"][changes],
        "phase": np.full(len(changes), tb.PHASES.index("running")),
        "generation": rows["generation"][changes],
        "world_size": rows["world_size"][changes],
    }


def _fitted(name: str, table: tb.Table) -> tb.Table:
    room = MAX_ROWS.get(name)
    if room is None or tb.num_rows(table) <= room:
        return table
    if "slot" not in table:
        return thin(name, table, room)
    owner = [table[name].astype(int) for name in ("slot", "kind") if name in table]
    _, whose = np.unique(np.stack(owner), axis=1, return_inverse=True)
    owners = [whose == one for one in range(whose.max() + 1)]
    parts = [
        thin(name, {column: values[own] for column, values in table.items()}, room // len(owners))
        for own in owners
    ]
    return {column: np.concatenate([part[column] for part in parts]) for column in table}
