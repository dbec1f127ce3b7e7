"""A trainer's whole state as bytes, its digest, and loading it in place.

The bytes are a pickled head, in which tensors are only named, and the tensors' memory. They are
loaded only where they are known to come from another engine. Runs in the engine's main thread.
"""

from __future__ import annotations

import copy
import hashlib
import io
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.serialization import config

from nbdist.engine.digests import fingerprint
from nbdist.protocol import values
from nbdist.train.parting import gathering, names_by_group, origins_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from nbdist.train.state import State

ALIGN_BYTES = 64
"""Where a tensor may begin."""
COUNTERS = ("step", "num_skipped", "unit")
"""Of `State`."""
_HEAD = struct.Struct("<Q")
"""Length of the head, first of all."""


class _Place(NamedTuple):
    """Stands in the head for a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def whole(state: State) -> dict[str, Any]:
    """Everything that a replica must share; the tensors are the live ones."""
    return {
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "parameters": dict(state.module.named_parameters()),
        "buffers": dict(state.module.named_buffers()),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict() if state.scheduler is not None else None,
        "registered": {name: obj.state_dict() for name, obj in state.registered.items()},
    }


def check(state: State) -> None:
    """See that the state can be handed over, before it has to be.

    Raises:
        TypeError: a part cannot; the message names it.
    """
    parts: dict[str, Any] = {
        f"what register({name!r}, …) was given": obj for name, obj in state.registered.items()
    }
    parts |= {"the optimizer": state.optimizer, "the scheduler": state.scheduler}
    for what, obj in parts.items():
        try:
            values.pack(without_tensors(obj.state_dict() if obj is not None else None))
        except Exception as error:
            raise TypeError(
                f"{what} cannot be handed over to a rank that joins: its state_dict() cannot be "
                f"taken and packed: {type(error).__name__}: {error}"
            ) from error


def without_tensors(value: Any) -> Any:
    """The same nested value with None for each tensor: tensors can be packed and read again."""
    return _map(value, torch.Tensor, _no)


def _no(_tensor: torch.Tensor) -> None:
    """In place of a tensor: tensors can be packed."""


def pack(state: State) -> bytes:
    """The whole state as bytes."""
    parts: list[memoryview] = []
    size = 0

    def note(tensor: torch.Tensor) -> _Place:
        nonlocal size
        data = memoryview(_raw(tensor))
        place = _Place(tensor.dtype, tuple(tensor.shape), size, data.nbytes)
        padding = -data.nbytes % ALIGN_BYTES
        parts.extend((data, memoryview(bytes(padding))))
        size += data.nbytes + padding
        return place

    head = values.pack(_map(whole(state), torch.Tensor, note))
    start = _HEAD.size + len(head)
    return b"".join((_HEAD.pack(len(head)), head, bytes(-start % ALIGN_BYTES), *parts))


def unpack(state: State, data: bytes) -> None:
    """Load a packed state.

    Parameters and buffers stay the objects that they are, so whatever points at them still does.

    Raises:
        ValueError: it is the state of another model, or has other parts.
    """
    (length,) = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    start += -start % ALIGN_BYTES
    memory = bytearray(memoryview(data)[start:])  # its tensors may be written to

    def view(place: _Place) -> torch.Tensor:
        if place.num_bytes == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        num = place.num_bytes // place.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=place.dtype, count=num, offset=place.start)
        return flat.view(place.shape)

    load(state, _map(values.unpack(data[_HEAD.size : _HEAD.size + length]), _Place, view))


class Whole:
    """A state as an exchange keeps copies of it, here and in the memory of another rank."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._state.step

    def copy(self) -> bytes:
        """The whole state, as torch writes it to files, but for check sums: it stays in memory."""
        state, file = self._state, io.BytesIO()
        groups = names_by_group(state.module, state.optimizer)
        offsets = {name: list(its.offsets) for name, its in origins_of(state.module).items()}
        with config.patch({"save.compute_crc32": False}):  # they take longer than the rest
            torch.save({**whole(state), "groups": groups, "offsets": offsets}, file)
        return file.getvalue()

    def take_back(self, data: bytes) -> None:
        """Load such a copy, which may have come over the group: nothing in it is run."""
        load(self._state, _read(data))

    def follow(self, data: bytes) -> None:
        """Have committed the steps that a copy's rank has; parameters and their moments stay."""
        theirs, own = _read(data), whole(self._state)
        groups = theirs["optimizer"]["param_groups"]  # a scheduler has set their rates
        optimizer = {"state": own["optimizer"]["state"], "param_groups": groups}
        taken = {name: theirs[name] for name in ("counters", "buffers", "scheduler")}
        load(self._state, {**own, **taken, "optimizer": optimizer})

    def move(self, module: nn.Module, copies: Iterable[bytes]) -> None:
        """Hold another part of the model, whose state is in the copies of all ranks.

        Args:
            module: the part; optimizer and scheduler are made anew for it.
            copies: none: everything is as it was made. Gone through before anything is changed.
        """
        gathered = gathering(module)
        for data in copies:
            gathered.add(_read(data))
        state = self._state
        state.equip(module)
        if gathered:
            groups = names_by_group(module, state.optimizer)
            load(state, gathered.state(groups, state.optimizer.state_dict()))


def _read(data: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return loaded


def load(state: State, loaded: dict[str, Any], *, is_other: bool = False) -> None:
    """Have the parts of a state, as `whole` gives them.

    Args:
        state: what they are loaded into.
        loaded: the parts.
        is_other: they are none that the ranks of this training have come to: all ranks load them.

    Raises:
        ValueError: it is the state of another model, or has other parts.
    """
    here = whole(state)
    _check_parts(here, loaded)
    with torch.no_grad():
        for part in ("parameters", "buffers"):
            for name, tensor in here[part].items():
                tensor.copy_(loaded[part][name])
    state.optimizer.load_state_dict(_own(loaded["optimizer"]))
    if state.scheduler is not None:
        state.scheduler.load_state_dict(loaded["scheduler"])
    for name, obj in state.registered.items():
        obj.load_state_dict(_own(loaded["registered"][name]))
    if is_other:
        state.exchange.restart()
    else:
        _tell_exchange(state, loaded["counters"])
    for name, value in loaded["counters"].items():
        setattr(state, name, value)
    state.attempt, state.committed_at, state.evaluated = 0, None, None
    state.clear_gradients()
    state.buffers.keep_all()


def _tell_exchange(state: State, counters: dict[str, Any]) -> None:
    """Tell the exchange what a loaded state makes of the steps that it has taken part in.

    One step more: the others have committed what this rank had only sent. They cannot have done so
    without all of it.
    """
    if counters["step"] == state.step + 1:
        is_applied = counters["num_skipped"] == state.num_skipped
        state.exchange.commit(is_applied=is_applied, factor=state.unit / counters["unit"])
    elif counters["step"] != state.step:
        state.exchange.forget()


def digest(state: State) -> str:
    """Of the whole state: equal for equal states, in every process."""
    sha = hashlib.sha256()
    _digest("", whole(state), sha)
    return sha.hexdigest()


def parameter_digest(state: State) -> str:
    """Of the parameters alone."""
    sha = hashlib.sha256()
    _digest("", dict(state.module.named_parameters()), sha)
    return sha.hexdigest()


def _check_parts(here: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Raise ValueError where a loaded state has other parts than this trainer."""
    for part in ("parameters", "buffers", "registered"):
        differing = sorted(set(here[part]) ^ set(loaded[part]))
        if differing:
            raise ValueError(
                f"the state has other {part} than this trainer: {', '.join(differing[:8])} "
                "stand in one of them only. Was the trainer made by the same code on all ranks?"
            )
    for part in ("parameters", "buffers"):
        for name, tensor in here[part].items():
            if tensor.shape != loaded[part][name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(loaded[part][name].shape)} in the state and "
                    f"{tuple(tensor.shape)} in this trainer. Was it made by the same code on all "
                    "ranks?"
                )
    if (here["scheduler"] is None) != (loaded["scheduler"] is None):
        raise ValueError("one of state and trainer has a scheduler, the other has none")


def _map(value: Any, kind: type, change: Any) -> Any:
    """The same nested value with everything of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: _map(item, kind, change) for key, item in value.items()}
    if isinstance(value, dict):  # of a class of its own, which may carry more
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = _map(item, kind, change)
        return new
    if type(value) in (list, tuple):
        return type(value)(_map(item, kind, change) for item in value)
    return value


def _own(value: Any) -> Any:
    """The same with tensors that own their memory: who loads them may keep them."""
    return _map(value, torch.Tensor, torch.Tensor.clone)


def _raw(tensor: torch.Tensor) -> Any:
    """A tensor's memory, as numpy."""
    plain = tensor.detach().cpu().contiguous().flatten()
    return plain.view(torch.uint8).numpy() if plain.numel() else b""


def _digest(name: str, value: Any, sha: Any) -> None:
    """Add a nested value, in an order of its own."""
    if isinstance(value, torch.Tensor):
        sha.update(f"{name}:{value.dtype}{tuple(value.shape)}".encode())
        sha.update(_raw(value))
    elif isinstance(value, Mapping):
        sha.update(f"{name}:{len(value)} items".encode())
        for key in sorted(value, key=repr):
            _digest(f"{name}.{key!r}", value[key], sha)
    elif isinstance(value, (list, tuple)):
        sha.update(f"{name}:{len(value)} items".encode())
        for place, item in enumerate(value):
            _digest(f"{name}.{place}", item, sha)
    else:
        sha.update(f"{name}:{fingerprint(value)}".encode())
