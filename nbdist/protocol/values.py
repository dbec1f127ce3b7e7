"""Python values to bytes and back.

They are pickles: only for roads on which both ends have shown a key. Pure.
"""

from __future__ import annotations

import io
import keyword
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Mapping

Lend = Callable[[Any], tuple[Any, ...] | None]
OURS = frozenset(
    ("torch", "dist", "rank", "world_size", "local_rank", "slot", "device", "generation")
)
"""Names that nbdist itself binds on engines."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Asks first whether a value is said in another way."""

    def __init__(self, file: io.BytesIO, lend: Lend) -> None:
        super().__init__(file, protocol=5)
        self._lend = lend

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for each object."""
        said = self._lend(value)
        return super().reducer_override(value) if said is None else said


def pack(value: Any, lend: Lend = lambda _: None) -> bytes:
    """Bytes of a value; functions and classes of a notebook too.

    Args:
        value: which.
        lend: gives for a value how it is said in place of its bytes, as `__reduce__` does, or None.

    Raises whatever pickling raises.
    """
    file = io.BytesIO()
    _Pickler(file, lend).dump(value)
    return file.getvalue()


def pack_named(named: Mapping[str, Any], lend: Lend = lambda _: None) -> dict[str, bytes]:
    """The values of names, packed as `pack` does.

    Raises:
        ValueError: no variable can have a name, or it is one of `OURS`.
        TypeError: one cannot be packed; the message names it.
    """
    for name in named:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{name!r} cannot be the name of a variable. Nothing was sent")
        if name in OURS:
            text = f"nbdist itself binds {name} on every engine; take another name for yours"
            raise ValueError(f"{text}. Nothing was sent")
    packed = {}
    for name, value in named.items():
        try:
            packed[name] = pack(value, lend)
        except Exception as error:
            kind = type(value).__name__
            text = f"{name} (a {kind}) cannot be sent: {error}. Nothing was sent"
            raise TypeError(text) from error
    return packed


def unpack(data: bytes) -> Any:
    """The value again. A tensor's value imports torch at this moment, and not before."""
    return cloudpickle.loads(data)
