"""The world as the kernel is told it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.protocol.orders import SeatView, WorldView
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import THE_SEAT, Seat, SeatState

if TYPE_CHECKING:
    from nbdist.supervisor.state import Machine


def view_of(machine: Machine, *, with_beats: bool = False) -> WorldView:
    """The world now; `with_beats`: with what changes all the time (memory, current waits)."""
    formed = machine.phase is Phase.RUNNING
    return WorldView(
        phase=machine.phase.value,
        membership=machine.membership,
        seats=tuple(_seat(machine, s, with_beats) for _, s in sorted(machine.seats.items())),
        size=machine.size,
        num_formed=machine.membership.world_size if formed else 0,
        healthy=machine.is_healthy,
        reason=_reason(machine),
        incidents=tuple(map(msgspec.structs.replace, machine.story.incidents)),
        notes=machine.notes,
        was_running=machine.was_running,
        runs=machine.runs.views(is_whole=formed, cells=tuple(sorted(machine.gate.open))),
    )


def _seat(machine: Machine, seat: Seat, with_beats: bool) -> SeatView:
    in_group = seat.is_in_group and seat.slot in machine.membership
    beat = seat.beat if with_beats else None
    return SeatView(
        slot=seat.slot,
        rank=int(machine.membership.rank_of(seat.slot)) if in_group else None,
        state=seat.state.value,
        engine_id=seat.engine_id,
        pid=seat.pid,
        host=seat.host,
        device=seat.device,
        generation=machine.generation if in_group else type(machine.generation)(0),
        rss_bytes=beat.rss_bytes if beat else 0,
        activity=seat.activity if with_beats else "",
        is_holder=seat.is_holder,
        not_restored=dict(seat.not_restored),
        slow_factor=seat.beat.slow_factor if seat.beat is not None else 1.0,
    )


def _reason(machine: Machine) -> str:
    if machine.phase is Phase.FAILED:
        return machine.why_failed
    if machine.phase is Phase.BREAKING and machine.awaited:
        awaited = sorted(machine.awaited)
        busy = "; ".join(
            f"slot {s} is busy"
            + (f" ({b.waiting.line})" if (b := machine.seats[s].beat) and b.waiting else "")
            for s in awaited
        )
        return f"{machine.reason}; waiting for members to leave the old group: {busy}"
    given_up = machine.roster.in_state(SeatState.GIVEN_UP)
    if given_up:
        seats = "; ".join(
            f"slot {s.slot} was given up: {s.not_restored[THE_SEAT]}" for s in given_up
        )
        return f"{seats}. The others go on; %dist_scale {machine.size} tries again"
    return machine.reason


def last_words(log: str, num_lines: int = 8) -> tuple[str, ...]:
    """The end of a dead engine's log; where it holds a crash's stack, what came before it too."""
    before, crash, stack = log.rpartition("Fatal Python error")
    if not crash:
        return tuple(log.splitlines()[-num_lines:])
    head = before.splitlines()[-num_lines // 2 :]
    what, _, threads = (crash + stack).partition("\n")
    _, current, own = threads.partition("Current thread")  # others may stand before it
    return (*head, what, *(current + own or threads).strip("\n").splitlines()[:num_lines])
