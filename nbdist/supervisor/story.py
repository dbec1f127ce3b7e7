"""The incidents of a cluster: opened by a loss or a change, timed, closed when all runs. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbdist.protocol.events import Incident, IncidentKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from nbdist.protocol.ids import Generation, Slot
    from nbdist.protocol.topology import Membership
    from nbdist.supervisor.runs import Run

MAX_INCIDENTS = 1_000
"""Older ones are forgotten."""


class Story:
    """Incidents in the order in which they began."""

    def __init__(self) -> None:
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._open: list[tuple[Incident, float]] = []
        self._standing: list[Incident] = []
        """Those under which a run stands: how long, the next committed step tells."""

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

    def resumed(self, run: Run, fresh: NDArray[np.void]) -> None:
        """Steps were committed: whoever waited for the first one after a change has it now."""
        for incident in [i for i in self._standing if i.generation_after is not None]:
            later = fresh[fresh["generation"] >= incident.generation_after]
            if len(later):
                self._standing.remove(incident)
                _account(incident, run, later[0])

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
        run: Run | None,
        now: float,
    ) -> None:
        """The world runs again as `membership`.

        Args:
            membership: the new one.
            not_restored: what each member lacks, and why.
            restoring_since: when the hand-over began.
            run: a run that trains; then `stall_s` comes from its committed steps.
            now: the time.
        """
        for incident, began in self._open:
            incident.generation_after = membership.generation
            incident.restore_s, incident.stall_s = now - restoring_since, now - began
            if run is not None:
                incident.stall_s, incident.step = None, run.step
                self._standing.append(incident)
            if incident.kind in ("joined", "scaled"):
                present = [s for s in incident.slots if s in membership]
                incident.ranks = tuple(int(membership.rank_of(s)) for s in present)
                for slot in present:
                    incident.not_restored |= not_restored[slot]
        self._open = []
        if run is None:
            self._standing.clear()


def _account(incident: Incident, run: Run, after: np.void) -> None:
    """What a change cost a run: `after` is the first step that was committed after it."""
    rows, step = run.progress.rows, int(after["step"])
    before = rows[rows["step"] < step]
    incident.step = step
    if len(before):
        incident.stall_s = float(after["at"] - before["at"][-1]) - run.progress.usual_s()
        incident.samples_lost = int(step - 1 - before["step"][-1]) * int(after["samples"])
    lost = {s for g, s in run.broken if incident.generation_before <= g < after["generation"]}
    incident.steps_repeated = len(lost)
