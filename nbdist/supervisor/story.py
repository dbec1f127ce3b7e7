"""The incidents of a cluster: opened by a loss or a change, timed, closed when all runs. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.events import Incident, IncidentKind
from nbdist.protocol.story import is_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from nbdist.protocol.ids import Generation, RunId, Slot
    from nbdist.protocol.topology import Membership
    from nbdist.supervisor.run import Run

MAX_INCIDENTS = 1_000
"""Older ones are forgotten."""


class Story:
    """Incidents in the order in which they began."""

    def __init__(self) -> None:
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.num_begun = 0
        """Incidents that there ever were, forgotten ones included."""
        self._open: list[tuple[Incident, float, Mapping[Slot, int | None]]] = []
        """Incident, when it began, the ranks that its slots had then."""
        self._standing: list[tuple[Incident, RunId]] = []
        """Those under which a run stands: how long, its next committed step tells."""
        self._unreported: list[tuple[Incident, RunId, set[int], int]] = []
        """Incident, run, steps before its `step` that nobody has reported, samples of each. Where
        ranks do not train in step one of them may still be at it."""

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
            began_at=now,
            generation_before=generation,
        )
        self.incidents.append(incident)
        self.num_begun += 1
        self._open.append((incident, now, ranks))
        return incident

    def take_up(self, incidents: Iterable[Incident], now: float) -> None:
        """What another supervisor wrote down; what was open then is timed from now on."""
        self.incidents.extend(incidents)
        self.num_begun = len(self.incidents)
        open_then = [i for i in self.incidents if i.generation_after is None]
        self._open = [(i, now, dict(zip(i.slots, i.ranks, strict=False))) for i in open_then]

    def resumed(self, run: Run, fresh: NDArray[np.void]) -> None:
        """Steps were committed: whoever waited for the first one after a change has it now."""
        self._take_back(run.spec.run, set(fresh["step"].tolist()))
        for incident, whose in list(self._standing):
            after = incident.generation_after or 0
            later = fresh[fresh["generation"] >= after]
            if whose == run.spec.run and len(later):
                self._standing.remove((incident, whose))
                first = later[np.argmin(later["at"])]  # steps are not reported in order everywhere
                if unreported := _account(incident, run, first):
                    self._unreported.append((incident, whose, unreported, int(first["samples"])))

    def _take_back(self, whose: RunId, reported: set[int]) -> None:
        """Steps that seemed to be lost were only under way."""
        for incident, run, steps, num_samples in self._unreported:
            if run == whose:
                steps.difference_update(reported)
                incident.samples_lost = len(steps) * num_samples
        self._unreported = [entry for entry in self._unreported if entry[2]]

    def regrouped(self, now: float) -> None:
        """A new group is formed."""
        for incident, began, _ in self._open:
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
            run: a run that trains on; then `stall_s` comes from its committed steps.
            now: the time.
        """
        for incident, began, had in self._open:
            incident.generation_after = membership.generation
            incident.restore_s, incident.stall_s = now - restoring_since, now - began
            if run is not None:
                incident.stall_s, incident.step = None, run.step
                self._standing.append((incident, run.spec.run))
            if incident.kind in ("joined", "scaled"):
                incident.ranks = _ranks(incident, membership, had)
                for slot in (s for s in incident.slots if s in membership):
                    incident.not_restored |= not_restored[slot]
        self._open = []
        whose = run.spec.run if run is not None else None
        self._standing = [(i, r) for i, r in self._standing if r == whose]
        self._unreported = [entry for entry in self._unreported if entry[1] == whose]


def _ranks(
    incident: Incident, membership: Membership, had: Mapping[Slot, int | None]
) -> tuple[int, ...]:
    """Of those who came the rank that they have now, of those who left the one that they had."""
    ranks = [int(membership.rank_of(s)) if s in membership else had.get(s) for s in incident.slots]
    return tuple(rank for rank in ranks if rank is not None)


def _account(incident: Incident, run: Run, after: np.void) -> set[int]:
    """What a change cost a run: `after` is the first step that was committed after it.

    Returns the steps just before that one that nobody has reported.
    """
    rows, step = run.progress.rows, int(after["step"])
    before = rows[(rows["step"] < step) & is_known(rows)]
    incident.step = step
    replaced = run.progress.replaced_in(int(after["generation"]))
    unreported: set[int] = set()
    if len(before):
        earlier = rows[rows["at"] < after["at"]]
        since = float(earlier["at"].max()) if len(earlier) else float(before["at"][-1])
        if replaced and incident.began_at is not None:  # others came between, and are trained anew
            since = incident.began_at - (incident.detect_s or 0.0)
        took_s = float(after["at"]) - since
        incident.stall_s = max(0.0, took_s - run.progress.usual_s())  # steps are not all as long
        unreported = set(range(int(before["step"][-1]) + 1, step))
        incident.samples_lost = len(unreported) * int(after["samples"])
    committed = dict(zip(rows["step"].tolist(), rows["generation"].tolist(), strict=True))
    broken = {
        s
        for g, s in run.broken
        if incident.generation_before <= g < after["generation"] and committed.get(s, g + 1) > g
    }
    incident.steps_repeated = len(broken.union(replaced))
    return unreported
