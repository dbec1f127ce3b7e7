"""Seats: what the state machine knows of each engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from nbdist.errors import guess_cause
from nbdist.protocol.events import NATIVE_CODE, OWN_STEP
from nbdist.protocol.orders import EngineLost
from nbdist.protocol.topology import Member

if TYPE_CHECKING:
    from nbdist.protocol.events import Beat, EngineExited, IncidentKind, ReplayBegins
    from nbdist.protocol.ids import EngineId, Slot

BY_USER = "ordered by the user"
"""Why an engine was killed, where the user wanted it."""
THE_SEAT = "(the seat)"
"""Key of `Seat.not_restored` under which a seat that was given up says why."""


class SeatState(Enum):
    """State of a seat."""

    EMPTY = "empty"
    STARTING = "starting"
    REPLAYING = "replaying"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"
    GIVEN_UP = "given up"


@dataclass
class Seat:
    """One seat and the engine on it."""

    slot: Slot
    state: SeatState = SeatState.EMPTY
    pid: int | None = None
    engine_id: EngineId | None = None
    host: str = ""
    device: str = ""
    restarts: int = 0
    started_at: float = 0.0
    is_holder: bool = False
    """Whether its variables are the world's: it was in a group that ran."""
    replayed: int = 0
    """Journal entries that its engine has."""
    is_added: bool = False
    """It came with a change of size, and has not been a member yet."""
    is_told_to_end: bool = False
    """Its engine leaves, and will not be a member again."""
    is_late: bool = False
    """It replays cells that ran while it came up; new cells wait for it."""
    replays: ReplayBegins | None = None
    """The cell that its engine replays now, or replayed last."""
    killed_why: str = ""
    """Why a signal was sent to it, by the user or by us."""
    ordered_at: float | None = None
    """When the user ordered its end: the moment from which its detection is timed."""
    last_end: str = ""
    not_restored: dict[str, str] = field(default_factory=dict)
    beat: Beat | None = None
    heard_at: float | None = None
    """When its engine's last beat came."""

    def clear(self) -> None:
        """The engine is gone."""
        self.pid = self.engine_id = self.beat = self.heard_at = None
        self.replayed, self.is_holder, self.is_late = 0, False, False
        self.is_told_to_end, self.not_restored, self.replays = False, {}, None
        self.killed_why, self.ordered_at = "", None

    def takes(self, pid: int) -> bool:
        """Whether a process may sit here: the one that does, or the first where one is awaited."""
        is_awaited = self.pid is None and self.state is SeatState.STARTING
        return self.pid == pid or is_awaited

    @property
    def is_in_group(self) -> bool:
        """Whether it belongs to the group of the present generation, formed or not."""
        return self.state in (SeatState.MEMBER, SeatState.LEAVING)

    @property
    def waits_in(self) -> str:
        """What its main thread waits in, in words; empty where it does not wait."""
        where = self.beat.waiting if self.beat is not None else None
        return f"{where.operation}, {where.line}" if where is not None else ""

    @property
    def activity(self) -> str:
        """What its main thread does, in words; empty: nothing to say.

        A rank that trains waits for others again and again, in each step: that is told by how much
        of the step it is, not as what it does now, unless it is a call that the user may know.
        """
        beat = self.beat
        if beat is None:
            return ""
        where = beat.waiting
        if beat.step is None and where is not None and where.line != OWN_STEP:
            return f"waits in {self.waits_in}"
        if beat.step is not None or where is not None:
            if where is None or where.operation == NATIVE_CODE:
                return "trains"
            place = "" if where.line == OWN_STEP else f", {where.line}"
            return f"trains, in {where.operation}{place}"
        return "runs a cell" if beat.cell is not None else ""

    def as_member(self) -> Member:
        """Its entry in a membership."""
        if self.engine_id is None or self.pid is None:
            raise ValueError(f"slot {self.slot} has no registered engine")
        return Member(slot=self.slot, engine_id=self.engine_id, pid=self.pid, host=self.host)


@dataclass(frozen=True)
class End:
    """How an engine ended, and why as far as is known."""

    event: EngineExited
    how: str
    """Signal or exit code, in words."""
    guess: str
    """Likely cause; empty where nothing can be said."""
    why_killed: str
    """Why we killed it; empty where we did not, or the user wanted it."""
    cause: str
    """For the incident: `user`, `heartbeat`, or how it ended."""
    at: float
    """When: the moment of the order, where the user ordered it."""

    @classmethod
    def of(cls, seat: Seat, event: EngineExited) -> End:
        """The end that `event` reports of the engine on `seat`."""
        is_known = event.signal is not None or event.exit_code is not None
        how = event.signal or f"exit code {event.exit_code}" if is_known else "vanished"
        return cls(
            event=event,
            how=how,
            guess=seat.killed_why or guess_cause(event.signal),
            why_killed=seat.killed_why if seat.killed_why != BY_USER else "",
            cause=_cause(seat, event, how),
            at=seat.ordered_at or event.at,
        )

    @property
    def words(self) -> str:
        """How it ended; with the reason, where it was us who killed it."""
        return f"{self.how}, {self.why_killed}" if self.why_killed else self.how

    @property
    def kind(self) -> IncidentKind:
        """Whether it was found hung, or simply ended."""
        return "hung" if self.event.detector == "beat" else "lost"

    def notice(self, rank: int) -> EngineLost:
        """What the kernel is told at once."""
        return EngineLost(
            slot=self.event.slot,
            rank=rank,
            pid=self.event.pid,
            signal=self.event.signal,
            exit_code=self.event.exit_code,
            guess=self.guess,
            last_lines=(),
        )


def _cause(seat: Seat, event: EngineExited, how: str) -> str:
    if seat.killed_why == BY_USER:
        return "user"
    return "heartbeat" if event.detector == "beat" else how
