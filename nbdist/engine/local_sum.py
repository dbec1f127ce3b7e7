"""Sums over the ranks of one host through memory that they share; the same bits on all of them.

Each rank adds up its share of a tensor, in the order of ranks, and all others copy it. A tensor of
any size goes through in pieces that stay in the caches: while one is added, the next is given and
the one before is taken. Who has to wait looks again and again, with naps in between, and after a
moment waits for a promise of `works`, so that a cut frees it and a look from outside finds it
waiting, as in gloo. Runs in the main thread.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from nbdist.engine.arena import Arena
from nbdist.engine.works import WORKS

if TYPE_CHECKING:
    from torch import Tensor

    from nbdist.protocol.topology import Membership

PIECE_BYTES = 2**19
"""What goes through at a time."""
NUM_LOOKS, NUM_LOOKS_CROWDED = 100, 20
"""So often a rank looks for the others without a pause: some 70 µs, or, where ranks have to share
cores, next to none. More helps on an idle machine, and costs a peer its core on a busy one."""
NAP_S = 20e-6
"""Its pause from then on. Giving way with sched_yield instead hands the core to strangers for
milliseconds; a nap is short for who was away."""
LOOK_S = 0.02
"""So long it looks for them itself, before it waits for a promise."""
_PATIENT_S = 1e-3
"""So often the promise's thread looks."""
_DEAD_PERIOD_S = 0.02
"""So often a wait looks whether the others live."""
_GIVEN, _DONE = range(2)
"""Marks: the piece that a rank has given, and the one of which it has added up its share."""
_TYPES = (torch.float32, torch.float64)

log = logging.getLogger(__name__)


class LocalSum:
    """Sums of the present generation, where its ranks share memory."""

    def __init__(self) -> None:
        self._generation = 0
        self._rank = 0
        self._pids: tuple[int, ...] = ()
        self._arena: Arena | None = None
        self._is_agreed: bool | None = None
        """Whether all ranks have met; None: nobody has asked yet."""
        self._number = 0
        """Of the last piece that went through."""
        self._is_open = False
        """A sum was begun and has not come to its end: where it failed, the ranks are apart."""

    def begin(self, membership: Membership, rank: int) -> None:
        """A group is formed."""
        self.end()
        here = socket.gethostname()
        is_local = all(member.host == here for member in membership.members)
        self._generation, self._rank = membership.generation, rank
        self._pids = tuple(member.pid for member in membership.members) if is_local else ()

    def end(self) -> None:
        """It is left."""
        if self._arena is not None:
            self._arena.close()
        self._arena, self._is_agreed, self._pids = None, None, ()
        self._number, self._is_open = 0, False

    def agree(self) -> bool:
        """Whether sums can go this way. All ranks ask, and get the same answer.

        The first time they meet, over gloo.
        """
        if self._is_agreed is None:
            self._is_agreed = len(self._pids) > 1 and self._meet()
        return self._is_agreed

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is of the kind that is summed here."""
        is_ours = tensor.device.type == "cpu" and tensor.dtype in _TYPES
        return is_ours and tensor.is_contiguous()

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place; they have agreed.

        Raises:
            DistNetworkError: a rank has ended, or the group was cut, now or in a sum before.
        """
        if self._arena is None or self._is_open:
            raise dist.DistNetworkError("the ranks of this group have parted in a sum")
        flat = tensor.detach().view(-1).numpy()
        if not len(flat):
            return
        self._is_open = True
        self._sum(self._arena, flat)
        self._is_open = False

    def _meet(self) -> bool:
        """Make this rank's part, and map those of the others, if all can."""
        name, reason = f"nbdist-sum-{self._generation}", ""
        arena = None
        try:
            arena = Arena(name, self._rank, 4 * PIECE_BYTES)
        except OSError as error:
            reason = str(error)
        is_met = self._all(arena is not None)
        if is_met and arena is not None:
            try:
                arena.meet(self._pids)
            except OSError as error:
                reason = str(error)
            is_met = self._all(not reason)
        if is_met:
            self._arena = arena
        else:
            if arena is not None:
                arena.close()
            log.warning(
                "gradients are summed over gloo: memory cannot be shared (%s)",
                reason or "another rank says why in its log",
            )
        return is_met

    @staticmethod
    def _all(is_so: bool) -> bool:
        """Whether it is so on all ranks."""
        flag = torch.tensor([int(is_so)])
        WORKS.follow(dist.all_reduce(flag, op=dist.ReduceOp.MIN, async_op=True)).wait()
        return bool(flag.item())

    def _sum(self, arena: Arena, flat: Any) -> None:
        desk = _Desk(arena, flat.dtype)
        size = PIECE_BYTES // flat.itemsize
        pieces = [flat[start : start + size] for start in range(0, len(flat), size)]
        first = self._number + 1
        last = self._number = self._number + len(pieces)
        desk.give(first, pieces[0])
        for number, piece in enumerate(pieces, first):
            if number > first:
                _wait(arena, _DONE, number - 1)
            if number < last:
                desk.give(number + 1, pieces[number + 1 - first])
            if number > first:
                desk.take(number - 1, pieces[number - 1 - first])
            _wait(arena, _GIVEN, number)
            desk.add(number, piece)
        _wait(arena, _DONE, last)
        desk.take(last, pieces[-1])


class _Desk:
    """Where pieces lie on their way. There are two of each place, used in turn.

    A rank gives piece k when all have added k - 2, and adds k when all have taken k - 2: both it
    knows from the marks for which it has waited.
    """

    def __init__(self, arena: Arena, dtype: np.dtype[Any]) -> None:
        self._arena, self._rank, self._num = arena, arena.rank, arena.num_ranks
        places = [arena.views(i * PIECE_BYTES, PIECE_BYTES, dtype) for i in range(4)]
        self._given, self._added = places[:2], places[2:]

    def give(self, number: int, piece: Any) -> None:
        """Lay down what the others add."""
        there = self._given[number % 2][self._rank]
        low, high = self._share(piece, self._rank)
        np.copyto(there[:low], piece[:low])
        np.copyto(there[high : len(piece)], piece[high:])
        self._arena.mark(_GIVEN, number)

    def add(self, number: int, piece: Any) -> None:
        """Add up this rank's share of what all have given."""
        low, high = self._share(piece, self._rank)
        given, total = self._given[number % 2], self._added[number % 2][self._rank][: high - low]
        parts = [
            piece[low:high] if rank == self._rank else given[rank][low:high]
            for rank in range(self._num)
        ]
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)
        np.copyto(piece[low:high], total)
        self._arena.mark(_DONE, number)

    def take(self, number: int, piece: Any) -> None:
        """Copy what the others have added up."""
        for rank, added in enumerate(self._added[number % 2]):
            if rank != self._rank:
                low, high = self._share(piece, rank)
                np.copyto(piece[low:high], added[: high - low])

    def _share(self, piece: Any, rank: int) -> tuple[int, int]:
        return len(piece) * rank // self._num, len(piece) * (rank + 1) // self._num


def _wait(arena: Arena, kind: int, number: int) -> None:
    """Until all ranks have come so far.

    Raises:
        DistNetworkError: one has ended, or the group was cut.
    """
    deadline = time.monotonic() + LOOK_S
    num_looks, enough = 0, NUM_LOOKS_CROWDED if arena.is_crowded else NUM_LOOKS
    while not arena.have_come(kind, number):
        num_looks += 1
        if num_looks > enough:
            if WORKS.is_cut or time.monotonic() > deadline:
                _wait_long(arena, kind, number)
                return
            time.sleep(NAP_S)


def _wait_long(arena: Arena, kind: int, number: int) -> None:
    """The same, as whoever looks from outside knows a wait, and a cut ends it."""
    promise = WORKS.expect()

    def look() -> None:
        look_for_dead = time.monotonic()
        while not promise.done():
            now = time.monotonic()
            if arena.have_come(kind, number):
                WORKS.keep(promise)
            elif now > look_for_dead and (rank := arena.ended()) is not None:
                WORKS.fail(promise, dist.DistNetworkError(f"rank {rank} has ended in a sum"))
            else:
                look_for_dead = max(look_for_dead, now + _DEAD_PERIOD_S)
                time.sleep(_PATIENT_S)

    threading.Thread(target=look, name="nbdist-local-sum", daemon=True).start()
    promise.wait()


LOCAL_SUM = LocalSum()
"""Of this process."""
