"""Python values to bytes and back.

They are pickles: only for roads on which both ends have shown a key. Pure.
"""

from __future__ import annotations

from typing import Any

import cloudpickle


def pack(value: Any) -> bytes:
    """Bytes of a value; functions and classes of a notebook too.

    Raises whatever pickling raises.
    """
    return bytes(cloudpickle.dumps(value, protocol=5))


def unpack(data: bytes) -> Any:
    """The value again. A tensor's value imports torch at this moment, and not before."""
    return cloudpickle.loads(data)
