"""Python values to bytes and back.

They are pickles: only for roads on which both ends have shown a key. Pure.
"""

from __future__ import annotations

import contextlib
import io
import keyword
from collections.abc import Callable
from inspect import getclosurevars
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Lend = Callable[[Any], tuple[Any, ...] | None]
OURS = frozenset(
    ("torch", "dist", "rank", "world_size", "local_rank", "slot", "device", "generation")
)
"""Names that nbdist itself binds on engines."""
MAX_DEPTH, MAX_MEMBERS = 8, 1000
"""So deep, and among so many members each time, is looked for what cannot be packed."""


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
            packed[name] = pack_one(name, value, lend)
        except TypeError as error:
            raise TypeError(f"{error}. Nothing was sent") from error
    return packed


def pack_one(name: str, value: Any, lend: Lend = lambda _: None) -> bytes:
    """The value of a name, packed as `pack` does.

    Raises:
        TypeError: it cannot be packed; the message names the member at fault.
    """
    lent: dict[int, Any] = {}

    def remember(part: Any) -> Any:
        said = lend(part)
        if said is not None:
            lent[id(part)] = said
        return said

    try:
        return pack(value, remember)
    except Exception as error:
        path, member = _at_fault(name, value, lambda part: lent.get(id(part)))
        text = f"{name} (a {type(value).__name__}) cannot be sent: {error}"
        text += f"; at fault: {path} (a {type(member).__name__})" if path != name else ""
        text += "; its state_dict() may be" if hasattr(type(value), "state_dict") else ""
        raise TypeError(text) from error


def _at_fault(path: str, value: Any, lend: Lend) -> tuple[str, Any]:
    """The innermost member that cannot be packed by itself either, and the way to it."""
    seen = {id(value)}
    with contextlib.suppress(Exception):  # of the user's object: what was found so far is told
        for _ in range(MAX_DEPTH):
            for step, part in islice(_members(value), MAX_MEMBERS):
                if id(part) not in seen and not _can_be_packed(part, lend):
                    path, value = path + step, part
                    seen.add(id(part))
                    break
            else:
                break
    return path, value


def _can_be_packed(value: Any, lend: Lend) -> bool:
    try:
        pack(value, lend)
    except Exception:  # noqa: BLE001 - a user's object may raise anything; that it does is the answer
        return False
    return True


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, as far as pickle would look into it, and how each is reached."""
    if isinstance(value, dict):
        yield from ((f"[{str(key)[:40]!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, FunctionType):
        used = getclosurevars(value)
        for place in (used.nonlocals, used.globals):
            yield from ((f".{name}", part) for name, part in place.items())
    else:
        parts = dict(getattr(value, "__dict__", {}))
        inner = parts.pop("_modules", None)  # of a torch module, whose children are attributes
        parts |= inner if isinstance(inner, dict) else {}
        yield from ((f".{name}", part) for name, part in parts.items())


def unpack(data: bytes) -> Any:
    """The value again. A tensor's value imports torch at this moment, and not before."""
    return cloudpickle.loads(data)
