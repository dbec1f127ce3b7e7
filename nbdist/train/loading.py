"""From indices to batches: in the engine's main thread, or ahead of time in worker processes.

Workers are torch's DataLoader's. They are told which samples from step and share alone; where a
step is repeated or the world has changed they are ended, what they had fetched is thrown away, and
others begin.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from nbdist.train.randomness import seed_all, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

PR_SET_PDEATHSIG = 1
"""prctl(2)."""


@dataclass(frozen=True, eq=False)
class Part:
    """What is fetched as one batch: one piece of a rank's share of a step."""

    step: int
    first: int
    """Place of its first sample in the step's batch."""
    indices: NDArray[np.int64]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, bytes]:
        return self.step, self.first, self.indices.tobytes()


def check_data(data: Any, name: str = "data") -> Any:
    """A map-style data set, from one or from a callable that returns one.

    Raises:
        TypeError: it is something else; the message says why that cannot be trained on.
    """
    if not hasattr(data, "__getitem__") or isinstance(data, type):
        if callable(data):
            data = data()
        elif not hasattr(data, "__iter__"):
            raise TypeError(
                f"{name} is a {type(data).__name__}; it must be map-style (len(data) and data[i]), "
                "or a callable that returns such a data set"
            )
    if isinstance(data, tuple) and data and all(isinstance(part, torch.Tensor) for part in data):
        raise TypeError(
            f"{name} is a tuple of {len(data)} tensors, which would be {len(data)} samples; use "
            "torch.utils.data.TensorDataset(*tensors)"
        )
    is_iterable = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if is_iterable or not hasattr(data, "__len__"):
        raise TypeError(
            f"{name} is a {type(data).__name__}, which cannot be indexed: which samples a step "
            "trains on follows from seed and step alone, so that none is lost or repeated when "
            "ranks come and go, and an iterable set can only be read from its start. Give a "
            "map-style set (len(data) and data[i])"
        )
    return data


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors there."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class Loader:
    """Fetches batches.

    Args:
        data: map-style.
        collate: from a list of samples to a batch; torch's default where None.
        num_workers: processes that fetch ahead; 0: in place.
        seed: of the random numbers that workers draw.
    """

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        self._fetcher = _Fetcher(data, collate, seed)
        self._num_workers = num_workers
        self._ahead: Iterator[tuple[Part, Any]] | None = None
        self._prepared: tuple[Part, Any] | None = None

    def batches(
        self, step: int, parts_of: Callable[[int], Sequence[Part]]
    ) -> Iterator[tuple[Part, Any]]:
        """The batches of a step, in order, each with what it was made of.

        Args:
            step: which.
            parts_of: what this rank fetches for a step, and for those that follow.
        """
        parts = parts_of(step)
        if self._num_workers == 0:
            for part in parts:
                yield part, self._take_prepared(part) or self._fetcher.fetch(part)
            return
        for part in parts:
            yield part, self._next(part, parts_of)

    def sample(self) -> Any:
        """A batch of the first sample, to see what batches are like."""
        return self._fetcher.fetch(Part(0, 0, np.zeros(1, np.int64)))

    def prepare(self, part: Part) -> None:
        """Fetch this one now, if nobody can tell: where it is cut out of tensors, in place."""
        if self._num_workers == 0 and self._fetcher.is_tensors:
            self._prepared = part, self._fetcher.fetch(part)

    def forget(self) -> None:
        """End the workers; what has been fetched is thrown away."""
        self._ahead = self._prepared = None

    def _take_prepared(self, part: Part) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared is not None and prepared[0] is part else None

    def _next(self, part: Part, parts_of: Callable[[int], Sequence[Part]]) -> Any:
        if self._ahead is None:
            self._ahead = self._start(part, parts_of)
        fetched, batch = next(self._ahead)
        if fetched != part:
            self._ahead = self._start(part, parts_of)
            _, batch = next(self._ahead)
        return batch

    def _start(
        self, part: Part, parts_of: Callable[[int], Sequence[Part]]
    ) -> Iterator[tuple[Part, Any]]:
        self._ahead = None  # the workers before end first
        loader: DataLoader[Any] = DataLoader(
            self._fetcher,  # type: ignore[arg-type]  # it has what is needed
            batch_sampler=_parts_from(part, parts_of),
            collate_fn=_only,
            num_workers=self._num_workers,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # it draws a seed, which a step's numbers must not miss
        )
        return iter(loader)


class _Fetcher:
    """Fetches and collates; what DataLoader takes for its data set."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._data, self._seed = data, seed
        self._collate = collate or default_collate
        self.is_tensors = type(data) is TensorDataset and self._collate is default_collate

    def fetch(self, part: Part) -> Any:
        """The batch of a part."""
        if self.is_tensors:  # the same as sample by sample, at a fraction of the time
            indices = torch.from_numpy(part.indices)
            return [tensor[indices] for tensor in self._data.tensors]
        indices = part.indices.tolist()
        if hasattr(self._data, "__getitems__"):
            return self._collate(self._data.__getitems__(indices))
        return self._collate([self._data[i] for i in indices])

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: Part) -> tuple[Part, Any]:
        """As a worker is asked."""
        seed_all(seed_of(self._seed, part.step, part.first), torch.device("cpu"))
        return part, self.fetch(part)


def _parts_from(part: Part, parts_of: Callable[[int], Sequence[Part]]) -> Iterator[list[Part]]:
    """This part and all that follow, one a batch."""
    step = part.step
    ahead = list(parts_of(step))
    for following in ahead[ahead.index(part) :]:
        yield [following]
    while True:
        step += 1
        for following in parts_of(step):
            yield [following]


def _only(fetched: list[Any]) -> Any:
    return fetched[0]


def _begin_worker(_number: int) -> None:
    """A worker ends with the engine at once; DataLoader's own watch takes seconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
