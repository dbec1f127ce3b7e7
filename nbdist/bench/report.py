"""The rows as a table and for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nbdist.bench.figures import NOISE_LIMIT, Row, Samples, Verdict
from nbdist.cli.table import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.bench.figures import Unit
    from nbdist.bench.host import Host
    from nbdist.bench.plan import Plan

_HEADER = ("figure", "unit", "median", "worst", "bound", "A/A", "n", "verdict")
_FACTORS: dict[Unit, float] = {"s": 1.0, "ms": 1e3, "µs": 1e6, "MB": 1e-6, "×": 1.0, "%": 1e2}
_DIGITS: dict[Unit, int] = {"s": 2, "ms": 1, "µs": 2, "MB": 1, "×": 2, "%": 1}


def as_text(rows: Sequence[Row], failures: Sequence[str]) -> str:
    """The table, what could not be measured, and the verdict."""
    lines = [columns(_HEADER, map(_cells, rows)), ""]
    lines += [f"FAILED: {failure}" for failure in failures]
    by_verdict = {v: sum(row.verdict is v for row in rows) for v in Verdict}
    said = [f"bounds: {by_verdict[Verdict.HOLDS]} hold", f"{by_verdict[Verdict.MISSED]} missed"]
    if by_verdict[Verdict.VOID]:
        said.append(
            f"{by_verdict[Verdict.VOID]} not judged: A and A' differ by more than {NOISE_LIMIT:.0%}"
        )
    if by_verdict[Verdict.NOT_MEASURED]:
        said.append(f"{by_verdict[Verdict.NOT_MEASURED]} figures not measured")
    return "\n".join([*lines, "; ".join(said)])


def as_json(
    host: Host, plan: Plan, rows: Sequence[Row], samples: Samples, failures: Sequence[str]
) -> dict[str, Any]:
    """Everything, in seconds and bytes, with every value that was measured."""
    return {
        "host": asdict(host),
        "plan": asdict(plan),
        "rows": [{**asdict(row), "verdict": row.verdict.name.lower()} for row in rows],
        "samples": samples.values,
        "failures": list(failures),
    }


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.figure
    values = (row.median, row.worst, figure.bound)
    control = "–" if row.control is None else f"{row.control:.1%}"
    return (
        figure.label,
        figure.unit,
        *(shown(value, figure.unit) for value in values),
        control,
        str(row.num_values),
        row.verdict.value,
    )


def shown(value: float | None, unit: Unit) -> str:
    """A number in its unit, or a dash where there is none."""
    return "–" if value is None else f"{value * _FACTORS[unit]:.{_DIGITS[unit]}f}"
