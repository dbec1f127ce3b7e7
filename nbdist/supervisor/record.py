"""Writes a run down as JSON lines, from which it can be shown again without engines.

Called by the supervisor's one thread. The file is bounded: where its limit comes near, telemetry is
left out first; the last line says so. A disk that is full costs lines, which are counted, and
nothing else. `replay` reads it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from nbdist._version import __version__
from nbdist.protocol.columns import to_columns
from nbdist.protocol.record import (
    SCHEMA,
    Batch,
    Ended,
    Evaluated,
    Happened,
    Header,
    IncidentKey,
    Line,
    Remark,
    Resumed,
    Steps,
    World,
    encoded,
    incident_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from nbdist.protocol.events import Incident, Telemetry
    from nbdist.protocol.orders import WorldView
    from nbdist.protocol.story import Evaluation

MAX_BYTES = 256_000_000
TELEMETRY_SHARE = 0.75
"""Telemetry may fill this share of the file; steps and incidents the rest too."""
LAST_LINES_BYTES = 1_000
"""Kept free for the lines that say what is missing."""

log = logging.getLogger(__name__)


class Recorder:
    """The record of one run.

    Args:
        path: the file.
        title: what the run is called.
        first: steps that its trainer had committed before.
        target: it ends when so many are.
        resumes: goes on where another supervisor ended; otherwise the file is begun anew.
        max_bytes: its limit.
    """

    def __init__(
        self,
        path: Path,
        *,
        title: str,
        first: int | None = None,
        target: int | None = None,
        resumes: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._max_bytes = path.absolute(), max_bytes
        self._is_full = self._is_without_telemetry = self._is_failing = False
        self._resumes = resumes
        self._is_torn = resumes
        """Whether the file may end in the middle of a line."""
        self._limit = f"the record has reached its limit of {max_bytes / 1e6:g} MB"
        self._shown: World | None = None
        self._incidents: dict[IncidentKey, Incident] = {}
        self.num_lost = 0
        """Lines that could not be written, or for which there was no room."""
        self._num_bytes = 0
        now = time.monotonic()
        if resumes and path.exists():
            self._num_bytes = path.stat().st_size
            self._write(Resumed(at=now))
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
        started = datetime.now(tz=UTC).isoformat(timespec="seconds")
        self._write(
            Header(
                schema=SCHEMA,
                title=title,
                at=now,
                started=started,
                nbdist=__version__,
                first=first,
                target=target,
            )
        )

    def telemetry(self, batch: Telemetry, records: NDArray[np.void], *, num_late: int = 0) -> None:
        """A batch that came in, and its records."""
        if self._is_without_telemetry:
            self.num_lost += 1
            return
        line = Batch(
            slot=batch.slot,
            pid=batch.pid,
            num=len(records),
            num_dropped=batch.num_dropped,
            num_late=num_late,
            columns=to_columns(records),
        )
        if not self._write(line, share=TELEMETRY_SHARE):
            self._is_without_telemetry = True
            self.remark(f"telemetry is left out from here on: {self._limit}")

    def steps(self, rows: NDArray[np.void]) -> None:
        """Committed steps, of dtype `protocol.story.ROWS`."""
        if len(rows):
            self._write(Steps(num=len(rows), columns=to_columns(rows)))

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation that is done."""
        self._write(Evaluated(evaluation=evaluation))

    def world(self, view: WorldView, at: float) -> None:
        """The world as it is now: what has changed is written down.

        Incidents that were over before the record began are no part of it.
        """
        world = World(
            at=at,
            phase=view.phase,
            generation=view.membership.generation,
            slots=view.membership.slots,
            healthy=view.healthy,
            reason=view.reason,
        )
        is_first = self._shown is None and not self._resumes
        if self._shown is None or msgspec.structs.replace(self._shown, at=at) != world:
            self._shown = world
            self._write(world)
        known, self._incidents = self._incidents, {}
        for incident in view.incidents:
            key = incident_key(incident)
            self._incidents[key] = msgspec.structs.replace(incident)
            is_old = is_first and incident.generation_after is not None
            if known.get(key) != incident and not is_old:
                self._write(Happened(incident=incident))

    def remark(self, text: str) -> None:
        """Something that a reader should know."""
        self._write(Remark(text=text))

    def close(self, how: str) -> None:
        """The run is over: finished, stopped or failed, and why."""
        self._write(Ended(at=time.monotonic(), how=how, num_lost=self.num_lost))

    def _write(self, line: Line, *, share: float = 1.0) -> bool:
        """Append a line; False where this share of the file is full."""
        if self._is_full:
            self.num_lost += 1
            return False
        data = encoded(line)
        if self._num_bytes + len(data) > self._max_bytes * share - LAST_LINES_BYTES:
            self.num_lost += 1
            if share == 1.0:
                self._is_full = True
                self._append(encoded(Remark(text=f"nothing more is written: {self._limit}")))
            return False
        self._append(data)
        return True

    def _append(self, data: bytes) -> None:
        """To the file, as a whole or not at all; a disk that is full costs this line only."""
        try:
            with self._path.open("ab") as file:
                start = file.tell()
                try:
                    # The writer before may have been killed in the middle of a line.
                    file.write((b"\n" if self._is_torn and start else b"") + data)
                    file.flush()
                except OSError:
                    file.truncate(start)
                    raise
                self._num_bytes = file.tell()
        except OSError as error:
            self._is_torn = True  # it may not have been possible to cut it off
            self.num_lost += 1
            if not self._is_failing:
                log.warning("the record %s cannot be written: %s", self._path, error)
            self._is_failing = True
            return
        self._is_torn = False
        if self._is_failing:
            self._is_failing = False
            self.remark(f"lines are missing here, for want of room; so far: {self.num_lost}")
