"""The user's variables on this engine, told without their values: form, digest, what bars sending.

Called by the kernel between two steps, in the main thread. Changes nothing. What would take long
is left out, with the reason: a value that is large, and all that come after the time is up.
"""

from __future__ import annotations

import sys
import time
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbdist.engine import entry
from nbdist.engine.digests import fingerprint
from nbdist.engine.port import is_trainer
from nbdist.protocol import values
from nbdist.protocol.variables import MAX_NAMES, MAX_NUMBERS, Described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

LIMIT_S = 5.0
"""Digests are made for so long; of variables that come later there are none."""
MAX_BYTES = 256 << 20
"""A larger value is compared only where it is named."""
MAX_PARTS = 20_000
"""A value of more parts is taken for a large one; numbers in a list count as one part."""
MAX_ITEMS = 1_000_000
"""A list of so many items is taken for a large value, whatever they are."""
MAX_TEXT, MAX_REASON = 40, 300
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_IN_PARTS = "each rank holds a part of its own"
_UNTRAINED = "it has not trained yet, and the first step makes the ranks equal"
_LARGE = "it is large; %dist_vars {name} compares it"
_LATE = "there was no time left; %dist_vars {name} compares it"


def variables(names: Sequence[str]) -> dict[str, Described]:
    """`protocol.calls.VARIABLES`."""
    return describe_all(entry.present().names(), names)


def numbers(names: Sequence[str]) -> dict[str, bytes]:
    """`protocol.calls.NUMBERS`."""
    present = entry.present().names()
    return {name: _numbers(present[name]).tobytes() for name in names if name in present}


def describe_all(
    named: Mapping[str, Any], wanted: Iterable[str], clock: Callable[[], float] = time.monotonic
) -> dict[str, Described]:
    """Tell of variables, but for imported modules.

    Args:
        named: all there are.
        wanted: those of which to tell, however large they are; none: all.
        clock: monotonic seconds.
    """
    wanted = set(wanted)
    deadline = clock() + LIMIT_S
    told: dict[str, Described] = {}
    for name, value in named.items():
        if name in wanted or not (wanted or isinstance(value, types.ModuleType)):
            is_late = not wanted and clock() > deadline
            told[name] = describe(name, value, is_wanted=bool(wanted), is_late=is_late)
        if len(told) == MAX_NAMES:
            break
    return told


def describe(name: str, value: Any, *, is_wanted: bool = False, is_late: bool = False) -> Described:
    """Tell of one variable.

    Args:
        name: its name.
        value: of any kind.
        is_wanted: make a digest, however large it is.
        is_late: make none.
    """
    try:
        form = _form(value)
        is_large, reason = (False, _LATE.format(name=name)) if is_late else _weigh(value)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is looked into; told as the reason
        return Described(
            type=type(value).__name__, not_compared=f"{type(error).__name__}: {error}"[:MAX_REASON]
        )
    if is_large and not is_wanted:
        reason = _LARGE.format(name=name)
    if reason:
        return Described(**form, not_compared=reason)
    not_sent, digest = _why_not_sent(name, value)[:MAX_REASON], fingerprint(value)
    reason = "" if digest else not_sent or "it has no form of which a digest could be made"
    return Described(**form, digest=digest, not_compared=reason, not_sent=not_sent)


def _form(value: Any) -> dict[str, Any]:
    """What can be said of a value without looking at all of it."""
    told: dict[str, Any] = {"type": type(value).__name__}
    if isinstance(value, torch.Tensor):
        told |= _form_of_tensor(value) | {"shape": str(tuple(value.shape))}
        told["num_numbers"] = value.numel() if _has_numbers(value) else 0
    elif isinstance(value, np.ndarray):
        told |= {"shape": str(value.shape), "dtype": str(value.dtype)}
        told["num_numbers"] = value.size if value.dtype.kind in "biuf" else 0
    elif is_trainer(value):
        told["text"] = f"step {value.step}"
    elif isinstance(value, torch.nn.Module):
        held = list(value.parameters())
        total = sum(one.numel() for one in held)
        told |= (_form_of_tensor(held[0]) if held else {}) | {"shape": f"{total:,} parameters"}
        told["num_numbers"] = total if all(map(_has_numbers, held)) else 0
    elif isinstance(value, _PLAIN):
        told["text"] = _text(value)
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        told["shape"] = f"len {len(value)}"
    if told.get("num_numbers", 0) > MAX_NUMBERS:
        told["num_numbers"] = 0
    return told


def _form_of_tensor(tensor: torch.Tensor) -> dict[str, str]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}


def _text(value: object) -> str:
    """A number, or the beginning of a text."""
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_TEXT]) + (" …" if len(value) > MAX_TEXT else "")
    if isinstance(value, int) and value.bit_length() > 4 * MAX_TEXT - 32:
        return f"{value.bit_length()} bits"
    return repr(value)


def _is_in_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others, as a DTensor does: to look at it may be a collective."""
    return hasattr(tensor, "__tensor_flatten__")


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a difference of two such tensors is easily told."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_plain and not tensor.is_complex() and not _is_in_parts(tensor)


def _weigh(value: Any) -> tuple[bool, str]:
    """Whether a value is large, and what else forbids to compare it."""
    left, seen, num_bytes, num_parts = [value], set[int](), 0, 0
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        num_parts += 1
        if is_trainer(part) and not (part.is_replicated and part.step):
            return False, _UNTRAINED if part.is_replicated else _IN_PARTS
        if isinstance(part, torch.Tensor) and _is_in_parts(part):
            return False, _IN_PARTS
        size, inner = _size_and_parts(part)
        num_bytes += size
        if num_bytes > MAX_BYTES or num_parts > MAX_PARTS:
            return True, ""
        left += inner
    return False, ""


def _size_and_parts(value: Any) -> tuple[int, list[Any]]:  # noqa: PLR0911 - one return for each kind
    """Bytes of a value itself, and what else belongs to it."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size(), []
    if isinstance(value, np.ndarray):
        return value.nbytes, []
    if isinstance(value, (*_PLAIN, types.ModuleType, types.FunctionType, type)):
        return sys.getsizeof(value), []
    if isinstance(value, torch.nn.Module):
        return 0, [*value.parameters(), *value.buffers()]
    if isinstance(value, torch.optim.Optimizer):
        return 0, list(value.state.values())
    if is_trainer(value):
        return 0, [getattr(value, "model", None), getattr(value, "optimizer", None)]
    if isinstance(value, (list, tuple, set, frozenset)):
        if len(value) > MAX_ITEMS:
            return MAX_BYTES + 1, []
        return sys.getsizeof(value), [part for part in value if not isinstance(part, _PLAIN)]
    if isinstance(value, dict):
        return sys.getsizeof(value), [part for pair in value.items() for part in pair]
    return sys.getsizeof(value), list(getattr(value, "__dict__", {}).values())


def _why_not_sent(name: str, value: Any) -> str:
    """Empty where a value can be sent.

    Tensors always can, and trainers by their state: what these hold is not looked at.
    """
    if isinstance(value, _PLAIN):
        return ""
    try:
        values.pack_one(name, value, _without_bytes)
    except TypeError as error:
        return str(error)
    return ""


def _without_bytes(value: Any) -> tuple[Any, ...] | None:
    return (bytes, ()) if isinstance(value, torch.Tensor) or is_trainer(value) else None


def _numbers(value: Any) -> NDArray[np.float64]:
    """What a tensor, an array or a module's parameters hold."""
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = list(value.parameters())
    arrays = [one.detach().to("cpu", torch.float64).flatten().numpy() for one in tensors]
    if isinstance(value, np.ndarray):
        arrays = [value.astype(np.float64).ravel()]
    return np.concatenate(arrays) if arrays else np.zeros(0)
