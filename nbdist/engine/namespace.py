"""The user's names on this engine: told apart by digests, packed for a newcomer, taken over by one.

Runs in the main thread. What is replicated by nature (modules, optimizers, tensors) is compared by
its state, byte for byte; other values by their pickle. A newcomer's own modules and optimizers,
made by the replay, are loaded rather than replaced, so that an optimizer goes on to hold the
parameters of the very model beside it.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.protocol import values

OURS = frozenset(
    ("torch", "dist", "rank", "world_size", "local_rank", "slot", "device", "generation")
)
"""Names that nbdist itself binds."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def user_names(user_ns: Mapping[str, Any], hidden: Iterable[str]) -> list[str]:
    """Names that the user made: not IPython's, not ours, not private."""
    ignored = OURS | set(hidden) | {"In", "Out", "exit", "quit", "get_ipython", "open"}
    return sorted(n for n in user_ns if not n.startswith("_") and n not in ignored)


def fingerprint(value: Any) -> str:
    """Kind and digest of a value, the same for equal values on every engine.

    Empty where the value has no digest.
    """
    try:
        kind, parts = _parts(value)
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is pickled; then it has no digest
        return ""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"{kind}:{digest.hexdigest()}"


def pack_names(user_ns: Mapping[str, Any], names: Iterable[str]) -> tuple[bytes, dict[str, str]]:
    """One bundle of names -> packed value or state, and what cannot be packed, with the reason."""
    bundle: dict[str, tuple[str, bytes]] = {}
    failed: dict[str, str] = {}
    for name in names:
        value = user_ns.get(name)
        try:
            if _has_state(value):
                bundle[name] = ("state", values.pack((value.state_dict(), _rebuild(value))))
            else:
                bundle[name] = ("value", values.pack(value))
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            failed[name] = f"cannot be sent: {type(error).__name__}: {error}"
    return values.pack(bundle), failed


def take_names(user_ns: dict[str, Any], data: bytes, names: Iterable[str]) -> dict[str, str]:
    """Bind or load what a donor packed; returns what failed, with the reason."""
    bundle: dict[str, tuple[str, bytes]] = values.unpack(data)
    failed: dict[str, str] = {}
    for name in names:
        if name not in bundle:
            continue
        kind, packed = bundle[name]
        try:
            if kind == "value":
                user_ns[name] = values.unpack(packed)
            else:
                state, rebuilt = values.unpack(packed)
                if _has_state(user_ns.get(name)):
                    user_ns[name].load_state_dict(state)
                elif rebuilt is not None:
                    user_ns[name] = rebuilt
                else:
                    failed[name] = (
                        "missing, and only its state could be sent: run the cell that makes it"
                    )
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            failed[name] = f"could not be taken over: {type(error).__name__}: {error}"
    return failed


def to_cpu(value: Any) -> Any:
    """Tensors on the CPU, cut loose from their graph, also inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(to_cpu(v) for v in value)
    if type(value) is dict:
        return {k: to_cpu(v) for k, v in value.items()}
    return value


def _has_state(value: Any) -> TypeGuard[torch.nn.Module]:
    return isinstance(
        value,
        (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    )


def _rebuild(value: Any) -> Any:
    """The object itself, where a newcomer that lacks it can be given it whole, else None.

    An optimizer would lose its model.
    """
    is_whole = isinstance(value, torch.nn.Module) and not isinstance(value, DistributedDataParallel)
    return value if is_whole else None


def _parts(value: Any) -> tuple[str, list[bytes]]:  # noqa: PLR0911 - one return for each kind
    if isinstance(value, torch.Tensor):
        return "tensor", _tensor(value)
    if isinstance(value, torch.nn.Module):
        # Replicas have equal parameters; their buffers may differ, as running means do.
        kind = "ddp" if isinstance(value, DistributedDataParallel) else "module"
        return kind, _state(dict(value.named_parameters()) or value.state_dict())
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return "optimizer", _state(value.state_dict())
    if isinstance(value, types.ModuleType):
        return "import", [value.__name__.encode()]
    if isinstance(value, types.FunctionType):
        return "function", _code(value.__code__)
    if isinstance(value, type):
        return "class", _class(value)
    return type(value).__name__, _data(value)


def _data(value: Any) -> list[bytes]:
    """What a plain value, a container or any other object holds."""
    if isinstance(value, _PLAIN):
        return [repr(value).encode()]
    if isinstance(value, list | tuple):
        if all(isinstance(item, _PLAIN) for item in value):  # a corpus of tokens: in one go
            return [repr(value).encode()]
        return [part for item in value for part in _nested(item)]
    if isinstance(value, dict):
        return [part for k, v in value.items() for part in (*_nested(k), *_nested(v))]
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        return [*_class(type(value)), *_nested(vars(value))]
    return [values.pack(to_cpu(value))]


def _nested(value: Any) -> list[bytes]:
    """A value inside another one: its kind and parts."""
    kind, parts = _parts(value)
    return [kind.encode(), *parts]


def _class(cls: type) -> list[bytes]:
    """A class by its name, and where a cell made it by what it holds."""
    parts = [f"{cls.__module__}.{cls.__qualname__}".encode()]
    if cls.__module__ == "__main__":
        for name, member in sorted(vars(cls).items()):
            if not name.startswith("__") or isinstance(member, types.FunctionType):
                parts += [name.encode(), *_nested(member)]
    return parts


def _state(state: Any, key: str = "") -> list[bytes]:
    """A nested state, flattened in order."""
    if isinstance(state, torch.Tensor):
        return [key.encode(), *_tensor(state)]
    if isinstance(state, Mapping):
        return [part for k, v in state.items() for part in _state(v, f"{key}.{k}")]
    if isinstance(state, (list, tuple)):
        return [part for i, v in enumerate(state) for part in _state(v, f"{key}.{i}")]
    return [f"{key}={state!r}".encode()]


def _tensor(tensor: torch.Tensor) -> list[bytes]:
    plain = tensor.detach().cpu().contiguous().flatten()
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [f"{tensor.dtype}{tuple(tensor.shape)}".encode(), data]


def _code(code: types.CodeType) -> list[bytes]:
    parts = [code.co_code, repr(code.co_names).encode()]
    for constant in code.co_consts:
        parts += (
            _code(constant) if isinstance(constant, types.CodeType) else [repr(constant).encode()]
        )
    return parts
