"""What must be true of a run that was disturbed, beside one of the same seed that was not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from nbdist.views.facts import Check, story_checks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.protocol.events import Incident, IncidentKind
    from nbdist.protocol.story import RunStory

LOSS_TOLERANCE = 1e-5
"""Relative, at every step. While a seat is empty others train its samples, so that gradients are
summed in another order: rounding alone makes a difference of some 1e-7."""

_NUM_LAST = 5
"""The loss reached is the mean of so many last steps: that of one depends on its samples."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is done to a rank, and the incident that must come of it."""

    step: int
    """Done once so many steps are committed."""
    rank: int
    signal: Literal["KILL", "STOP"]
    kind: IncidentKind


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run was meant to be."""

    num_engines: int
    num_steps: int
    global_batch: int
    loss_below: float | None
    """After the last step; None: the run is too short to tell."""


def run_checks(story: RunStory, expected: Expected, faults: Iterable[Fault]) -> list[Check]:
    """What the disturbed run itself shows."""
    rows = story.rows
    num_samples = int(rows["samples"].sum())
    wanted = expected.num_steps * expected.global_batch
    checks = [
        *story_checks(story),
        Check(
            name="every step that was asked for",
            holds=rows["step"].tolist() == list(range(expected.num_steps)),
            detail=f"{len(rows)} of {expected.num_steps}",
        ),
        Check(
            name="every sample was trained on once",
            holds=num_samples == wanted,
            detail=f"{num_samples} of {wanted}",
        ),
    ]
    if expected.loss_below is not None:
        reached = float(rows["loss"][-_NUM_LAST:].mean()) if len(rows) else float("nan")
        checks.append(
            Check(
                name=f"the loss fell below {expected.loss_below:g}",
                holds=reached < expected.loss_below,
                detail=f"{reached:.3f}, mean of the last {_NUM_LAST} steps",
            )
        )
    return [*checks, *(_fault_check(fault, story.incidents) for fault in faults)]


def loss_check(story: RunStory, undisturbed: RunStory) -> Check:
    """Whether the two runs have the same loss at every step."""
    name = "the loss is that of the undisturbed run"
    losses, others = story.rows["loss"], undisturbed.rows["loss"]
    if len(losses) != len(others) or not len(others):
        return Check(name=name, holds=False, detail=f"{len(losses)} steps beside {len(others)}")
    apart = np.abs(losses - others) / np.abs(others)
    worst = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
    return Check(
        name=name,
        holds=bool(apart[worst] <= LOSS_TOLERANCE),
        detail=(
            f"{losses[-1]:.6f} beside {others[-1]:.6f} at the end; at most {apart[worst]:.1e} "
            f"apart, relative, at step {story.rows['step'][worst]}"
        ),
    )


def replicas_check(digests: Mapping[int, str], num_engines: int) -> Check:
    """Whether all ranks hold the same parameters, bit for bit."""
    distinct = set(digests.values())
    shown = ", ".join(f"{digest[:12]}…" for digest in sorted(distinct)) or "none"
    return Check(
        name="replicas are equal bit for bit",
        holds=len(digests) == num_engines and len(distinct) == 1,
        detail=f"{len(digests)} ranks: {shown}",
    )


def record_check(story: RunStory, recorded: RunStory) -> Check:
    """Whether the file tells the same run."""
    names = ("step", "loss", "samples", "generation")
    return Check(
        name="the record on disk holds every step",
        holds=all(np.array_equal(story.rows[n], recorded.rows[n]) for n in names),
        detail=f"{len(recorded.rows)} of {len(story.rows)}",
    )


def _fault_check(fault: Fault, incidents: Sequence[Incident]) -> Check:
    found = [i for i in incidents if i.kind == fault.kind and fault.rank in i.ranks]
    return Check(
        name=f"SIG{fault.signal} of rank {fault.rank} is on record",
        holds=bool(found),
        detail="; ".join(f"{i.kind}, {i.cause}, at step {i.step}" for i in found),
    )
