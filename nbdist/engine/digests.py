"""Digests of values: equal for equal values on every engine, whatever process holds them.

A plain pickle is not enough: torch puts a storage's address into it, cloudpickle gives a class that
a cell made a random name, and a set has another order in each process. What is replicated by nature
(modules, optimizers, tensors, trainers) is told by its state, byte for byte.
"""

from __future__ import annotations

import hashlib
import io
import types
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.port import is_trainer

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(value: Any) -> str:
    """Kind and digest of a value, such as "tensor:9f86d0…".

    Empty where the value has no digest.
    """
    walk = _Walk()
    try:
        digest = walk.digest(value).hex()
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is pickled; then it has no digest
        return ""
    return f"{walk.kind(value)}:{digest}"


def parameters_digest(parameters: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the bytes of tensors, in order: equal strings mean bitwise equal parameters."""
    digest = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().cpu().contiguous().view(-1)
        digest.update(f"{parameter.dtype}{tuple(parameter.shape)}".encode())
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Walk:
    """One walk through a value. What contains itself is noted as such, and not entered again."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def kind(self, value: Any) -> str:
        """What a value is: digests of different kinds are never equal."""
        if is_trainer(value):
            return "trainer"
        for name, classes in _KINDS:
            if isinstance(value, classes):
                return name
        return type(value).__name__

    def digest(self, value: Any) -> bytes:
        """Of fixed length, so that digests of members can be strung together."""
        if id(value) in self._open:
            return b"itself".ljust(32)
        self._open.add(id(value))
        digest = hashlib.sha256(self.kind(value).encode())
        for part in self._parts(value):
            digest.update(part)
        self._open.discard(id(value))
        return digest.digest()

    def _parts(self, value: Any) -> list[bytes]:  # noqa: PLR0911 - one return for each kind
        if is_trainer(value):
            # Before the first step its weights are nobody's: rank 0 gives its own then.
            if not value.is_replicated:
                return [b"each rank's own"]  # nobody is to be given another's
            return [value.digest().encode() if value.step else b"untrained"]
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, torch.nn.Module):
            # Replicas have equal parameters; their buffers may differ, as running means do.
            return _state(dict(value.named_parameters()) or value.state_dict())
        if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            return _state(value.state_dict())
        if isinstance(value, types.ModuleType):
            return [value.__name__.encode()]
        if isinstance(value, types.FunctionType):
            return [*_code(value.__code__), self.digest(value.__defaults__)]
        if isinstance(value, type):
            return self._class(value)
        return self._data(value)

    def _data(self, value: Any) -> list[bytes]:
        """What a plain value, a container or any other object holds."""
        if _is_plain(value):
            return [repr(value).encode()]
        if isinstance(value, list | tuple):
            return [self.digest(item) for item in value]
        if isinstance(value, dict):
            return [self.digest(side) for item in value.items() for side in item]
        if isinstance(value, set | frozenset):
            return sorted(self.digest(item) for item in value)
        if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
            return [self.digest(type(value)), self.digest(vars(value))]
        return [self._pickle(value)]

    def _class(self, cls: type) -> list[bytes]:
        """A class by its name, and where a cell made it by what it holds."""
        parts = [f"{cls.__module__}.{cls.__qualname__}".encode()]
        if cls.__module__ == "__main__":
            for name, member in sorted(vars(cls).items()):
                if not name.startswith("__") or isinstance(member, types.FunctionType):
                    parts += [name.encode(), self.digest(member)]
        return parts

    def _pickle(self, value: Any) -> bytes:
        """A pickle in which tensors and what cells made are their digests; never unpickled."""
        file = io.BytesIO()
        _Pickler(self, file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    def __init__(self, walk: _Walk, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._walk = walk

    def reducer_override(self, value: Any) -> Any:
        """As pickle asks for each object: how to write it."""
        cls = value if isinstance(value, type) else type(value)
        is_ours = isinstance(value, torch.Tensor) or is_trainer(value)
        if is_ours or cls.__module__ == "__main__":
            return bytes, (self._walk.digest(value),)
        return super().reducer_override(value)


_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("tensor", torch.Tensor),
    ("ddp", DistributedDataParallel),
    ("module", torch.nn.Module),
    ("optimizer", (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)),
    ("import", types.ModuleType),
    ("function", types.FunctionType),
    ("class", type),
)


def _is_plain(value: Any) -> bool:
    """Told by its repr; a list too, since a corpus of tokens must be done in one go."""
    if isinstance(value, list | tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


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
