"""The world in words and rows, from what the supervisor says of it. No threads, no sockets."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import RecoveryFailed, TargetError, WrongState
from nbdist.gpus import default_num_engines
from nbdist.protocol.events import NATIVE_CODE

if TYPE_CHECKING:
    from nbdist.protocol import orders as od
    from nbdist.protocol.topology import Membership

_PACKAGE = f"{Path(__file__).parents[1]}/"
"""Where the engines find this package too."""


@dataclass(frozen=True)
class RankStatus:
    """One seat and the engine on it."""

    rank: int | None
    """Rank in the present group; None while it is in none."""
    slot: int
    state: str
    generation: int
    device: str
    pid: int | None
    host: str
    memory_bytes: int
    """Resident memory of the engine."""
    step: int | None
    """Steps committed in the run that goes on; None where none does, or the seat is no member."""
    samples_per_second: float | None
    activity: str
    """What its main thread does, where that is known."""
    not_restored: dict[str, str]
    """Name -> why it could not be brought back after a refill."""
    slow_factor: float = 1.0
    """The user has made it so many times as slow."""


def rank_status(
    seat: od.SeatView, step: int | None = None, samples_per_second: float | None = None
) -> RankStatus:
    """One row.

    Args:
        seat: as the supervisor sees it.
        step: steps committed in the run that goes on, by every member alike.
        samples_per_second: likewise, of each member.
    """
    is_member = seat.state == "member"
    return RankStatus(
        rank=seat.rank,
        slot=seat.slot,
        state=seat.state,
        generation=seat.generation,
        device=seat.device,
        pid=seat.pid,
        host=seat.host,
        memory_bytes=seat.rss_bytes,
        step=step if is_member else None,
        samples_per_second=samples_per_second if is_member else None,
        activity=_in_short(seat.activity),
        not_restored=dict(seat.not_restored),
        slow_factor=seat.slow_factor,
    )


def is_healthy(view: od.WorldView, after: int | None) -> bool:
    """Whether all seats are filled and the group is formed, in a generation past `after`.

    Raises:
        RecoveryFailed: it cannot come to that.
        WrongState: a seat stays empty until somebody scales.
    """
    given_up = any(seat.state == "given up" for seat in view.seats)
    if view.phase == "failed" or (view.phase == "running" and given_up and not view.healthy):
        raise RecoveryFailed(view.reason)
    empty = [f"slot {seat.slot}" for seat in view.seats if seat.state == "empty"]
    if view.phase == "running" and empty:
        how = f"%dist_scale {view.size} fills it" if len(empty) == 1 else "%dist_scale fills them"
        raise WrongState(f"{', '.join(empty)}: left empty, as policy shrink wants it; {how}")
    return view.healthy and (after is None or view.membership.generation > after)


def crowding(size: int) -> list[str]:
    """A warning where there are more engines than this host has cores or GPUs for."""
    cores = default_num_engines()
    return [f"{size} engines share {cores} CPU cores or GPUs"] if size > cores else []


def _in_short(activity: str) -> str:
    """What a main thread does, without lines of ours: inside a step of a run it trains."""
    if f"{_PACKAGE}train/" in activity:
        operation = activity.removeprefix("waits in ").partition(", ")[0]
        return "trains" if operation == NATIVE_CODE else f"trains, in {operation}"
    return activity.replace(_PACKAGE, "nbdist/")


def why_unhealthy(view: od.WorldView, timeout: float, after: int | None) -> str:
    """What is missing after a wait of `timeout` seconds for a generation past `after`."""
    missing = [f"slot {s.slot} is {s.state}" for s in view.seats if s.state != "member"]
    text = f"not healthy after {timeout:g} s: the world is {view.phase}"
    if missing:
        text += f", {'; '.join(missing)}"
    if after is not None and view.membership.generation <= after:
        text += f"; generation {view.membership.generation} has not passed {after}"
    return text + (f" ({view.reason})" if view.reason else "")


def trouble_of(view: od.WorldView) -> str:
    """Why cells cannot run on all seats; empty where they can."""
    if view.phase == "failed":
        return view.reason
    away = [seat for seat in view.seats if seat.state != "member"]
    if not away:
        return ""
    seats = ", ".join(f"slot {seat.slot} is {seat.state}" for seat in away)
    return f"{view.membership.world_size} of {view.size} ranks: {seats}"


def lack_of(membership: Membership, view: od.WorldView) -> str:
    """Which ranks a cell begins on, where some seats are not in its group; else empty.

    Args:
        membership: the group that the cell was admitted with.
        view: the world, which may have gone on since then.
    """
    away = [seat for seat in view.seats if seat.slot not in membership]
    if not away:
        return ""
    size = membership.world_size
    ranks = f"ranks 0-{size - 1}" if size > 1 else "rank 0"
    seats = ", ".join(
        f"slot {seat.slot} " + ("joined later" if seat.state == "member" else f"was {seat.state}")
        for seat in away
    )
    return f"began on {size} of {size + len(away)} ranks ({ranks}): {seats}"


def chosen_ranks(ranks: object, world_size: int) -> tuple[int, ...]:
    """A rank or several as a sorted tuple.

    Raises:
        TargetError: they are no integers, none, or not in a world of this size.
    """
    try:
        given: Any = [ranks] if isinstance(ranks, int) else ranks
        given = given if hasattr(given, "__iter__") else [given]
        chosen = tuple(sorted({operator.index(rank) for rank in given}))
    except TypeError:
        raise TargetError(f"ranks={ranks!r}: a rank or several, as integers") from None
    if isinstance(ranks, bool) or not chosen:
        raise TargetError(f"ranks={ranks!r} chooses no rank; leave ranks out for all of them")
    for rank in chosen:
        if not 0 <= rank < world_size:
            world = f"ranks 0-{world_size - 1}" if world_size else "no rank"
            raise TargetError(f"rank {rank} is not in the present world ({world})")
    return chosen


def amount(name: str, value: object) -> float:
    """A finite number of at least 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is another one; the messages name the argument.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: a number") from None
    except OverflowError:
        number = math.inf
    if isinstance(value, bool | str) or not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={value!r}: a finite number, at least 0")
    return number


def whole_number(name: str, value: object) -> int:
    """An integer of at least 1.

    Raises:
        ValueError: it is none; the message names the argument.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r}: an integer, at least 1")
    return number


def check_cell(code: object, timeout: object) -> None:
    """Raises TypeError where they are no source and no number of seconds."""
    if not isinstance(code, str):
        raise TypeError(f"code={code!r}: the source of a cell is text")
    check_limit(timeout)


def check_limit(timeout: object, *, may_be_none: bool = True) -> None:
    """Raises TypeError where it is no number of seconds."""
    is_none = timeout is None and may_be_none
    if not hasattr(timeout, "__float__") and not is_none:
        none = ", or None for no limit" if may_be_none else ""
        raise TypeError(f"timeout={timeout!r}: seconds{none}")


def log_ends(folder: Path, num_lines: int = 8) -> str:
    """The last lines of every log."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
        if lines:
            parts += [f"{path.name}:", *(f"  {line}" for line in lines)]
    return "\n".join(parts)


def why_not_started(view: od.WorldView | None, limit_s: float, *, is_late: bool) -> str:
    """Why a start comes to nothing; empty where it may still go well."""
    if view is not None and view.phase == "failed":
        return view.reason
    phase = view.phase if view is not None else "not answering"
    return f"the cluster is {phase} after {limit_s:g} s" if is_late else ""
