"""Every event of a cluster's life, frozen and tagged: what happened, past tense. Pure.

Agents (side threads of engines), the zygote and the detectors report these to the supervisor; its
state machine takes them as input, its ledger writes them down. Times are seconds of this host's
monotonic clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.protocol.ids import CellId, EngineId, Generation, Slot

Detector = Literal["zygote", "process", "beat"]
"""Who noticed first that an engine is gone: its parent, a look at its process, a missing beat."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events; the tag on the wire is the class name."""


NATIVE_CODE = "native code"
"""Stands for the name of a call where a main thread waits in none that has one."""
OWN_STEP = "a step of the run"
"""Stands for the user's line where the loop is ours."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What a main thread is waiting in, as read from its stack."""

    operation: str
    """Name of the torch.distributed call, or `NATIVE_CODE` where nothing else is on top."""
    line: str
    """The user's line: `cell line 3: dist.barrier()`; or `OWN_STEP`."""
    since_s: float
    """Monotonic time at which this wait was first seen."""


# ---- engines


class EngineForked(Event, frozen=True, kw_only=True):
    """The zygote made a process for a slot."""

    slot: Slot
    pid: int


class EngineHello(Event, frozen=True, kw_only=True):
    """An engine is registered with the controller and its agent is connected (again)."""

    slot: Slot
    pid: int
    engine_id: EngineId
    host: str
    generation: Generation
    """The generation whose group it is in; 0 for a newcomer.

    A replaced supervisor learns the present group from it.
    """
    device: str
    replayed: int
    """Journal entries that it has."""


class EngineExited(Event, frozen=True, kw_only=True):
    """An engine's process is gone, or was found hung and killed.

    Whoever notices first reports it; later reports are ignored.
    """

    slot: Slot
    pid: int
    signal: str | None
    exit_code: int | None
    detector: Detector
    at: float
    """When it ended, as closely as the detector knows."""


class EngineStartFailed(Event, frozen=True, kw_only=True):
    """No process could be made for a slot, or it did not report in time."""

    slot: Slot
    reason: str


class ReplayBegins(Event, frozen=True, kw_only=True):
    """A newcomer comes to a cell of the journal, which may be its end."""

    slot: Slot
    pid: int
    cell: CellId
    first_line: str


class JournalReplayed(Event, frozen=True, kw_only=True):
    """A newcomer ran the journal and can be admitted."""

    slot: Slot
    pid: int
    failed: tuple[str, ...]
    """What could not be replayed, in words."""


class Beat(Event, frozen=True, kw_only=True):
    """Sent every quarter of a second by an agent; no threshold by itself."""

    slot: Slot
    pid: int
    number: int
    generation: Generation
    cell: CellId | None
    """The cell that its main thread runs."""
    waiting: Where | None
    """Set while the main thread stands in a collective or another native wait of torch."""
    step: int | None = None
    """The step of a run that it trains; None where no run goes on."""
    is_patient: bool = False
    """It is in a phase that may take long (first step, evaluation): its hang clock stands."""
    slow_factor: float = 1.0
    """The user has made it so many times as slow."""
    rss_bytes: int


# ---- groups


class GroupBroken(Event, frozen=True, kw_only=True):
    """A member has left its group of `generation`.

    Its sockets are cut where the group was formed, its objects destroyed, its main thread free.
    """

    slot: Slot
    pid: int
    generation: Generation


class GroupFormed(Event, frozen=True, kw_only=True):
    """A member is in the group of `generation`."""

    slot: Slot
    pid: int
    generation: Generation
    cuttable: bool
    """Whether its sockets are known exactly; if not, a blocked member can only be killed."""
    step: int | None = None
    """Steps that the trainer of the present run has committed; None where there is none."""


class GroupFormFailed(Event, frozen=True, kw_only=True):
    """A member could not form the group of `generation`."""

    slot: Slot
    pid: int
    generation: Generation
    error: str


class NamesFingerprinted(Event, frozen=True, kw_only=True):
    """A member's names: a digest of each value, to find what a newcomer lacks."""

    slot: Slot
    generation: Generation
    digests: dict[str, str]
    """Name -> kind and digest of its value; an empty string where it has no digest."""


class NamesOffered(Event, frozen=True, kw_only=True):
    """The donor has packed names.

    The digest travels on this authenticated road, the bytes over the group.
    """

    slot: Slot
    generation: Generation
    sha256: str
    num_bytes: int
    failed: dict[str, str]
    """Name -> why it cannot be sent."""
    trainer_digest: str = ""
    """Of the whole state of the present run's trainer, where it is among the names."""


class NamesReceived(Event, frozen=True, kw_only=True):
    """A newcomer has taken over what it was sent."""

    slot: Slot
    generation: Generation
    failed: dict[str, str]
    trainer_digest: str = ""
    """Of its trainer now; must be the donor's."""


class CollectiveFailed(Event, frozen=True, kw_only=True):
    """A collective failed on one member: the group is of no use to anybody any more."""

    slot: Slot
    pid: int
    generation: Generation
    error: str


class CellFailedOnRank(Event, frozen=True, kw_only=True):
    """A cell raised on one engine; others that wait for it in a collective have to be released."""

    slot: Slot
    cell: CellId


class Telemetry(Event, frozen=True, kw_only=True):
    """What an engine wrote into its ring since the last batch: up to 64 kB, ten times a second."""

    slot: Slot
    pid: int
    generation: Generation
    """The generation whose group the engine is in; each record has its own."""
    first: int
    """Number of the first record."""
    num_dropped: int
    """Records that this engine has lost so far, because its ring or its socket was full."""
    layout: int
    """Version of the records' layout."""
    records: bytes
    """Of dtype `protocol.telemetry.RECORD`."""


AgentEvent = (
    EngineHello
    | ReplayBegins
    | JournalReplayed
    | Beat
    | GroupBroken
    | GroupFormed
    | GroupFormFailed
    | NamesFingerprinted
    | NamesOffered
    | NamesReceived
    | CollectiveFailed
    | CellFailedOnRank
    | Telemetry
)
"""What an engine's agent may send."""


IncidentKind = Literal["lost", "hung", "joined", "scaled"]
"""Kinds of membership change."""


class Incident(msgspec.Struct, kw_only=True):
    """One membership change, with its causes and durations.

    Durations are in seconds; None where the part did not take place.
    """

    kind: IncidentKind
    slots: tuple[Slot, ...]
    ranks: tuple[int, ...]
    cause: str
    began_at: float | None = None
    """When it was noticed, in seconds of the host's monotonic clock."""
    step: int | None = None
    generation_before: Generation
    generation_after: Generation | None = None
    detect_s: float | None = None
    regroup_s: float | None = None
    restore_s: float | None = None
    stall_s: float | None = None
    steps_repeated: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    not_restored: dict[str, str] = msgspec.field(default_factory=dict)
    """Name -> why a newcomer could not be given its value."""
    reason: str = ""
    """The policy's decision and why."""
