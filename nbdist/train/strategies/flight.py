"""An outer step under way: what ranks that train apart have to say, and the mean of it.

Runs in the engine's main thread; a sum's end is stamped in whichever of torch's threads it comes.
"""

from __future__ import annotations

import contextlib
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Flight:
    """An outer step that has begun.

    Args:
        said: what this rank had to say then.
        count: what that counts.

    Attributes:
        count: likewise.
    """

    def __init__(self, said: Sequence[Tensor], count: float) -> None:
        self._said, self.count = list(said), count
        self._sums: list[tuple[_Sum, list[int]]] | None = None
        """What will be the sum of some, and which they are; None: nothing is on its way in this
        group."""

    @property
    def is_sent(self) -> bool:
        """It is on its way in this group."""
        return self._sums is not None

    def own(self) -> dict[str, Any]:
        """What it can be made of again."""
        return {"said": self._said, "count": self.count}

    def let_go(self) -> None:
        """Nothing is on its way any more; what was said is kept, to be said again."""
        self._sums = None

    def send(self, sum_: Callable[[Tensor], None], wire: torch.dtype | None, ident: int) -> None:
        """Say it, weighted by what it counts; ranks that have trained on nothing say nothing.

        Args:
            sum_: sums a tensor over all ranks.
            wire: in which numbers travel; None: as they are.
            ident: of the sums, in telemetry.
        """
        count = torch.tensor([self.count, 1.0], dtype=torch.float64)
        sum_(count)
        total, num_ranks = count.tolist()
        weight = self.count / total if total else 1 / num_ranks
        self._sums = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._said):
            places = [at for at, tensor in enumerate(self._said) if tensor.dtype == dtype]
            flat = torch.cat([self._said[at].flatten() for at in places]).mul_(weight)
            is_halved = wire is not None and flat.is_floating_point()
            sent = flat.to(wire) if is_halved else flat
            is_alone = num_ranks == 1
            self._sums.append((_Sum(sent) if is_alone else _summed(sent, ident), places))

    def received(self) -> list[Tensor]:
        """The means of what all have said, in the order of parameters."""
        means = list(self._said)
        for summed, places in self._sums or ():
            flat, start = summed.wait(), 0
            for at in places:
                said = self._said[at]
                means[at] = flat[start : start + said.numel()].view(said.shape).to(said.dtype)
                start += said.numel()
        return means


class _Sum(NamedTuple):
    """What will be a sum over all ranks."""

    tensor: Tensor
    stamp: Any = None
    """Of its end; None: no others are needed."""
    end: Any = None

    def wait(self) -> Tensor:
        """Have it, or the error in its place."""
        if self.stamp is not None:
            self.stamp.wait()
            self.end.wait()
        return self.tensor


def _summed(tensor: Tensor, ident: int) -> _Sum:
    """Begin to sum a tensor in place."""
    began_ns = perf_counter_ns()
    emit.span(Kind.BUCKET_READY, began_ns, began_ns, ident=ident)
    work = dist.all_reduce(tensor, async_op=True)
    launched_ns, num_ranks = perf_counter_ns(), dist.get_world_size()
    emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=ident)

    def stamp(future: torch.futures.Future[list[Tensor]]) -> None:
        with contextlib.suppress(Exception):  # whatever it is, who waits is told
            future.value()
            emit.bucket_done(Op.ALL_REDUCE, num_ranks, launched_ns, ident, tensor.nbytes)

    end = WORKS.follow(work)
    return _Sum(tensor, end.then(stamp), end)
