"""Copies of what ranks hold that nobody else holds, in the memory of others.

Every so many steps each rank keeps its own state, and sends it to another rank, which keeps it too:
the next one, or where the model lies in two directions the one opposite. Of each, the last two are
kept: a loss may come while the newest is on its way. When the ranks of a new group do not all stand
at the same step, or do not hold the parts that they should, all go back to the newest step of which
every state is somewhere. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.data_parallel import sum_on_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper

NUM_KEPT = 2
"""Steps of which copies are kept."""
_ROW = 4 + 5 * NUM_KEPT


class Spread(NamedTuple):
    """A step, and how the model lay on ranks then."""

    step: int
    num_ranks: int
    num_stages: int


class Kept(NamedTuple):
    """What one rank keeps of one spread."""

    spread: Spread
    rank: int
    """Whose place it had in it: it keeps this one's state."""
    left: int | None
    """And that of this one."""

    @property
    def ranks(self) -> set[int]:
        """All whose state it keeps."""
        return {self.rank} if self.left is None else {self.rank, self.left}


class Stand(NamedTuple):
    """Where a rank stands, and what it could give."""

    now: Spread
    rank: int
    """Whose part it holds."""
    kept: tuple[Kept, ...]

    @property
    def has(self) -> set[tuple[Spread, int]]:
        """The states that it keeps, and what it holds now."""
        kept = {(kept.spread, rank) for kept in self.kept for rank in kept.ranks}
        return kept | {(self.now, self.rank)} if self.now.step else kept


def are_together(stands: Sequence[Stand], parts: Sequence[int]) -> bool:
    """Whether all hold the parts that they should, of the same step.

    Args:
        stands: of all ranks of the group.
        parts: of each the part that it should hold.
    """
    now = stands[0].now
    places = [(stand.now, stand.rank) for stand in stands]
    return now.num_ranks == max(parts) + 1 and places == [(now, part) for part in parts]


def newest(stands: Sequence[Stand], num_parts: int) -> Spread | None:
    """That of the newest step of which every state is somewhere; None: there is none.

    Args:
        stands: of all ranks of the group.
        num_parts: parts of the model there; as many are wanted rather than others.
    """
    there = set[tuple[Spread, int]]().union(*(stand.has for stand in stands))
    whole = [
        spread
        for spread in {spread for spread, _ in there}
        if all((spread, rank) in there for rank in range(spread.num_ranks))
    ]
    return max(whole, key=lambda s: (s.step, s.num_ranks == num_parts, *s), default=None)


class Copies:
    """The copies that one rank keeps."""

    def __init__(self) -> None:
        self._kept: dict[Spread, tuple[int, bytes, int | None, bytes]] = {}
        """What the rank was in it, its own state, and that of which other rank."""

    def keep(self, now: Spread, rank: int, keeper: Keeper) -> None:
        """Keep the present state here alone."""
        self._keep(now, (rank, keeper.copy(), None, b""))

    def renew(
        self, now: Spread, rank: int, keeper: Keeper, beside: Sequence[int], stride: int
    ) -> None:
        """Keep the present state, here and at another rank; every rank of the group comes here.

        Args:
            now: where this rank stands.
            rank: whose part it holds.
            keeper: copies the state.
            beside: which ranks of the group hold the parts of the model, one after the other.
            stride: so many parts further it is kept too.
        """
        num = now.num_ranks
        if num == 1:  # it is its own neighbour, and its twins hold the same
            self.keep(now, rank, keeper)
            return
        data = keeper.copy()
        sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        sizes[beside[rank]] = len(data)
        sum_on_backend(sizes)
        left = (rank - stride) % num
        before, behind = beside[left], beside[(rank + stride) % num]
        received = torch.empty(int(sizes[before]), dtype=torch.uint8)
        _move({behind: _as_tensor(data)}, {before: received})
        self._keep(now, (rank, data, left, received.numpy().tobytes()))

    def gather(self, now: Spread, its_rank: int, rank: int, num_ranks: int) -> list[Stand]:
        """Where every rank of the present group stands.

        Args:
            now: where this one does.
            its_rank: whose part it holds.
            rank: which it is.
            num_ranks: of the present group.
        """
        table = torch.zeros(num_ranks, _ROW, dtype=torch.int64)
        row = [*now, its_rank]
        for spread, (own, _, left, _) in self._kept.items():
            row += [*spread, own, -1 if left is None else left]
        table[rank, : len(row)] = torch.tensor(row)
        if num_ranks > 1:
            sum_on_backend(table)
        return [_read(row) for row in table.tolist()]

    def fetch(
        self,
        stands: Sequence[Stand],
        spread: Spread,
        rank: int,
        keeper: Keeper,
        *,
        wanted: Sequence[int] | None,
    ) -> Iterator[bytes]:
        """The states of a spread that this rank needs, one after the other.

        Every rank goes through it to its end, and changes nothing before.

        Args:
            stands: of all ranks.
            spread: that `newest` has named.
            rank: which this one is.
            keeper: what it holds now.
            wanted: of each rank the number of the state that it needs; None: all need all.
        """
        for number in range(spread.num_ranks):
            lacking = [at for at, stand in enumerate(stands) if (spread, number) not in stand.has]
            needing = [at for at in range(len(stands)) if wanted is None or wanted[at] == number]
            receivers = [at for at in needing if at in lacking]
            giver = next(at for at in range(len(stands)) if at not in lacking)
            is_asked = rank in needing or (receivers and rank == giver)
            data = b""
            if is_asked and rank not in lacking:
                data = self._of(spread, number) or keeper.copy()
            if receivers:
                data = pass_on(data, giver, receivers, rank)
            if rank in needing:
                yield data

    def drop_after(self, step: int) -> None:
        """What was trained since then is not to be gone back to."""
        self._kept = {spread: kept for spread, kept in self._kept.items() if spread.step <= step}

    @property
    def is_empty(self) -> bool:
        """Whether there are none; the same on all ranks once they have settled in a group."""
        return not self._kept

    def has(self, now: Spread) -> bool:
        """Whether copies were made of it."""
        return now in self._kept

    def _of(self, spread: Spread, number: int) -> bytes | None:
        """A copy that was made; None: of what is held now there may be none."""
        own, data, left, its_data = self._kept.get(spread, (-1, b"", None, b""))
        if number == own:
            return data
        return its_data if number == left else None

    def _keep(self, now: Spread, kept: tuple[int, bytes, int | None, bytes]) -> None:
        self._kept.pop(now, None)
        self._kept[now] = kept
        for old in list(self._kept)[:-NUM_KEPT]:
            del self._kept[old]


def _read(row: Sequence[int]) -> Stand:
    kept = []
    for start in range(4, _ROW, 5):
        spread = Spread(*row[start : start + 3])
        if spread.num_ranks:
            left = row[start + 4]
            kept.append(Kept(spread, row[start + 3], None if left < 0 else left))
    return Stand(Spread(*row[:3]), row[3], tuple(kept))


def pass_on(data: bytes, giver: int, receivers: Sequence[int], rank: int) -> bytes:
    """One rank's bytes, on those that are to have them too."""
    size = torch.tensor([len(data) if rank == giver else 0])
    sum_on_backend(size)
    if rank == giver:
        _move(dict.fromkeys(receivers, _as_tensor(data)), {})
    elif rank in receivers:
        received = torch.empty(int(size), dtype=torch.uint8)
        _move({}, {giver: received})
        return received.numpy().tobytes()
    return data


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _move(sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
    """Send to some ranks and receive from others, all at once."""
    num_bytes = sum(tensor.nbytes for tensor in sent.values())
    with emit.exchange(Op.SEND, Axis.COPIES, 2, num_bytes):
        works = [dist.isend(tensor, rank) for rank, tensor in sent.items()]
        works += [dist.irecv(tensor, rank) for rank, tensor in received.items()]
        WORKS.wait(works)
