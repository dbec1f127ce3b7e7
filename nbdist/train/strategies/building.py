"""Making a model of which only a part is wanted, without memory for the rest.

The function that makes it is called twice: on torch's meta device, to learn which of the tensors
that it makes are wanted, and once more for real. There the memory of every other parameter is given
back after each operation that has written to it. So each random number is drawn in its turn, and
what is wanted has the values that it has in the whole model, though that is never there at once.
Runs in the engine's main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

_WRITTEN_DOWN = torch.ops.aten.lift_fresh.default
"""What `torch.tensor(…)` does for real, and not without memory: its places would be others."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As malloc.h has them."""
_SPARED_FROM_BYTES = 128 << 10
_KEPT_UP_TO_BYTES = 32 << 20
"""glibc's own most."""


def outline(make: Callable[[], nn.Module]) -> tuple[nn.Module, Outline] | None:
    """The model without memory, and where its tensors come from; None where that cannot be."""
    made = Outline()
    try:
        with torch.device("meta"), made:
            module = make()
    except (NotImplementedError, RuntimeError) as error:
        warnings.warn(
            "the model is made whole on every rank before all but its own stages is let go: it "
            f"cannot be made without memory first: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return None
    if not all(tensor.is_meta for tensor in _state(module)):
        return None  # it brings tensors of its own, which cost what they cost
    made.note(module)
    return module, made


def build(make: Callable[[], nn.Module], made: Outline, wanted: Iterable[Tensor]) -> nn.Module:
    """The model for real, of which only the wanted tensors have memory.

    Args:
        make: as it made the outline.
        made: what it was seen to do then.
        wanted: tensors of the outline.

    Raises:
        ValueError: a wanted tensor is computed from one that is not.
    """
    keep = {place for tensor in wanted if (place := made.place(tensor)) is not None}
    with _given_back(), _Sparing(made.lasting - keep, keep):
        return make()


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    """Within, what is freed goes back to the system at once.

    glibc keeps blocks of this size for the next ones, in which torch's, being aligned, do not fit:
    so they would add up to the whole model. Afterwards it keeps them up to the size to which it
    would have come by itself.
    """
    keep_freed(_SPARED_FROM_BYTES)
    try:
        yield
    finally:
        keep_freed(_KEPT_UP_TO_BYTES)


def keep_freed(up_to_bytes: int) -> None:
    """Blocks of memory that are larger go back to the system when they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # it is glibc
        mallopt(_M_MMAP_THRESHOLD, up_to_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2 * up_to_bytes)


class _Watched(TorchDispatchMode):
    """Numbers the memory of the tensors that are made, in the order in which they are."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        self._held: list[Any] = []
        """All of it, so that an address stands for one."""

    def place(self, tensor: Tensor) -> int | None:
        """The number of the memory that a tensor is in; None: of one that was written down."""
        return self._places.get(_key(tensor.untyped_storage()))

    def _number(self, storages: list[Any]) -> None:
        for storage in storages:
            if _key(storage) not in self._places:
                self._places[_key(storage)] = len(self._held)
                self._held.append(storage)


class Outline(_Watched):
    """What was seen of a model that was made without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lasting: set[int] = set()
        """Numbers of its parameters and buffers."""

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not _WRITTEN_DOWN:
            self._number(_storages(result))
        return result

    def note(self, module: nn.Module) -> None:
        """This is what was made."""
        places = (self.place(tensor) for tensor in _state(module))
        self.lasting = {place for place in places if place is not None}


class _Sparing(_Watched):
    """Gives back memory that has been written to and is not wanted."""

    def __init__(self, spared: Collection[int], kept: Collection[int]) -> None:
        super().__init__()
        self._spared, self._kept = spared, kept
        self._sizes: dict[int, int] = {}
        """Of what was given back."""
        self._empty_words: set[int] = set()
        """What was computed from it."""

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is _WRITTEN_DOWN:
            return function(*args, **(kwargs or {}))
        before = {_key(s): s for s in _storages((args, kwargs))}
        for key in before.keys() & self._sizes.keys():
            before[key].resize_(self._sizes[key])
        result = function(*args, **(kwargs or {}))
        after = {_key(s): s for s in _storages(result)}
        self._number(list(after.values()))
        if (before.keys() - after.keys()) & (self._sizes.keys() | self._empty_words):
            self._empty_words |= after.keys()
            self._check(after)
        for key, storage in (before | after).items():
            if self._places.get(key) in self._spared and storage.nbytes():
                self._sizes[key] = storage.nbytes()
                storage.resize_(0)
        return result

    def _check(self, written: Iterable[int]) -> None:
        if any(self._places[key] in self._kept for key in written):
            raise ValueError(
                "model() computes a parameter of one stage from a parameter of another, which "
                "this rank does not hold; give the model as a Module, made beforehand"
            )


def _key(storage: Any) -> int:
    key: int = storage._cdata  # noqa: SLF001 - torch's only name for which memory it is
    return key


def _storages(value: Any) -> list[Any]:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors]


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
