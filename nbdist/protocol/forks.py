"""What supervisor and zygote say to one another on the zygote's Unix socket. Pure.

A frame is a length, then a message.
"""

from __future__ import annotations

import msgspec

from nbdist.protocol import wire
from nbdist.protocol.ids import Slot


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base; the tag on the wire is the class name."""


class Fork(Message, frozen=True, kw_only=True):
    """Make an engine for a slot."""

    slot: Slot
    env: dict[str, str]
    """Variables of this engine beside the surroundings', for instance the GPU that it sees."""
    num_threads: int


class Hello(Message, frozen=True, kw_only=True):
    """First words of a supervisor."""

    key: str
    """The supervisor's secret key, which stands in the cluster's 0600 file."""


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """A living child."""

    slot: Slot
    pid: int


class Ready(Message, frozen=True, kw_only=True):
    """First answer on a connection: who lives, and where the store listens."""

    children: tuple[Child, ...]
    store_port: int
    cannot_fork: str
    """Why forking is not possible here; empty where it is."""


class Forked(Message, frozen=True, kw_only=True):
    """A child was made."""

    slot: Slot
    pid: int


class Exited(Message, frozen=True, kw_only=True):
    """A child ended. Kept until a supervisor is there to be told."""

    slot: Slot
    pid: int
    signal: str | None
    exit_code: int | None
    at: float


class StoreMoved(Message, frozen=True, kw_only=True):
    """The store had ended and was started again on another port."""

    store_port: int


FromZygote = Ready | Forked | Exited | StoreMoved


def pack(message: Message) -> bytes:
    """Four bytes of length, then the message."""
    body = wire.encode(message)
    return len(body).to_bytes(4, "big") + body


def split(buffer: bytearray) -> list[bytes]:
    """Take the complete frames off the front of `buffer`."""
    out = []
    while len(buffer) >= 4:
        end = 4 + int.from_bytes(buffer[:4], "big")
        if len(buffer) < end:
            break
        out.append(bytes(buffer[4:end]))
        del buffer[:end]
    return out
