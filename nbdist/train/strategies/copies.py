"""Copies of what ranks hold that nobody else holds, in the memory of their right neighbours.

Every so many steps each rank keeps its own state, and sends it to the next rank, which keeps it
too. Of each, the last two are kept: a loss may come while the newest is on its way. When the ranks
of a new group do not all stand at the same step, all go back to the newest step of which every
state is somewhere. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine import runs
from nbdist.engine.works import WORKS
from nbdist.train.strategies.data_parallel import sum_on_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper

NUM_KEPT = 2
"""Steps of which copies are kept."""
_NONE = -1


class Stand(NamedTuple):
    """Where a rank stands, and what it could give."""

    step: int
    own: tuple[int, ...]
    """Steps of which it has its own state."""
    left: tuple[int, ...]
    """Steps of which it has the state of the rank before it."""


def common_step(stands: Sequence[Stand]) -> int | None:
    """The newest step of which every rank's state is somewhere; None: there is none."""
    steps = {step for stand in stands for step in (*stand.own, *stand.left)}
    num = len(stands)
    there = [
        step
        for step in steps
        if all(
            step in stand.own or step in stands[(rank + 1) % num].left
            for rank, stand in enumerate(stands)
        )
    ]
    return max(there, default=None)


class Copies:
    """The copies that one rank keeps."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num = rank, num_ranks
        self._own: dict[int, bytes] = {}
        self._left: dict[int, bytes] = {}

    def gather(self, step: int) -> list[Stand]:
        """Where every rank stands."""
        table = torch.full((self._num, 1 + 2 * NUM_KEPT), 0, dtype=torch.int64)
        own, left = _padded(self._own), _padded(self._left)
        table[self._rank] = torch.tensor([step, *own, *left]) - _NONE
        sum_on_backend(table)
        rows = (table + _NONE).tolist()
        return [
            Stand(row[0], _steps(row[1 : 1 + NUM_KEPT]), _steps(row[1 + NUM_KEPT :]))
            for row in rows
        ]

    def renew(self, keeper: Keeper) -> None:
        """Keep the present state, here and at the neighbour."""
        data = keeper.copy()
        sizes = torch.zeros(self._num, dtype=torch.int64)
        sizes[self._rank] = len(data)
        sum_on_backend(sizes)
        before, behind = (self._rank - 1) % self._num, (self._rank + 1) % self._num
        received = torch.empty(int(sizes[before]), dtype=torch.uint8)
        _move({behind: _as_tensor(data)}, {before: received})
        self._keep(self._own, keeper.step, data)
        self._keep(self._left, keeper.step, received.numpy().tobytes())

    def go_back(self, stands: Sequence[Stand], step: int, keeper: Keeper) -> None:
        """All ranks have the state of a step again, which `common_step` has named."""
        before, behind = (self._rank - 1) % self._num, (self._rank + 1) % self._num
        sizes = torch.zeros(self._num, dtype=torch.int64)
        gives = step not in stands[before].own
        if gives:
            sizes[before] = len(self._left[step])
        sum_on_backend(sizes)
        sent = {before: _as_tensor(self._left[step])} if gives else {}
        received = torch.empty(int(sizes[self._rank]), dtype=torch.uint8)
        lacks = step not in stands[self._rank].own
        _move(sent, {behind: received} if lacks else {})
        keeper.take_back(received.numpy().tobytes() if lacks else self._own[step])
        self._own = {at: data for at, data in self._own.items() if at <= step}
        self._left = {at: data for at, data in self._left.items() if at <= step}

    @property
    def num_kept(self) -> int:
        """Steps of which there are copies; the same on all ranks between two losses."""
        return len(self._own)

    def has(self, step: int) -> bool:
        """Whether copies of a step were made."""
        return step in self._own

    @staticmethod
    def _keep(kept: dict[int, bytes], step: int, data: bytes) -> None:
        kept[step] = data
        for old in sorted(kept)[:-NUM_KEPT]:
            del kept[old]


def _padded(kept: dict[int, bytes]) -> list[int]:
    return [*sorted(kept), *[_NONE] * (NUM_KEPT - len(kept))]


def _steps(padded: list[int]) -> tuple[int, ...]:
    return tuple(step for step in padded if step != _NONE)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _move(sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
    """Send to some ranks and receive from others, all at once."""
    works = [dist.isend(tensor, rank) for rank, tensor in sent.items()]
    works += [dist.irecv(tensor, rank) for rank, tensor in received.items()]
    WORKS.wait(works, runs.is_cut)
