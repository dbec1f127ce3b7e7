"""Events and orders to bytes and back, with a schema version.

MessagePack, checked against the types; no pickle. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from types import UnionType

VERSION = 1
"""Raised with every change that an older peer cannot read."""


T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are not a message of this version and of an expected type."""


def encode(message: msgspec.Struct) -> bytes:
    """One version byte, then the tagged message."""
    return bytes([VERSION]) + msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview, kinds: type[T] | UnionType) -> Any:
    """A message of one of `kinds` (a class or union of tagged classes).

    Raises:
        WireError: it is anything else.
    """
    if not data or data[0] != VERSION:
        raise WireError(
            f"message of protocol version {data[0] if data else None}, expected {VERSION}"
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=kinds)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"message that does not fit the protocol: {error}") from error
