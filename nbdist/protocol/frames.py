"""What a subscriber to live views is sent: a header in JSON, and columns of numbers as raw bytes.

Packed by the supervisor, at most twice a second and only while somebody subscribes; passed on
by the kernel unopened; read by the page. Pure.

A frame is one buffer::

    4 bytes    length of the header, a little-endian unsigned integer
    header     JSON in UTF-8, filled up with spaces, so that what follows begins at a multiple of 8
    columns    numbers, little-endian; each column begins at a multiple of 8

`Header.columns` says where each column lies. The first frame to a subscriber is a *snapshot*, each
later one a *delta*: it holds the rows that are new since the frame before it. `Header.seq` counts
them; a gap means that one was lost, and whoever notices subscribes again, which gives a snapshot. A
snapshot stands for itself: it takes the place of all that was there. World, run and counters are
whole in every frame. Where JSON says null for a number it is not known or not finite; in columns
that is NaN.

Times that end in `_at` are seconds of the supervisor's monotonic clock, as `clock_s` is: the age of
something is `clock_s - its_at`. Durations end in `_s`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from nbdist.protocol.events import Incident
from nbdist.protocol.ids import Generation, RunId, Slot
from nbdist.protocol.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.tables import Table


SCHEMA = 1
"""Raised with every change that an older reader would misread."""

PERIOD_S = 0.5
"""A subscriber is sent a frame that often at most."""
WINDOW = 2
"""Frames that may be on their way, unless a subscriber wants another number: then nothing is sent
until one is acknowledged, and the next frame holds all that is new by then."""
MAX_WINDOW = 8
TYPICAL_BYTES = 65_536
MAX_BYTES = 262_144
"""No frame is larger; long series are thinned out to their least and greatest values."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a header is made of."""


class Seat(Part, frozen=True, kw_only=True):
    """One seat now."""

    slot: Slot
    rank: int | None
    """None while it is in no group."""
    state: str
    """One of `tables.STATES`."""
    pid: int | None
    host: str
    device: str
    generation: Generation
    """Of the group that it is in; 0: none."""
    memory_bytes: int
    """Resident memory of the engine; 0: not known."""
    activity: str
    """What its main thread does, in words; empty: nothing to say."""
    slow_factor: float
    """It was made so many times as slow by the user; 1: it was not."""
    num_not_restored: int
    """Names that could not be brought back after a refill."""
    silent_s: float = 0.0
    """Its engine has given no sign of life for so many whole seconds; 0: it does, as it should."""


class World(Part, frozen=True, kw_only=True):
    """The world now."""

    phase: str
    """One of `tables.PHASES`."""
    generation: Generation
    world_size: int
    """Members of the group."""
    size: int
    """Seats that are wanted."""
    healthy: bool
    reason: str
    """Why it is not running, in words; empty where it is."""
    seats: tuple[Seat, ...]
    """In slot order."""


class Run(Part, frozen=True, kw_only=True):
    """The run that the frame is about."""

    run: RunId
    name: str
    """The engines' variable that holds the trainer; empty where a cell's own loop holds it."""
    state: str
    """binding, running, paused, recovering, finished, stopped, failed; the last three stay."""
    first: int
    """Steps that the trainer had committed before it."""
    step: int
    """Steps committed."""
    target: int
    """It ends when so many are; 0: not known."""
    durable: int
    """So many are acknowledged by every member."""
    until: int | None
    """It pauses when so many are committed."""
    usual_s: float
    """Median duration of its last steps; 0 before there are any."""
    fault: str
    """Why it failed, in words; empty where it has not."""
    samples: int = 0
    """Of all its steps, over all ranks."""
    seconds: float = 0.0
    """What these steps took, stalls included; the user's pauses are not."""


class Numbered(Part, frozen=True, kw_only=True):
    """An incident as it is known now; a later frame's with the same number stands over it."""

    number: int
    """Counts those since the run began, from 1; where there is no run, those of the cluster."""
    incident: Incident


class Evaluated(Part, frozen=True, kw_only=True):
    """What an evaluation at a step boundary gave."""

    step: int
    """Steps committed before it."""
    at: float
    """When it ended."""
    metrics: dict[str, float | None]
    """Name -> value over the whole evaluation set; None: no finite number."""


class Counters(Part, frozen=True, kw_only=True):
    """What is missing, since the cluster began unless said otherwise."""

    records: int
    """Telemetry records that came."""
    missing: int
    """Lost in an engine or on the way: gaps between numbers."""
    dropped: int
    """Lost in engines, by their own count; most are among the missing too."""
    late: int
    """Of a generation that was over when they came."""
    malformed: int
    """Batches that could not be read."""
    no_room: int
    """Values and records for which `telemetry_max_mb` has no room."""
    rows_dropped: int
    """Oldest committed steps of the run that are kept no more."""
    incidents_left_out: int
    """Oldest incidents that a snapshot has no room for."""
    delayed: int
    """Times at which this subscriber was due a frame and had not acknowledged those before."""


NO_COUNTERS = Counters(**dict.fromkeys(Counters.__struct_fields__, 0))


class Column(Part, frozen=True, kw_only=True, array_like=True):
    """Where a column lies; in JSON a list: `["rows.step", "f8", 0, 12]`."""

    name: str
    type: Literal["f4", "f8"]
    """Little-endian float32 or float64."""
    offset: int
    """In bytes from the end of the header, a multiple of 8."""
    num: int
    """Values, the same in all columns of a table."""


class Header(Part, frozen=True, kw_only=True):
    """The header of a frame."""

    schema: int = SCHEMA
    seq: int
    """Counts the frames to a subscriber, from 1."""
    kind: Literal["snapshot", "delta"]
    clock_s: float
    """When it was packed."""
    cluster: str
    run: Run | None
    """None before the first run. A frame about another run than the one before is a snapshot."""
    is_live: bool
    """More frames may follow; False: this is the last one, of a run that is over."""
    world: World
    incidents: tuple[Numbered, ...]
    """Those that are new or have changed; in a snapshot all."""
    evaluations: tuple[Evaluated, ...]
    """New ones; in a snapshot all, or the last ones where there are very many."""
    counters: Counters
    thinned: tuple[str, ...] = ()
    """Tables of this frame of which only some rows are sent: the extremes among neighbours."""
    columns: tuple[Column, ...] = ()


_LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are no frame of this schema; says why."""


def pack(header: Header, tables: Mapping[str, Table]) -> bytes:
    """One buffer; `tables` as in `tables.TABLES`, those without rows left out."""
    columns, parts, offset = [], [], 0
    for table, values in tables.items():
        for column, kind in TABLES[table].items():
            data = np.ascontiguousarray(values[column], dtype=f"<{kind}").tobytes()
            if not data:
                continue
            num = len(data) // int(kind[1])
            columns.append(
                Column(name=f"{table}.{column}", type=_type(kind), offset=offset, num=num)
            )
            padding = -len(data) % 8
            parts += [data, bytes(padding)]
            offset += len(data) + padding
    text = msgspec.json.encode(msgspec.structs.replace(header, columns=tuple(columns)))
    text += b" " * (-(_LENGTH.size + len(text)) % 8)
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes | memoryview) -> tuple[Header, dict[str, Table]]:
    """Header and tables of a frame; the arrays are views of `data`.

    Raises:
        FrameError: it is no frame of this schema.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        header = msgspec.json.decode(bytes(data[_LENGTH.size : start]), type=Header)
        if header.schema != SCHEMA:
            raise FrameError(f"schema {header.schema}, expected {SCHEMA}")
        tables: dict[str, Table] = {}
        for column in header.columns:
            table, _, name = column.name.partition(".")
            at = start + column.offset
            values = np.frombuffer(data, f"<{column.type}", column.num, at)
            tables.setdefault(table, {})[name] = values
    except (struct.error, msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise FrameError(f"no frame: {error}") from error
    return header, tables


def _type(kind: str) -> Literal["f4", "f8"]:
    return "f8" if kind == "f8" else "f4"
