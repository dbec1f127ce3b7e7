"""A run in words and rows: headline facts, checks, tables, a sentence for each chart. Pure.

What a chart shows is said here too, for those who do not see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from nbdist.protocol.events import Incident
    from nbdist.protocol.frames import Run
    from nbdist.protocol.story import RunStory

MAX_TABLE_STEPS = 60
"""Rows of a table of steps; of longer runs it shows some of them."""

NO_VALUE = "–"

TABLE_DIGITS = 5
"""Of a loss in a table: one step differs little from the next."""

OVER_THE_RUN = "over the run, stalls included"
"""What `pace` is."""

_FEW_STEPS, _MISSING_SHARE = 5, 0.02
"""More than either must be missing at a run's beginning to be told."""

_LEAST_POWER, _GREATEST_POWER = -3, 4
"""Of ten: a loss below or above is written with it."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One number that says much."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that must be true of a run."""

    name: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def headlines(story: RunStory) -> list[Fact]:
    """What a reader wants to know first."""
    rows = story.rows
    if not len(rows):
        return [Fact(label="steps committed", value="0")]
    total_s = float(np.nansum(rows["seconds"]))
    wanted = None if story.target is None else story.target - (story.first or 0)
    of = "" if wanted is None else f"of {wanted:,}, "
    stalls = [i.stall_s for i in story.incidents if i.stall_s is not None]
    lost, repeated = _samples_lost(story.incidents), _samples_repeated(story.incidents)
    sizes = rows["world_size"]
    return [
        Fact(label="steps committed", value=f"{len(rows):,}", detail=f"{of}in {total_s:.1f} s"),
        Fact(
            label="loss",
            value=loss_text(rows["loss"][-1]),
            detail=f"from {loss_text(rows['loss'][0])}",
        ),
        Fact(
            label="samples a second",
            value=f"{pace(int(rows['samples'].sum()), total_s):,.0f}",
            detail=f"{OVER_THE_RUN}; {int(rows['samples'].sum()):,} samples",
        ),
        Fact(
            label="ranks",
            value=f"{sizes[-1]}",
            detail=f"{sizes.min()} to {sizes.max()}; "
            f"{counted(len(np.unique(rows['generation'])), 'generation')}",
        ),
        Fact(
            label="incidents",
            value=f"{len(story.incidents)}",
            detail=_longest(stalls)
            if stalls or not story.incidents
            else "their stall is not known",
        ),
        Fact(label="samples lost / repeated", value=f"{lost} / {repeated}"),
    ]


def story_checks(story: RunStory) -> list[Check]:
    """What the story itself can tell of a run that nothing may disturb."""
    steps, losses = story.rows["step"], story.rows["loss"]
    jumps = np.flatnonzero(np.diff(steps) != 1)
    wild = np.flatnonzero(~np.isfinite(losses))
    lost, repeated = _samples_lost(story.incidents), _samples_repeated(story.incidents)
    lacking = sorted({name for i in story.incidents for name in i.not_restored})
    is_open = [i for i in story.incidents if i.generation_after is None]
    return [
        Check(name="steps were committed", holds=len(steps) > 0, detail=f"{len(steps):,}"),
        Check(
            name="no step is missing or committed twice",
            holds=not len(jumps),
            detail=f"after step {steps[jumps[0]]} comes {steps[jumps[0] + 1]}"
            if len(jumps)
            else "",
        ),
        Check(
            name="no sample is lost or repeated",
            holds=not lost and not repeated,
            detail=f"{lost} lost, {repeated} repeated",
        ),
        Check(
            name="every loss is a number",
            holds=not len(wild),
            detail=f"{losses[wild[0]]} at step {steps[wild[0]]}" if len(wild) else "",
        ),
        Check(
            name="newcomers were given everything",
            holds=not lacking,
            detail=f"lacking: {', '.join(lacking)}" if lacking else "",
        ),
        Check(
            name="every incident came to its end",
            holds=not is_open,
            detail=f"{len(is_open)} did not" if is_open else "",
        ),
    ]


def throughput(rows: NDArray[np.void]) -> NDArray[np.float64]:
    """Samples a second of each step, over all ranks, stalls included."""
    seconds = np.where(rows["seconds"] > 0, rows["seconds"], np.nan)
    rates: NDArray[np.float64] = rows["samples"] / seconds
    return rates


def lonely(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Places of finite values without one beside them, which a line would not show."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def pace(samples: int, seconds: float) -> float:
    """Samples a second of a run as a whole, over all ranks, stalls included; NaN before it has any.

    What the report, the picture and the live views mean by "over the run".
    """
    return samples / seconds if seconds > 0 else float("nan")


def steps_text(run: Run) -> str:
    """How far a run is: its own steps, and where it began; pages say it alike."""
    done, wanted = run.step - run.first, run.target - run.first
    text = f"{done:,} of {counted(wanted, 'step')}" if run.target else counted(done, "step")
    return f"{text}, from step {run.first:,} on" if run.first else text


def silences(incidents: Iterable[Incident]) -> list[tuple[int, float, float]]:
    """Slot, beginning and end of each time that an engine hung until it was ended."""
    return [
        (int(slot), incident.began_at - incident.detect_s, incident.began_at)
        for incident in incidents
        if incident.kind == "hung" and incident.began_at is not None and incident.detect_s
        for slot in incident.slots
    ]


def place(incident: Incident, rows: NDArray[np.void]) -> int | None:
    """The step at which an incident belongs: its own, or the first of the generation after it."""
    if incident.step is not None:
        return incident.step
    if incident.generation_after is not None:
        later = rows["step"][rows["generation"] >= incident.generation_after]
        return int(later[0]) if len(later) else None
    return None


def incident_table(incidents: Sequence[Incident]) -> Table:
    """A row for each incident, numbered from 1."""
    header = (
        *("#", "kind", "slots", "ranks", "cause", "step", "generation"),
        *("detect ms", "regroup ms", "restore ms", "stall ms"),
        *("steps repeated", "samples lost", "samples repeated", "not restored"),
    )
    return Table(
        header=header,
        rows=[_incident_row(number, incident) for number, incident in enumerate(incidents, 1)],
    )


def step_table(story: RunStory) -> Table:
    """The twin of the charts over steps; of a long run some steps, and all around incidents."""
    rows = story.rows
    picked = np.unique(np.linspace(0, max(len(rows) - 1, 0), MAX_TABLE_STEPS).astype(int))
    if len(rows) > MAX_TABLE_STEPS:
        changes = np.flatnonzero(np.diff(rows["generation"]))[:MAX_TABLE_STEPS]
        picked = np.unique(np.concatenate([picked, changes, changes + 1]))
    note = f"{len(picked)} of {len(rows):,} steps" if len(picked) < len(rows) else ""
    rates = throughput(rows)
    return Table(
        header=("step", "loss", "samples", "ms", "samples/s", "ranks", "generation", "lr"),
        rows=[
            (
                f"{rows['step'][i]}",
                loss_text(rows["loss"][i], TABLE_DIGITS),
                f"{rows['samples'][i]}",
                f"{rows['seconds'][i] * 1000:.0f}",
                f"{rates[i]:,.0f}",
                f"{rows['world_size'][i]}",
                f"{rows['generation'][i]}",
                f"{rows['lr'][i]:.3g}",
            )
            for i in picked[: len(rows)]
        ],
        note=note,
    )


def series_table(story: RunStory, name: str, scale: float, unit: str) -> Table:
    """The twin of a chart of series: a row for each slot."""
    rows = []
    for slot, curves in sorted(story.series.items()):
        values = curves[name][1] * scale if name in curves else np.empty(0)
        if len(values):
            numbers = (values.min(), np.median(values), values.max(), values[-1])
            rows.append((f"{slot}", *(f"{number:,.1f}" for number in numbers)))
    return Table(
        note=_known_from(story) if name == "compute_s" else "",
        header=("slot", f"least {unit}", f"median {unit}", f"most {unit}", f"last {unit}"),
        rows=rows,
    )


def _known_from(story: RunStory) -> str:
    """Of which steps it is known what each slot did, where not of all."""
    steps, rows = story.tables.get("steps"), story.rows
    if steps is None or not len(steps["step"]) or not len(rows):
        return ""
    first = int(np.nanmin(steps["step"]))
    begin, end = int(rows["step"][0]), int(rows["step"][-1])
    # Of a long run only some steps are told: the first need not be among them. As pages have it.
    is_late = first - begin > max(_FEW_STEPS, (end - begin) * _MISSING_SHARE)
    return f"from step {first:,} on" if is_late else ""


def describe(story: RunStory, name: str) -> str:
    """What a chart over steps shows, in a sentence or two."""
    rows = story.rows
    if not len(rows):
        return "No step was committed."
    num = len(story.incidents)
    marked = f" {counted(num, 'incident')} {'is' if num == 1 else 'are'} marked." if num else ""
    if name == "world":
        sizes = rows["world_size"]
        return (
            f"Ranks over steps: {sizes[0]} at first, {sizes[-1]} at last, {sizes.min()} at least; "
            f"generations {rows['generation'][0]} to {rows['generation'][-1]}.{marked}"
        )
    values = rows["loss"] if name == "loss" else throughput(rows)
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return f"None of {counted(len(rows), 'step')} has a value to draw.{marked}"
    low = known[values[known].argmin()]
    if name == "loss":
        return (
            f"Loss over {counted(len(rows), 'step')}: from {loss_text(values[0])} to "
            f"{loss_text(values[-1])}, lowest {loss_text(values[low])} at step "
            f"{rows['step'][low]}.{marked}"
        )
    return (
        f"Samples a second over all ranks, stalls included: "
        f"{pace(int(rows['samples'].sum()), float(np.nansum(rows['seconds']))):,.0f} over the run; "
        f"of a step {_median(values):,.0f} in the median, {values[low]:,.0f} at least, at step "
        f"{rows['step'][low]}.{marked}"
    )


def counted(number: int, word: str) -> str:
    """A number of things: "1 rank", "2 ranks"; pages say it by the same rule."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """Bytes in units that leave few digits, by the rule of `format.js`."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    value, unit = (num_bytes / 2**20, "MiB") if num_bytes >= 2**20 else (num_bytes / 1024, "KiB")
    return f"{value:,.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def loss_text(loss: float, digits: int = 3) -> str:
    """A loss, to so many digits that say something: 2.64, 0.0123, 9.95e-7; pages say it alike."""
    if not np.isfinite(loss):
        return f"{loss}"
    rounded, _, exponent = f"{loss:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if loss and not _LEAST_POWER <= power <= _GREATEST_POWER:
        return f"{rounded}e{power:+}"
    return f"{loss:,.{max(0, digits - 1 - power)}f}"


def milliseconds(seconds: float | None) -> str:
    """A duration in ms, or a dash where that part did not take place."""
    return NO_VALUE if seconds is None else f"{seconds * 1000:,.0f}"


def _incident_row(number: int, incident: Incident) -> tuple[str, ...]:
    after = incident.generation_after
    lacking = "; ".join(f"{name}: {why}" for name, why in sorted(incident.not_restored.items()))
    return (
        f"{number}",
        incident.kind,
        _listed(incident.slots),
        _listed(incident.ranks),
        incident.cause,
        NO_VALUE if incident.step is None else f"{incident.step}",
        f"{incident.generation_before} → {'…' if after is None else after}",
        milliseconds(incident.detect_s),
        milliseconds(incident.regroup_s),
        milliseconds(incident.restore_s),
        milliseconds(incident.stall_s),
        f"{incident.steps_repeated}",
        f"{incident.samples_lost}",
        f"{incident.samples_repeated}",
        lacking or NO_VALUE,
    )


def _longest(stalls: Sequence[float]) -> str:
    return f"longest stall {max(stalls) * 1000:,.0f} ms" if stalls else "no stall"


def _median(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers) or NO_VALUE


def _samples_lost(incidents: Sequence[Incident]) -> int:
    return sum(incident.samples_lost for incident in incidents)


def _samples_repeated(incidents: Sequence[Incident]) -> int:
    return sum(incident.samples_repeated for incident in incidents)
