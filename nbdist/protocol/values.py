"""Python values to bytes and back.

They are pickles: only for roads on which both ends have shown a key. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Mapping


def pack(value: Any) -> bytes:
    """Bytes of a value; functions and classes of a notebook too.

    Raises whatever pickling raises.
    """
    return bytes(cloudpickle.dumps(value, protocol=5))


def pack_named(named: Mapping[str, Any]) -> dict[str, bytes]:
    """The values of names.

    Raises:
        TypeError: one cannot be packed; the message names it.
    """
    packed = {}
    for name, value in named.items():
        try:
            packed[name] = pack(value)
        except Exception as error:
            kind = type(value).__name__
            text = f"{name} (a {kind}) cannot be sent: {error}. Nothing was sent"
            raise TypeError(text) from error
    return packed


def unpack(data: bytes) -> Any:
    """The value again. A tensor's value imports torch at this moment, and not before."""
    return cloudpickle.loads(data)
