"""Reads the record of a run: everything that a view of it needs, without engines.

Called by commands, in any process. A record whose writer was killed is read as far as it goes.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, cast

import msgspec
import numpy as np

from nbdist.errors import RecordUnreadable
from nbdist.protocol import record as rc
from nbdist.protocol.columns import from_columns
from nbdist.protocol.story import OVER, ROWS, RunStory, curves_of, is_known, unknown_in_words
from nbdist.protocol.telemetry import RECORD, BatchError, Kind, check
from nbdist.supervisor.series import Series
from nbdist.supervisor.tables import run_tables

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nbdist.protocol.events import Incident
    from nbdist.protocol.ids import Slot
    from nbdist.protocol.story import Evaluation
    from nbdist.protocol.tables import Table

_GZIP = b"\x1f\x8b"
MAX_MB = 256
"""Memory for the series of a record."""


class _Opening(msgspec.Struct):
    """What any version's first line has."""

    type: str
    schema: int = 0


@dataclass(kw_only=True)
class Replay:
    """What a record says."""

    header: rc.Header
    series: Series = field(default_factory=lambda: Series(MAX_MB))
    rows: NDArray[np.void] = field(default_factory=lambda: np.empty(0, ROWS))
    """Committed steps, each once: as it was committed last."""
    incidents: list[Incident] = field(default_factory=list)
    """In the order in which they began, each as it was known at the end."""
    evaluations: list[Evaluation] = field(default_factory=list)
    worlds: list[rc.World] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    """What slots did, where the record tells it put together: it was made from a story."""
    tokens: dict[int, float] = field(default_factory=dict)
    """Second of the run -> tokens that all ranks together trained on; empty: no tokens."""
    ended: rc.Ended | None = None
    """How the run ended; None where the record does not say."""
    notes: list[str] = field(default_factory=list)

    def story(self) -> RunStory:
        """What a report is made of."""
        series = {slot: self.series.curves(slot) for slot in self.series.slots}
        state, _, fault = (self.ended.how if self.ended is not None else "").partition(": ")
        return RunStory(
            title=self.header.title,
            # A run that the cluster took with it did not come to an end of its own.
            state=state if state in OVER or not state else "stopped",
            fault=fault,
            first=self.header.first,
            target=self.header.target,
            started=self.header.started,
            rows=self.rows,
            incidents=self.incidents,
            evaluations=self.evaluations,
            series=series or curves_of(self.tables),
            tables=self.tables or run_tables(self.series, self.worlds),
            notes=self.notes,
        )


def read(path: Path) -> Replay:
    """Read a record, also as a report saves it: packed by gzip.

    Raises:
        RecordUnreadable: it is no record, or one of a newer nbdist.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        try:
            return _read(path, cast("IO[bytes]", gzip.open(file)) if is_packed else file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RecordUnreadable(f"{path} cannot be unpacked: {error}") from error


def _read(path: Path, file: IO[bytes]) -> Replay:
    reader = _Reader(_header(path, file.readline()))
    for line in file:
        reader.take(line)
    return reader.close()


def _header(path: Path, line: bytes) -> rc.Header:
    try:
        opening = msgspec.json.decode(line, type=_Opening)
    except msgspec.DecodeError:
        opening = None
    if opening is None or opening.type != rc.Header.__name__:
        raise RecordUnreadable(
            f"{path} is not the record of a run: its first line is no header; "
            "name a file that a run wrote, such as run.jsonl"
        )
    if opening.schema > rc.SCHEMA:
        raise RecordUnreadable(
            f"{path} is a record of schema {opening.schema}, and this nbdist reads up to schema "
            f"{rc.SCHEMA}; read it with the version that wrote it, or a newer one"
        )
    try:
        return msgspec.json.decode(line, type=rc.Header)
    except msgspec.DecodeError as error:
        raise RecordUnreadable(f"the first line of {path} is damaged: {error}") from error


class _Reader:
    """Line by line; what a line cannot give is left out and counted."""

    def __init__(self, header: rc.Header) -> None:
        self._replay = Replay(header=header)
        self._rows: list[NDArray[np.void]] = []
        self._incidents: dict[rc.IncidentKey, Incident] = {}
        self._numbers: dict[tuple[Slot, int], int] = {}
        self._dropped: dict[tuple[Slot, int], int] = {}
        self._num_missing = self._num_late = self._num_damaged = 0
        self._is_torn = False
        self._decode = msgspec.json.Decoder(rc.AnyLine).decode

    def take(self, line: bytes) -> None:
        """One line."""
        self._is_torn = not line.endswith(b"\n")
        if not line.strip():
            return
        try:
            self._take(self._decode(line))
        except (msgspec.DecodeError, BatchError, ValueError):
            self._num_damaged += 1  # told in the notes
        else:
            self._is_torn = False

    def _take(self, line: rc.AnyLine) -> None:
        replay = self._replay
        match line:
            case rc.Batch():
                self._take_batch(line)
            case rc.Steps(num=num, columns=columns):
                self._rows.append(from_columns(columns, ROWS, num))
            case rc.World():
                replay.worlds.append(line)
            case rc.Happened(incident=incident):
                self._incidents[rc.incident_key(incident)] = incident
            case rc.Evaluated(evaluation=evaluation):
                replay.evaluations.append(evaluation)
            case rc.Details():
                replay.tables[line.table] = rc.table_of(line)
            case rc.Remark(text=text):
                replay.notes.append(text)
            case rc.Resumed(at=at):
                after_s = at - replay.header.at
                replay.notes.append(f"after {after_s:.1f} s another supervisor took over")
            case rc.Ended():
                replay.ended = line

    def _take_batch(self, line: rc.Batch) -> None:
        records = from_columns(line.columns, RECORD, line.num)
        if not len(records):
            raise BatchError("a batch without records")
        check(records)
        source = (line.slot, line.pid)
        first, last = int(records["number"][0]), int(records["number"][-1])
        expected = self._numbers.get(source, first)
        self._num_missing += max(0, last + 1 - expected - len(records))
        self._numbers[source] = last + 1
        self._num_late += line.num_late
        self._replay.series.add(line.slot, records)
        totals = self._replay.tokens
        tokens = records[records["kind"] == Kind.TOKENS]
        for second, value in zip(self._seconds(tokens), tokens["value"].tolist(), strict=True):
            totals[second] = totals.get(second, 0.0) + value

    def _seconds(self, records: NDArray[np.void]) -> list[int]:
        seconds = records["t1_ns"] * 1e-9 - self._replay.header.at
        whole: list[int] = np.floor(seconds).astype(np.int64).tolist()
        return whole

    def close(self) -> Replay:
        """The end of the file."""
        replay, notes = self._replay, self._replay.notes
        rows = _last_of_each_step(self._rows)
        replay.rows = rows[is_known(rows)]
        replay.incidents = list(self._incidents.values())
        if num_unknown := len(rows) - len(replay.rows):
            notes.append(unknown_in_words(num_unknown))
        if self._num_missing:
            notes.append(f"telemetry records missing: {self._num_missing}")
        if self._num_late:
            notes.append(f"telemetry records of a generation that was over: {self._num_late}")
        if replay.series.num_refused or replay.series.num_left_out:
            num = replay.series.num_refused + replay.series.num_left_out
            notes.append(f"telemetry records without room in {MAX_MB} MB of memory: {num}")
        num_damaged = self._num_damaged - self._is_torn
        if num_damaged:
            notes.append(f"damaged lines passed over: {num_damaged}")
        if self._is_torn:
            notes.append("the last line is cut short: its writer was killed, or the disk was full")
        if replay.ended is None:
            notes.append("the record has no end: the run goes on, or its supervisor was killed")
        elif replay.ended.num_lost:
            notes.append(f"lines that could not be written: {replay.ended.num_lost}")
        return replay


def _last_of_each_step(parts: list[NDArray[np.void]]) -> NDArray[np.void]:
    rows = np.concatenate(parts) if parts else np.empty(0, ROWS)
    _, from_the_end = np.unique(rows["step"][::-1], return_index=True)
    return rows[np.sort(len(rows) - 1 - from_the_end)]
