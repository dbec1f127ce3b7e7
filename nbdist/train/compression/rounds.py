"""The collectives that a codec may use, each as a generator.

One yields what to wait for, and returns what came of it, so that a codec reads from top to bottom
and whoever goes through it says when to wait. Runs in the engine's main thread; the end of a
collective is stamped in whichever of torch's threads it comes.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor
    from torch.futures import Future

    Wait = Future[list[Tensor]]


class Rounds:
    """Those of one rank, for one tensor.

    Attributes:
        rank: this one.
        num_ranks: in the group.
        payload_bytes: handed to collectives so far, for others.
        done_ns: when the latest of them ended.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.payload_bytes = self.done_ns = 0

    def all_reduce(self, *tensors: Tensor) -> Generator[Wait, None, None]:
        """Sum tensors in place. On the wire: 2(n-1)/n of their bytes from each rank."""
        given = [tensor for tensor in tensors if len(tensor)]
        works = [(dist.all_reduce(tensor, async_op=True), tensor.nbytes) for tensor in given]
        waits = [self._follow(work, Op.ALL_REDUCE, num_bytes) for work, num_bytes in works]
        self.payload_bytes += sum(tensor.nbytes for tensor in tensors)
        yield from waits

    def all_gather(self, block: Tensor) -> Generator[Wait, None, Tensor]:
        """Every rank's block, a row each. On the wire: n-1 times a block from each rank."""
        rows = block.new_empty((self.num_ranks, len(block)))
        work = dist.all_gather_single(rows.view(-1), block, async_op=True)
        wait = self._follow(work, Op.ALL_GATHER, block.nbytes)
        self.payload_bytes += block.nbytes
        yield wait
        return rows

    def all_to_all(self, blocks: Tensor) -> Generator[Wait, None, Tensor]:
        """A row for each rank; every rank's row for this one. On the wire: all rows but one."""
        rows = torch.empty_like(blocks)
        work = dist.all_to_all_single(rows, blocks, async_op=True)
        wait = self._follow(work, Op.ALL_TO_ALL, blocks.nbytes)
        self.payload_bytes += blocks.nbytes // self.num_ranks * (self.num_ranks - 1)
        yield wait
        return rows

    def _follow(self, work: Any, op: Op, num_bytes: int) -> Wait:
        """What a collective will give; when it is there, its end is stamped."""
        began_ns, promise = perf_counter_ns(), WORKS.follow(work)

        def stamp(ended: Wait) -> list[Tensor]:
            self.done_ns = perf_counter_ns()
            emit.exchanged(op, Axis.DATA, self.num_ranks, num_bytes, began_ns)
            return ended.value()

        return promise.then(stamp)
