"""What kernel, supervisor and engines say to one another about a checkpoint that is written. Pure.

The kernel has every rank copy its state at a step boundary; the engines write, each its part, and
leave a receipt on disk; the supervisor is asked to commit what they write, and does so when all
receipts are there.
"""

from __future__ import annotations

import msgspec

from nbdist.protocol.events import Event
from nbdist.protocol.ids import Slot  # noqa: TC001 - msgspec reads it when the class is made


class SaveMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of orders and answers about checkpoints; the tag on the wire is the class name."""


class CommitSave(SaveMessage, frozen=True, kw_only=True):
    """Finish a checkpoint once all writers are done.

    Answered with `SaveCommitted`; refused where it came to nothing. Asked twice it is done once.
    """

    partial: str
    """Its folder; no other has ever had this name."""
    step: int
    generation: int
    pids: tuple[int, ...]
    """The engines that write, in the order of their ranks."""
    keep: int | None = None
    """So many of the newest stay; None: all."""


class SaveCommitted(SaveMessage, frozen=True, kw_only=True):
    """Answer to `CommitSave`: it is whole, and on disk."""

    folder: str
    num_bytes: int


class PartFailed(Event, frozen=True, kw_only=True):
    """An engine could not write its part."""

    slot: Slot
    pid: int
    partial: str
    """Of the checkpoint."""
    kind: str
    """A class of `nbdist.errors`."""
    message: str
