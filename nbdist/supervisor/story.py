"""The incidents of a cluster: opened by a loss or a change, timed, closed when all runs. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbdist.protocol.events import Incident, IncidentKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.protocol.ids import Generation, Slot
    from nbdist.protocol.topology import Membership

MAX_INCIDENTS = 1_000
"""Older ones are forgotten."""


class Story:
    """Incidents in the order in which they began."""

    def __init__(self) -> None:
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._open: list[tuple[Incident, float]] = []

    def begin(
        self,
        kind: IncidentKind,
        generation: Generation,
        ranks: Mapping[Slot, int | None],
        cause: str,
        now: float,
    ) -> Incident:
        """Something happened to the slots in `ranks`."""
        incident = Incident(
            kind=kind,
            slots=tuple(ranks),
            ranks=tuple(rank for rank in ranks.values() if rank is not None),
            cause=cause,
            generation_before=generation,
        )
        self.incidents.append(incident)
        self._open.append((incident, now))
        return incident

    def take_up(self, incidents: Iterable[Incident], now: float) -> None:
        """What another supervisor wrote down; what was open then is timed from now on."""
        self.incidents.extend(incidents)
        self._open = [(i, now) for i in self.incidents if i.generation_after is None]

    def regrouped(self, now: float) -> None:
        """A new group is formed."""
        for incident, began in self._open:
            incident.regroup_s = now - began

    def end(
        self,
        membership: Membership,
        not_restored: Mapping[Slot, dict[str, str]],
        *,
        restoring_since: float,
        now: float,
    ) -> None:
        """The world runs again as `membership`; `not_restored`: what each member lacks, and why."""
        for incident, began in self._open:
            incident.generation_after = membership.generation
            incident.restore_s, incident.stall_s = now - restoring_since, now - began
            if incident.kind in ("joined", "scaled"):
                present = [s for s in incident.slots if s in membership]
                incident.ranks = tuple(int(membership.rank_of(s)) for s in present)
                for slot in present:
                    incident.not_restored |= not_restored[slot]
        self._open = []
