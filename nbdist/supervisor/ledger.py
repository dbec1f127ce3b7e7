"""The append-only record from which a supervisor that takes over learns the world.

JSON lines; the last whole one counts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from nbdist.protocol.orders import WorldView
from nbdist.protocol.story import ROWS

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.protocol.ids import RunId
    from nbdist.rundir import RunDir

MAX_BYTES = 4_000_000
"""A longer ledger is begun anew with its last line."""


log = logging.getLogger(__name__)


class StepLedger:
    """The committed steps of runs, a file of rows each, for a supervisor that takes over."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir

    def append(self, run: RunId, rows: bytes) -> None:
        """Write rows down."""
        try:
            with self._rundir.file(f"steps-{run}").open("ab") as file:
                whole = file.tell() - file.tell() % ROWS.itemsize
                file.truncate(whole)  # the writer before may have been killed in a row
                file.write(rows)
        except OSError as error:
            log.warning("committed steps cannot be written: %s", error)

    def read(self, run: RunId) -> bytes:
        """All whole rows of a run."""
        try:
            data = self._rundir.file(f"steps-{run}").read_bytes()
        except OSError:
            return b""
        return data[: len(data) - len(data) % ROWS.itemsize]


class Ledger:
    """The ledger of one cluster."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = b""
        self._is_new = True

    def append(self, view: WorldView) -> None:
        """Write down the world; a line equal to the last is left out."""
        line = msgspec.json.encode(view)
        if line == self._last:
            return
        try:
            self._write(line)
            self._last = line
        except OSError as error:
            self._is_new = True  # there may be half a line
            # A full disk costs a successor this line, and nobody else anything.
            log.warning("the ledger cannot be written: %s", error)

    def _write(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            # The writer before may have been killed in the middle of a line.
            file.write((b"\n" if self._is_new and file.tell() else b"") + line + b"\n")
            self._is_new = False
            size = file.tell()
        if size > MAX_BYTES:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(line + b"\n")
            fresh.replace(self._path)

    def last(self) -> WorldView | None:
        """The newest line that is whole; None where there is none."""
        if not self._path.exists():
            return None
        for line in reversed(self._path.read_bytes().splitlines()):
            try:
                return msgspec.json.decode(line, type=WorldView)
            except msgspec.DecodeError:
                continue
        return None
