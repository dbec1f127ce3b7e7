"""The lines of a run's record: what each says, and how a whole story is written as lines.

The supervisor writes them while a run goes on; a report holds those that its story makes. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from nbdist.protocol.columns import Columns, from_columns, to_columns
from nbdist.protocol.events import Incident
from nbdist.protocol.ids import Generation, Slot
from nbdist.protocol.story import OVER, Evaluation
from nbdist.protocol.tables import TABLES, num_rows

if TYPE_CHECKING:
    from nbdist.protocol.story import RunStory
    from nbdist.protocol.tables import Table

SCHEMA = 1
"""Raised with every change that an older reader would misread."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all lines; times are seconds of the host's monotonic clock."""


class Header(Line, frozen=True, kw_only=True):
    """The first line."""

    schema: int
    title: str
    at: float
    started: str
    """By the wall clock, as a label."""
    nbdist: str
    """Version that wrote it."""
    first: int | None = None
    """Steps that the trainer had committed before the run."""
    target: int | None = None
    """It ends when so many are."""


class Resumed(Line, frozen=True, kw_only=True):
    """Another supervisor goes on writing; what came meanwhile is missing."""

    at: float


class World(Line, frozen=True, kw_only=True):
    """The world has changed."""

    at: float
    phase: str
    generation: Generation
    slots: tuple[Slot, ...]
    """The members' slots, in rank order."""
    healthy: bool
    reason: str


class Happened(Line, frozen=True, kw_only=True):
    """An incident as it is known now; a later line on the same one stands over this one."""

    incident: Incident


class Steps(Line, frozen=True, kw_only=True):
    """Committed steps; a later line on the same step stands over this one."""

    num: int
    columns: Columns
    """Of `protocol.story.ROWS`."""


class Evaluated(Line, frozen=True, kw_only=True):
    """An evaluation."""

    evaluation: Evaluation


class Batch(Line, frozen=True, kw_only=True):
    """Telemetry of one engine."""

    slot: Slot
    pid: int
    num: int
    num_dropped: int
    """Records that the engine has lost so far."""
    num_late: int = 0
    """Records of a generation that was over when they came."""
    columns: Columns
    """Of `protocol.telemetry.RECORD`."""


class Details(Line, frozen=True, kw_only=True):
    """What slots did, put together: in the record of a story, which has no batches."""

    table: str
    """One of `protocol.tables.TABLES`."""
    num: int
    columns: Columns
    """Of that table."""


class Remark(Line, frozen=True, kw_only=True):
    """What a reader should know."""

    text: str


class Ended(Line, frozen=True, kw_only=True):
    """The run is over."""

    at: float
    how: str
    """finished, stopped or failed, and why."""
    num_lost: int = 0
    """Lines that could not be written, or for which there was no room."""


AnyLine = Header | Resumed | World | Happened | Steps | Evaluated | Batch | Details | Remark | Ended
"""What a record is made of."""


IncidentKey = tuple[str, tuple[Slot, ...], Generation, str]


def incident_key(incident: Incident) -> IncidentKey:
    """What tells incidents apart: a slot is lost, or joins, once in a generation."""
    return incident.kind, incident.slots, incident.generation_before, incident.cause


def encoded(line: Line) -> bytes:
    """As it stands in the file."""
    return msgspec.json.encode(line) + b"\n"


def table_of(line: Details) -> Table:
    """The table that a line holds.

    Raises:
        ValueError: these are not the columns of a table of that name.
    """
    if line.table not in TABLES:
        raise ValueError(f"no table {line.table!r}")
    array = from_columns(line.columns, _dtype(line.table), line.num)
    return {name: array[name] for name in TABLES[line.table]}


def story_lines(story: RunStory, *, nbdist: str) -> bytes:
    """A story as the text of a record, from which the same story can be read.

    Args:
        story: the run.
        nbdist: version that writes it.
    """
    rows = story.rows
    at = float(rows["at"][0] - rows["seconds"][0]) if len(rows) else 0.0
    opening = Header(
        schema=SCHEMA,
        title=story.title,
        at=at,
        started=story.started,
        nbdist=nbdist,
        first=story.first,
        target=story.target,
    )
    lines: list[Line] = [opening]
    if len(rows):
        lines.append(Steps(num=len(rows), columns=to_columns(rows)))
    lines += [Happened(incident=incident) for incident in story.incidents]
    lines += [Evaluated(evaluation=evaluation) for evaluation in story.evaluations]
    lines += [_details(name, table) for name, table in story.tables.items()]
    lines += [Remark(text=note) for note in story.notes]
    if story.state in OVER:
        how = f"{story.state}: {story.fault}" if story.fault else story.state
        lines.append(Ended(at=float(rows["at"][-1]) if len(rows) else at, how=how))
    return b"".join(map(encoded, lines))


def _details(name: str, table: Table) -> Details:
    num = num_rows(table)
    array = np.empty(num, _dtype(name))
    for column in TABLES[name]:
        array[column] = table[column]
    return Details(table=name, num=num, columns=to_columns(array))


def _dtype(table: str) -> np.dtype[np.void]:
    return np.dtype([(name, f"<{kind}") for name, kind in TABLES[table].items()])
