"""What kernel, supervisor and agents ask of one another, and the answers.

Imperative names, frozen, tagged. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.protocol import feed as fd
from nbdist.protocol import runs as rn
from nbdist.protocol import saves as sv
from nbdist.protocol.events import Incident
from nbdist.protocol.ids import CellId, EngineId, Generation, RunId, Slot
from nbdist.protocol.topology import Membership


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all orders and answers; the tag on the wire is the class name."""


# ---- kernel -> supervisor


class Attach(Order, frozen=True, kw_only=True):
    """A kernel says hello, and wants to be told what changes.

    Sent again to a supervisor that took over.
    """

    pid: int
    open_cells: tuple[CellId, ...] = ()
    """Cells that it has running."""
    subscriptions: tuple[fd.Subscribe, ...] = ()
    """To live views; to a supervisor that took over they are news."""


class BeginCell(Order, frozen=True, kw_only=True):
    """A cell or push is about to be sent.

    Answered with `CellAdmitted` once no membership change is under way.
    """

    cell: CellId
    code: str
    """Source of the cell; empty for a push."""
    values: dict[str, bytes] = {}
    """A push: name -> pickled value. Opaque to the supervisor, kept for replay."""
    ranks: tuple[int, ...] | None = None
    """None: all."""
    once: bool = False
    """Not replayed to engines that join later."""


class EndCell(Order, frozen=True, kw_only=True):
    """A cell has ended in the kernel's view."""

    cell: CellId
    succeeded: bool
    seconds: float


class SignalEngines(Order, frozen=True, kw_only=True):
    """Send a signal to engines.

    Answered when the exits are recorded (STOP: when it is delivered).
    """

    slots: tuple[Slot, ...]
    signal: Literal["KILL", "TERM", "STOP"]


class SlowEngines(Order, frozen=True, kw_only=True):
    """Make engines so many times as slow; 1 ends it. Answered when they have taken it."""

    slots: tuple[Slot, ...]
    factor: float


class InterruptCell(Order, frozen=True, kw_only=True):
    """The user wants a cell to end.

    Where Python runs it gets a KeyboardInterrupt; where a collective waits its group is broken.
    """

    cell: CellId


class Scale(Order, frozen=True, kw_only=True):
    """Grow or shrink to `size` seats. Answered when the new world is formed."""

    size: int


class Ping(Order, frozen=True, kw_only=True):
    """Answered with `Done`: the supervisor is alive."""


class QueryView(Order, frozen=True, kw_only=True):
    """Answered with the present `WorldView`."""


class Shutdown(Order, frozen=True, kw_only=True):
    """End everything that this cluster started.

    Answered when it is gone, but for the supervisor itself.
    """


KernelOrder = (
    Attach
    | BeginCell
    | EndCell
    | SignalEngines
    | SlowEngines
    | InterruptCell
    | Scale
    | Ping
    | QueryView
    | Shutdown
    | rn.BeginRun
    | rn.SteerRun
    | rn.SetRun
    | rn.QueryRun
    | sv.CommitSave
    | fd.FeedOrder
)


class Request(Order, frozen=True, kw_only=True):
    """Envelope of an order that wants an answer; `number` 0 wants none."""

    number: int
    order: KernelOrder


# ---- supervisor -> kernel


class SeatView(msgspec.Struct, frozen=True, kw_only=True):
    """One seat as the supervisor sees it."""

    slot: Slot
    rank: int | None
    state: str
    """empty, starting, replaying, ready, member, leaving or given up.

    Busy and waiting are told by `activity`.
    """
    engine_id: EngineId | None
    pid: int | None
    host: str
    device: str
    generation: Generation
    rss_bytes: int
    activity: str
    is_holder: bool
    """Whether its variables are the world's."""
    not_restored: dict[str, str] = {}
    slow_factor: float = 1.0
    """It was made so many times as slow by the user."""


class WorldView(Order, frozen=True, kw_only=True):
    """The world as it is now; sent to the kernel after every change."""

    phase: str
    """starting, forming, restoring, running, breaking, failed, ended."""
    membership: Membership
    seats: tuple[SeatView, ...]
    size: int
    """Seats that are wanted."""
    num_formed: int
    healthy: bool
    """All wanted seats are members of a formed group."""
    reason: str
    """Why the world is not running, in words; empty where it is."""
    incidents: tuple[Incident, ...]
    notes: tuple[str, ...] = ()
    """What the user should know about how this cluster runs, for instance that it cannot fork."""
    was_running: bool = False
    """Whether a group has ever been whole."""
    runs: tuple[rn.RunView, ...] = ()
    """The last training runs, oldest first."""


class CellAdmitted(Order, frozen=True, kw_only=True):
    """Answer to `BeginCell`: run it on these members now."""

    membership: Membership
    ranks: tuple[int, ...]
    between: tuple[int, int] | None = None
    """Steps of a run that is held meanwhile: the last one before, the first one after."""
    over: RunId | None = None
    """The run that ended last; an engine may be told so later than it is sent the cell."""


class Done(Order, frozen=True, kw_only=True):
    """Answer to an order that has no other."""

    text: str = ""


class Refused(Order, frozen=True, kw_only=True):
    """Answer: the order failed. `kind` is a class of `nbdist.errors`."""

    kind: str
    message: str


class EngineLost(Order, frozen=True, kw_only=True):
    """Told at once when an engine is gone, before anything is repaired."""

    slot: Slot
    rank: int | None
    pid: int
    signal: str | None
    exit_code: int | None
    guess: str
    last_lines: tuple[str, ...]


class RanksReleased(Order, frozen=True, kw_only=True):
    """The group was broken while a cell ran; who waited in what."""

    generation: Generation
    waiting: dict[int, str]
    """Rank -> words like `all_reduce, cell line 2`."""
    reason: str


AnswerBody = (
    WorldView
    | CellAdmitted
    | Done
    | Refused
    | rn.RunBegun
    | rn.RunReport
    | sv.SaveCommitted
    | fd.Frame
)
"""What an order may be answered with."""


class Answer(Order, frozen=True, kw_only=True):
    """Envelope of an answer."""

    number: int
    body: AnswerBody


Notice = (
    Answer
    | WorldView
    | EngineLost
    | RanksReleased
    | rn.CellTrains
    | rn.SendCellTo
    | fd.Frame
    | fd.SubscriptionEnded
)
"""What a kernel may receive."""


# ---- supervisor -> agent


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One journal entry that a newcomer replays."""

    cell: CellId
    code: str
    values: dict[str, bytes] = {}


class ReplayJournal(Order, frozen=True, kw_only=True):
    """Run these under the `fake` backend as `rank` of `world_size`, muted.

    When they are done, report `JournalReplayed`.
    """

    entries: tuple[Entry, ...]
    until: int
    """Position in the journal that is reached by it."""
    rank: int
    world_size: int


class BreakGroup(Order, frozen=True, kw_only=True):
    """Leave the group of `generation`: cut now, destroy between cells, report `GroupBroken`."""

    generation: Generation
    reason: str


class FormGroup(Order, frozen=True, kw_only=True):
    """Form the group of a membership: the same order to every member."""

    membership: Membership
    store_host: str
    store_port: int
    run: rn.RunSpec | None = None
    """A run that is under way: its trainer's step is reported with `GroupFormed`."""
    others_come: bool = False
    """Seats are being filled: another group follows this one."""


class FingerprintNames(Order, frozen=True, kw_only=True):
    """Report `NamesFingerprinted`."""

    generation: Generation


class OfferNames(Order, frozen=True, kw_only=True):
    """Pack these names, report `NamesOffered`, and send the bytes to `receivers` (ranks)."""

    generation: Generation
    names: tuple[str, ...]
    receivers: tuple[int, ...]


class ReceiveNames(Order, frozen=True, kw_only=True):
    """Take `num_bytes` from `donor` (rank) over the group, and report `NamesReceived`.

    The digest is checked, and only `names` are kept.
    """

    generation: Generation
    donor: int
    sha256: str
    num_bytes: int
    names: tuple[str, ...]


class AcknowledgeBeat(Order, frozen=True, kw_only=True):
    """Renews the engine's lease; counted from the sending of beat `number`."""

    number: int


class InterruptMain(Order, frozen=True, kw_only=True):
    """Raise KeyboardInterrupt in the main thread if it runs this cell."""

    cell: CellId


class SlowDown(Order, frozen=True, kw_only=True):
    """At each step sleep `factor` - 1 times its own compute time; beats say so."""

    factor: float


class EndEngine(Order, frozen=True, kw_only=True):
    """Leave: scaled down, or the cluster shuts down."""


AgentOrder = (
    ReplayJournal
    | BreakGroup
    | FormGroup
    | FingerprintNames
    | OfferNames
    | ReceiveNames
    | AcknowledgeBeat
    | InterruptMain
    | SlowDown
    | EndEngine
    | rn.RunOrder
)
"""What an agent may be ordered to do."""
