"""Cells and pushes that an engine replays when it joins.

Kept on disk too, for a supervisor that takes over. An entry is kept when the cell succeeded, was
not `once`, and did not run longer than the replay limit. The journal is bounded: the oldest entries
go first, and how many went is counted (what all survivors hold alike is copied anyway). A cell that
ends those who replay it is forgotten.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from nbdist.protocol import wire
from nbdist.protocol.ids import CellId, Slot
from nbdist.protocol.orders import Entry

if TYPE_CHECKING:
    from pathlib import Path

MAX_ENTRIES = 5_000
MAX_BYTES = 64_000_000
MAX_FILE_BYTES = 2 * MAX_BYTES
"""A longer file is written anew."""

log = logging.getLogger(__name__)


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A cell or push was sent, for these slots (None: every slot, later ones too)."""

    entry: Entry
    slots: tuple[Slot, ...] | None

    @property
    def num_bytes(self) -> int:
        """Size of what it carries."""
        return len(self.entry.code) + sum(len(v) for v in self.entry.values.values())


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It ended well, and is replayed to newcomers."""

    cell: CellId


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is replayed to nobody any more."""

    cell: CellId


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First record of a file that was written anew: so many older entries are gone."""

    count: int


class Journal:
    """The journal of one cluster."""

    def __init__(self, path: Path, replay_limit_s: float) -> None:
        self._path = path
        self._replay_limit_s = replay_limit_s
        self._begun: dict[CellId, Begun] = {}
        self._lines: list[Begun] = []
        self.num_dropped = 0
        self._num_bytes = 0
        if path.exists():
            self._read()

    @property
    def length(self) -> int:
        """Entries so far, dropped ones included: a position in the journal."""
        return self.num_dropped + len(self._lines)

    def begin(self, entry: Entry, slots: tuple[Slot, ...] | None) -> None:
        """A cell or push is being sent."""
        line = Begun(entry=entry, slots=slots)
        self._begun[entry.cell] = line
        self._append(line)

    def end(self, cell: CellId, *, succeeded: bool, seconds: float) -> None:
        """It is over: kept if it can be replayed."""
        line = self._begun.pop(cell, None)
        if line is None or not succeeded or seconds > self._replay_limit_s:
            return
        self._keep(line)  # first: a file that is written anew below must hold it
        self._append(Kept(cell=cell))

    def forget(self, cell: CellId) -> None:
        """Replay it to nobody any more; it keeps its place."""
        self._forget(cell)
        self._append(Forgotten(cell=cell))

    def since(self, position: int, slot: Slot) -> tuple[Entry, ...]:
        """Entries for `slot` from `position` on."""
        lines = self._lines[max(0, position - self.num_dropped) :]
        return tuple(line.entry for line in lines if line.slots is None or slot in line.slots)

    def _forget(self, cell: CellId) -> None:
        self._lines = [
            msgspec.structs.replace(line, slots=()) if line.entry.cell == cell else line
            for line in self._lines
        ]

    def _append(self, line: Begun | Kept | Forgotten) -> None:
        try:
            with self._path.open("ab") as file:
                start = file.tell()
                try:
                    file.write(_record(line))
                    file.flush()
                except OSError:
                    file.truncate(start)  # half a record would hide all that follows
                    raise
                size = file.tell()
            if size > MAX_FILE_BYTES:
                self._compact()
        except (
            OSError
        ) as error:  # a full disk costs a successor this entry, and nobody else anything
            log.warning("the journal cannot be written: %s", error)

    def _compact(self) -> None:
        """Write the file anew with what is kept and what runs."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(_record(Dropped(count=self.num_dropped)))
            for line in self._lines:
                file.write(_record(line) + _record(Kept(cell=line.entry.cell)))
            file.writelines(map(_record, self._begun.values()))
        fresh.replace(self._path)

    def _keep(self, line: Begun) -> None:
        self._lines.append(line)
        self._num_bytes += line.num_bytes
        while len(self._lines) > MAX_ENTRIES or (self._num_bytes > MAX_BYTES and self._lines):
            self._num_bytes -= self._lines.pop(0).num_bytes
            self.num_dropped += 1

    def _read(self) -> None:
        data, start = self._path.read_bytes(), 0
        while len(data) - start >= 4:
            end = start + 4 + int.from_bytes(data[start : start + 4], "big")
            if len(data) < end:
                break
            line = wire.decode(data[start + 4 : end], Begun | Kept | Forgotten | Dropped)
            if isinstance(line, Dropped):
                self.num_dropped = line.count
            elif isinstance(line, Forgotten):
                self._forget(line.cell)
            elif isinstance(line, Begun):
                self._begun[line.entry.cell] = line
            elif line.cell in self._begun:
                self._keep(self._begun.pop(line.cell))
            start = end
        os.truncate(self._path, start)  # the writer may have been killed in the middle of a record


def _record(line: Begun | Kept | Forgotten | Dropped) -> bytes:
    body = wire.encode(line)
    return len(body).to_bytes(4, "big") + body
