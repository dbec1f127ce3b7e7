"""The schedules that torch has, by name: which stages a rank has in each, and what each costs.

A schedule says in which order the ranks of a pipeline go forward and backward through the
micro-batches. Runs in the engine's main thread. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbdist.train.checks import check_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Order = Mapping[int, "Sequence[str | None]"]
"""A schedule of the user's own: rank -> actions, as `actions.parse` reads them."""
DEFAULT_PER_STAGE = 4
"""So many micro-batches for each stage, where the user says nothing."""


@dataclass(frozen=True)
class Named:
    """What is known of one of torch's schedules."""

    torch_name: str
    """As `torch.distributed.pipelining.schedules.get_schedule_class` knows it."""
    lay: Literal["loop", "v"]
    """How stages lie on ranks: 0, 1, 2, 0, 1, 2 or 0, 1, 2, 2, 1, 0."""
    per_rank: int | None
    """Stages on each rank; None: one or more."""
    idle: str
    """The share of a step in which a rank waits, as a formula; p ranks, v stages on each, m
    micro-batches, a forward as long as each half of a backward. (That a V leaves nothing idle is
    said of steps that run into one another; here each ends with a vote. It needs m ≥ v·p.)"""
    needs_full: bool = False
    """At least as many micro-batches as stages."""
    in_rounds: bool = False
    """Micro-batches go through in rounds of as many as there are ranks, or some more."""

    def idle_share(self, num_ranks: int, per_rank: int, num_microbatches: int) -> float:
        """The formula's value."""
        return _SHARES[self.idle](num_ranks, per_rank, num_microbatches)


_LOOP = "(p−1)/(v·m+p−1)"
_HALVES = "(p−1)/(3·v·m+p−1)"
_SHARES: dict[str, Callable[[int, int, int], float]] = {
    _LOOP: lambda p, v, m: (p - 1) / (v * m + p - 1),
    _HALVES: lambda p, v, m: (p - 1) / (3 * v * m + p - 1),
}

SCHEDULES = {
    "gpipe": Named("GPipe", "loop", 1, _LOOP),
    "1f1b": Named("1F1B", "loop", 1, _LOOP, needs_full=True),
    "interleaved": Named("Interleaved1F1B", "loop", None, _LOOP, in_rounds=True),
    "looped-bfs": Named("LoopedBFS", "loop", None, _LOOP),
    "zero-bubble": Named("InterleavedZeroBubble", "loop", None, _HALVES, in_rounds=True),
    "zbv": Named("ZBVZeroBubble", "v", 2, _HALVES),
    "dualpipev": Named("DualPipeV", "v", 2, _HALVES, needs_full=True),
}


def named(schedule: str) -> Named:
    """A schedule by its name.

    Raises:
        ValueError: there is none of that name.
    """
    check_one_of("schedule", schedule, tuple(SCHEDULES))
    return SCHEDULES[schedule]


def owners(schedule: str, num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """For each stage the rank that has it.

    Raises:
        ValueError: so many stages cannot lie on so many ranks in this schedule.
    """
    facts = named(schedule)
    per_rank, rest = divmod(num_stages, num_ranks)
    is_fit = not rest and per_rank > 0 and facts.per_rank in (None, per_rank)
    if not is_fit:
        wanted = "one or more" if facts.per_rank is None else f"exactly {facts.per_rank}"
        fit = num_ranks * (facts.per_rank or 1)
        raise ValueError(
            f"stages is {num_stages}, and the group has {num_ranks} ranks; schedule={schedule!r} "
            f"wants {wanted} on each rank, the same number on all: give stages={fit}, or start "
            "another number of engines"
        )
    loop = [stage % num_ranks for stage in range(num_stages)]
    if facts.lay == "loop":
        return tuple(loop)
    return tuple(rank if i < num_ranks else num_ranks - 1 - rank for i, rank in enumerate(loop))


def check_counts(schedule: str, num_stages: int, num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError where a schedule cannot do with so many micro-batches."""
    facts = named(schedule)
    if facts.needs_full and num_microbatches < num_stages:
        raise ValueError(
            f"microbatches is {num_microbatches}, and there are {num_stages} stages; "
            f"schedule={schedule!r} needs at least one micro-batch for each stage"
        )
    rounds = max(1, num_microbatches // num_ranks)
    if facts.in_rounds and num_microbatches % rounds:
        raise ValueError(
            f"microbatches is {num_microbatches}, and the group has {num_ranks} ranks; "
            f"schedule={schedule!r} goes through them in {rounds} equal rounds: give a multiple "
            f"of {num_ranks}"
        )


def one_by_one(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """What a rank does in "1f1b": some forwards ahead, then one for each backward."""
    ahead = min(num_microbatches, num_ranks - rank)
    forward = [f"{rank}F{i}" for i in range(num_microbatches)]
    backward = [f"{rank}B{i}" for i in range(num_microbatches)]
    pairs = zip(backward, forward[ahead:], strict=False)
    order = [*forward[:ahead], *(action for pair in pairs for action in pair)]
    return [*order, *backward[num_microbatches - ahead :]]


def default_microbatches(num_stages: int, global_batch: int) -> int:
    """So many as leave little idle, as far as there are samples."""
    most = DEFAULT_PER_STAGE * num_stages
    return most if global_batch >= most else max(1, global_batch // num_stages * num_stages)
