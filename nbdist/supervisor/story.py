"""The incidents of a cluster: opened by a loss or a change, timed, closed when the world runs again. Pure."""

from __future__ import annotations

from collections import deque

from nbdist.protocol.events import Incident, IncidentKind
from nbdist.protocol.ids import Generation, Slot

MAX_INCIDENTS = 1_000
"""Older ones are forgotten."""


class Story:
    """Incidents in the order in which they began."""

    def __init__(self) -> None:
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._open: list[tuple[Incident, float]] = []

    def begin(
        self, kind: IncidentKind, slots: tuple[Slot, ...], ranks: tuple[int, ...], cause: str,
        *, generation: Generation, now: float, detect_s: float | None = None,
    ) -> None:  # fmt: skip
        """Something happened to `slots`; `detect_s`: how long ago, where that is known."""
        incident = Incident(
            kind=kind,
            slots=slots,
            ranks=ranks,
            cause=cause,
            generation_before=generation,
            detect_s=detect_s,
        )
        self.incidents.append(incident)
        self._open.append((incident, now))

    def regrouped(self, now: float) -> None:
        """A new group is formed."""
        for incident, began in self._open:
            incident.regroup_s = now - began

    def end(self, generation: Generation, restore_s: float, now: float) -> list[Incident]:
        """The world runs again; returns what is closed by it."""
        closed = []
        for incident, began in self._open:
            incident.generation_after, incident.restore_s = generation, restore_s
            incident.stall_s = now - began
            closed.append(incident)
        self._open = []
        return closed
