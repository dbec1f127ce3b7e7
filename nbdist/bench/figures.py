"""What is reported and how it is judged: figures, their bounds, when a ratio says nothing. Pure.

A ratio is that of medians, and its reference is measured twice in each round, as A and as A'. Where
those two differ, the machine was too busy for the ratio to mean anything. A duration is judged by
its worst value, since a bound is a promise for each time, unless its label names the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIPELINES = ((2, 4), (2, 8), (4, 4), (4, 8))
"""Ranks and micro-batches of the pipelines that are measured."""
NOISE_LIMIT = 0.05
"""A ratio is not judged where the medians of A and A' differ by more than this share."""

Unit = Literal["s", "ms", "µs", "MB", "×", "%"]


class Verdict(StrEnum):
    """How a figure stands to its bound."""

    HOLDS = "holds"
    MISSED = "MISSED"
    VOID = "void (noisy)"
    NO_BOUND = "–"
    NOT_MEASURED = "NOT MEASURED"


class Samples:
    """Measured values by name, in seconds or bytes."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float | None) -> None:
        """One more value; None is a part that did not take place."""
        if value is not None:
            self.values.setdefault(name, []).append(value)

    def add_reference(self, name: str, first: float, second: float, *, number: int) -> None:
        """A reference measured before and after the other side of a ratio.

        Which of the two is A changes each time.
        """
        one, other = (first, second) if number % 2 == 0 else (second, first)
        self.add(f"{name} A", one)
        self.add(f"{name} A'", other)

    def of(self, name: str) -> list[float]:
        """All values of a name."""
        return self.values.get(name, [])


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the report, before anything is measured."""

    benchmark: str
    """The benchmark that measures it."""
    label: str
    """What it is called in the table."""
    value: str
    """Name of its samples."""
    unit: Unit
    """How it is shown."""
    per: str = ""
    """Name of the reference that it is divided by, measured twice; empty: a plain value."""
    bound: float | None = None
    """In seconds, or as a ratio; None: reported only."""
    judged: Literal["worst", "median"] = "worst"
    """Which value of a duration must keep it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report. Values are in seconds, bytes, or a ratio."""

    figure: Figure
    num_values: int
    median: float | None
    worst: float | None
    """Largest value; None for a ratio, which is one of medians."""
    control: float | None
    """By what share A and A' differ; None where there is no reference."""
    verdict: Verdict


def evaluate(figures: Iterable[Figure], samples: Samples) -> list[Row]:
    """The lines of the report."""
    return [_ratio(f, samples) if f.per else _plain(f, samples) for f in figures]


def failed(rows: Iterable[Row]) -> bool:
    """Whether a bound is missed, or something that was asked for has no value."""
    return any(row.verdict in (Verdict.MISSED, Verdict.NOT_MEASURED) for row in rows)


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """By what share the larger of two medians exceeds the smaller."""
    low, high = sorted((median(one), median(other)))
    return high / low - 1


def judge(value: float, bound: float | None) -> Verdict:
    """A value that equals its bound holds."""
    if bound is None:
        return Verdict.NO_BOUND
    return Verdict.HOLDS if value <= bound else Verdict.MISSED


def _plain(figure: Figure, samples: Samples) -> Row:
    values = samples.of(figure.value)
    if not values:
        return _absent(figure)
    judged = max(values) if figure.judged == "worst" else median(values)
    return Row(
        figure=figure,
        num_values=len(values),
        median=median(values),
        worst=max(values),
        control=None,
        verdict=judge(judged, figure.bound),
    )


def _ratio(figure: Figure, samples: Samples) -> Row:
    values = samples.of(figure.value)
    one, other = samples.of(f"{figure.per} A"), samples.of(f"{figure.per} A'")
    if not (values and one and other):
        return _absent(figure)
    ratio = median(values) / median([*one, *other])
    control = difference(one, other)
    return Row(
        figure=figure,
        num_values=len(values),
        median=ratio,
        worst=None,
        control=control,
        verdict=Verdict.VOID if control > NOISE_LIMIT else judge(ratio, figure.bound),
    )


def _absent(figure: Figure) -> Row:
    return Row(
        figure=figure,
        num_values=0,
        median=None,
        worst=None,
        control=None,
        verdict=Verdict.NOT_MEASURED,
    )


def _losses(size: int) -> tuple[Figure, ...]:
    parts: tuple[tuple[str, str, Unit, float | None], ...] = (
        ("cell ended", "cell", "ms", 0.3),
        ("healthy again", "healthy", "ms", 1.5),
        ("detected", "detect", "ms", None),
        ("survivors regrouped", "regroup", "ms", None),
        ("newcomer admitted", "admit", "ms", None),
        ("newcomer restored", "restore", "ms", None),
    )
    return tuple(
        Figure(
            benchmark="loss",
            label=f"1 of {size} killed in all_reduce: {label}",
            value=f"loss {size} {part}",
            unit=unit,
            bound=bound,
        )
        for label, part, unit, bound in parts
    )


def _recoveries() -> tuple[Figure, ...]:
    parts: tuple[tuple[str, str, float | None, Literal["worst", "median"]], ...] = (
        ("rank killed: run stood still, median", "lost", 0.15, "median"),
        ("rank killed: run stood still", "lost", 0.6, "worst"),
        ("… detected", "lost detect", None, "worst"),
        ("… survivors regrouped", "lost regroup", None, "worst"),
        ("… seat filled again, newcomer trains", "refilled", 1.5, "worst"),
        ("newcomer joins: run stood still", "joined", 0.2, "worst"),
        ("… regrouped", "joined regroup", None, "worst"),
        ("… state handed over", "joined restore", None, "worst"),
        ("rank stopped: run stood still, beyond hang_timeout_s", "hung", 0.3, "worst"),
        ("2 → 4 → 3 → 4 engines: run stood still", "scaled", 0.2, "worst"),
    )
    return tuple(
        Figure(
            benchmark="recovery",
            label=label,
            value=f"run {part}",
            unit="ms",
            bound=bound,
            judged=judged,
        )
        for label, part, bound, judged in parts
    )


def idle_name(num_ranks: int, num_microbatches: int) -> str:
    """Of the samples of what ranks wait beyond the formula."""
    return f"pipeline {num_ranks} {num_microbatches} idle"


def _pipelines() -> tuple[Figure, ...]:
    idle = tuple(
        Figure(
            benchmark="pipelines",
            label=f"{ranks} stages, {num} micro-batches: waits, off (p−1)/(m+p−1) by",
            value=idle_name(ranks, num),
            unit="%",
            bound=0.03,
        )
        for ranks, num in PIPELINES
    )
    steps = _steps(
        "pipelines",
        ("step of 1F1B", "1f1b step"),
        ("step of interleaved 1F1B, 2 stages a rank / of 1F1B", "interleaved step"),
        bound=1 / 1.10,
    )
    return (*idle, *steps)


def _divided() -> tuple[Figure, ...]:
    names = {"pipeline": "pipeline of 4 stages", "sharded": "rows of 4 ranks"}
    copies = [
        _steps(
            "divided",
            (f"{label}: step without copies", f"{name} plain"),
            (f"{label}: step, copied every 10 / without", f"{name} copied"),
            bound=1.03,
        )
        for name, label in names.items()
    ]
    parts = (("run stood still", "lost", 2.0), ("newcomer trains", "refilled", None))
    stalls = (
        Figure(
            benchmark="divided",
            label=f"{label}: one killed, {said}",
            value=f"{name} {part}",
            unit="s",
            bound=bound,
        )
        for name, label in names.items()
        for said, part, bound in parts
    )
    return (*(figure for pair in copies for figure in pair), *stalls)


def _sums() -> tuple[Figure, ...]:
    pairs = [
        _steps(
            "sums",
            (f"sum of {size} MiB on 2 ranks over gloo", f"gloo sum {size}"),
            (f"sum of {size} MiB through shared memory / gloo", f"local sum {size}"),
            bound=bound,
        )
        for size, bound in ((1, 1 / 8), (25, 1 / 3))
    ]
    pairs += [
        _steps(
            "sums",
            (f"run of 2 ranks over gloo, one {done}: stood still", f"gloo {kind}"),
            (f"run through shared memory, one {done}: stood still / gloo", f"shared {kind}"),
            bound=1.25,
        )
        for kind, done in (("lost", "killed"), ("hung", "stopped"))
    ]
    return tuple(figure for pair in pairs for figure in pair)


def _steps(
    benchmark: str, usual: tuple[str, str], other: tuple[str, str], *, bound: float
) -> tuple[Figure, Figure]:
    """A step's time, and another step's beside it; each a label and the name of its values."""
    (label, reference), (compared, value) = usual, other
    return (
        Figure(benchmark=benchmark, label=label, value=f"{reference} A", unit="ms"),
        Figure(
            benchmark=benchmark, label=compared, value=value, per=reference, unit="×", bound=bound
        ),
    )


FIGURES = (
    Figure(benchmark="start", label="python -c 'import torch'", value="import torch A", unit="s"),
    Figure(benchmark="start", label="start(4) to first cell", value="first cell", unit="s"),
    Figure(
        benchmark="start",
        label="start(4) to first cell / import torch",
        value="first cell",
        per="import torch",
        unit="×",
        bound=3.0,
    ),
    Figure(
        benchmark="start",
        label="first DDP cell, beyond an empty one",
        value="DDP",
        unit="ms",
        bound=0.1,
    ),
    Figure(benchmark="roundtrip", label="execute, ipyparallel", value="execute A", unit="ms"),
    Figure(benchmark="roundtrip", label="empty cell", value="cell", unit="ms"),
    Figure(
        benchmark="roundtrip",
        label="empty cell / execute of ipyparallel",
        value="cell",
        per="execute",
        unit="×",
        bound=1.3,
    ),
    Figure(
        benchmark="push",
        label="256 MiB to 4 engines, push of ipyparallel",
        value="ipyparallel push A",
        unit="ms",
    ),
    Figure(
        benchmark="push",
        label="256 MiB to 4 engines, 1 GB/s to each, median",
        value="push",
        unit="ms",
        bound=0.268,
        judged="median",
    ),
    Figure(
        benchmark="push",
        label="256 MiB to 4 engines / push of ipyparallel",
        value="push",
        per="ipyparallel push",
        unit="×",
        bound=1 / 8,
    ),
    *_losses(4),
    *_losses(8),
    Figure(
        benchmark="raise",
        label="1 of 4 raises before a barrier: cell ended",
        value="raise",
        unit="ms",
        bound=1.0,
    ),
    Figure(
        benchmark="supervisor",
        label="supervisor killed: next cell answered",
        value="supervisor",
        unit="s",
        bound=5.0,
    ),
    Figure(benchmark="scale", label="scale 4 → 2", value="shrink", unit="s"),
    Figure(benchmark="scale", label="scale 2 → 4", value="grow", unit="s"),
    Figure(
        benchmark="shutdown", label="shutdown, 4 engines", value="shutdown", unit="s", bound=10.0
    ),
    *_recoveries(),
    *_steps(
        "steps",
        ("step of plain DDP, 2 ranks", "plain step"),
        ("step of a run / step of plain DDP", "run step"),
        bound=1 / 0.95,
    ),
    *_sums(),
    *_steps(
        "views",
        ("step of a run, 4 ranks", "unseen step"),
        ("step with all views on / without", "seen step"),
        bound=1 / 0.98,
    ),
    *_pipelines(),
    *_divided(),
    *(
        Figure(
            benchmark="serving",
            label=f"parameter server, 5 workers, one 4 × slower, {mode}: step / at best",
            value=f"{mode} step",
            unit="×",
            bound=1 / share,
        )
        for mode, share in (("async", 0.9), ("sync", 0.95))
    ),
    Figure(benchmark="telemetry", label="a telemetry event", value="event", unit="µs", bound=1e-6),
    Figure(benchmark="memory", label="memory of an engine, its own (USS)", value="uss", unit="MB"),
    Figure(benchmark="memory", label="memory of an engine, its part (PSS)", value="pss", unit="MB"),
)
