"""What the state machine wants done: values that `loop` carries out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.protocol.ids import CellId, RunId, Slot
    from nbdist.protocol.orders import AgentOrder, EngineLost, RanksReleased, Refused
    from nbdist.protocol.runs import CellTrains, RunBegun, RunSpec, SendCellTo
    from nbdist.protocol.topology import Membership


@dataclass(frozen=True)
class StartEngine:
    """Make a process for a seat."""

    slot: Slot


@dataclass(frozen=True)
class KillEngine:
    """SIGKILL to a process; its exit will be reported."""

    slot: Slot
    pid: int
    why: str


@dataclass(frozen=True)
class Tell:
    """Send an order to the agent on a slot."""

    slot: Slot
    order: AgentOrder


@dataclass(frozen=True)
class Form:
    """Send `FormGroup` to every member, with the address of the store."""

    membership: Membership
    run: RunSpec | None = None
    """A run that is under way."""
    others_come: bool = False
    """Seats are being filled."""


@dataclass(frozen=True)
class Replay:
    """Send the journal from entry `since` on to a newcomer that will have this rank."""

    slot: Slot
    since: int
    until: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class ForgetCell:
    """Replay this cell to nobody any more."""

    cell: CellId


@dataclass(frozen=True)
class AdmitCell:
    """Answer a `BeginCell`."""

    cell: CellId
    membership: Membership
    ranks: tuple[int, ...]
    between: tuple[int, int] | None = None
    """Steps of a run that is held meanwhile: the last one before, the first one after."""


@dataclass(frozen=True)
class RefuseCell:
    """Answer a `BeginCell` with an error."""

    cell: CellId
    kind: str
    message: str


@dataclass(frozen=True)
class Notify:
    """Tell the kernel at once."""

    notice: EngineLost | RanksReleased | CellTrains | SendCellTo = field()


@dataclass(frozen=True)
class AnswerRun:
    """Answer a `BeginRun`."""

    run: RunId
    answer: RunBegun | Refused


Instruction = (
    StartEngine
    | KillEngine
    | Tell
    | Form
    | Replay
    | ForgetCell
    | AdmitCell
    | RefuseCell
    | Notify
    | AnswerRun
)
