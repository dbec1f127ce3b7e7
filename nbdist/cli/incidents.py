"""The incidents of a run or a cluster as a table, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cli.table import columns, milliseconds, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.protocol.events import Incident

_HEADER = (
    "incident",
    "slots",
    "ranks",
    "cause",
    "step",
    "generation",
    "detect ms",
    "regroup ms",
    "restore ms",
    "stall ms",
    "steps repeated",
    "samples lost/repeated",
)


def incident_table(incidents: Iterable[Incident]) -> str:
    """A line for each, in their order; below, what newcomers could not be given."""
    incidents = list(incidents)
    lacking = [
        printable(f"not restored: {name} ({why})")
        for incident in incidents
        for name, why in sorted(incident.not_restored.items())
    ]
    return "\n".join([columns(_HEADER, map(_row, incidents)), *lacking])


def _row(incident: Incident) -> Sequence[object]:
    after = "…" if incident.generation_after is None else incident.generation_after
    seconds = (incident.detect_s, incident.regroup_s, incident.restore_s, incident.stall_s)
    return (
        incident.kind,
        ", ".join(map(str, incident.slots)),
        ", ".join(map(str, incident.ranks)),
        incident.cause,
        "–" if incident.step is None else incident.step,
        f"{incident.generation_before} → {after}",
        *map(milliseconds, seconds),
        incident.steps_repeated,
        f"{incident.samples_lost}/{incident.samples_repeated}",
    )
