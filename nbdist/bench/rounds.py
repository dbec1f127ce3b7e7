"""One round after the other, each with clusters of its own."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from nbdist.bench import (
    divided,
    emission,
    first_cell,
    lifetime,
    loss,
    pipelines,
    pushes,
    recovery,
    roundtrip,
    serving,
    steps,
    sums,
    views,
)
from nbdist.errors import NbdistError
from nbdist.session.start import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.bench.figures import Samples
    from nbdist.bench.plan import Plan

_WHOLE: dict[str, Callable[[Samples], None]] = {
    "telemetry": emission.measure,
    "pipelines": pipelines.measure,
    "serving": serving.measure,
    "sums": sums.measure,
}
_IN_FOUR = ("roundtrip", "push", "loss", "raise", "supervisor", "scale", "shutdown", "memory")


def play(plan: Plan, samples: Samples, *, say: Callable[[str], None]) -> list[str]:
    """All rounds; returns what went wrong, in words.

    A round in which something does is not finished.
    """
    failures = []
    if plan.wants("start"):
        first_cell.import_torch()  # once unmeasured: afterwards its files are in memory
    for number in range(plan.num_rounds):
        began = time.monotonic()
        try:
            _play_round(number, plan, samples)
        except (NbdistError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"round {number + 1}: {type(error).__name__}: {error}")
        said = f"round {number + 1} of {plan.num_rounds}: {time.monotonic() - began:.1f} s"
        say(f"{said}, FAILED" if len(failures) > number else said)
    return failures


def _play_round(number: int, plan: Plan, samples: Samples) -> None:
    if plan.wants("start"):
        first_cell.measure(number, samples)
    if plan.wants("steps"):
        steps.measure(plan.num_blocks, samples)
    if plan.wants("views"):
        views.measure(plan.num_blocks // 2, samples)
    if plan.wants("divided"):
        divided.copy(plan.num_blocks // 2, samples)
        divided.kill(number, plan.num_kills_in_run // 2, samples)
    for name, measure in _WHOLE.items():
        if plan.wants(name):
            measure(samples)
    if plan.wants("recovery"):
        recovery.kill(number, plan.num_kills_in_run, samples)
        recovery.scale(samples)
    if plan.wants(*_IN_FOUR):
        _use_four(number, plan, samples)
    if plan.wants("loss"):
        with start(8) as cluster:
            loss.lose(cluster, plan.victims(number, 8), samples)


def _use_four(number: int, plan: Plan, samples: Samples) -> None:
    with start(4) as cluster:
        if plan.wants("memory"):
            lifetime.weigh(cluster, samples)
        if plan.wants("loss"):
            loss.lose(cluster, plan.victims(number, 4), samples)
        if plan.wants("raise"):
            loss.raise_before_barrier(cluster, samples)
        # Late, since cells that succeeded are replayed to the newcomers of the losses.
        if plan.wants("roundtrip"):
            roundtrip.measure(cluster, plan.num_pairs, samples)
        if plan.wants("push"):
            pushes.measure(cluster, samples)
        if plan.wants("supervisor"):
            lifetime.replace_supervisor(cluster, samples)
        if plan.wants("scale"):
            lifetime.scale(cluster, samples)
        if plan.wants("shutdown"):
            lifetime.shut_down(cluster, samples)
