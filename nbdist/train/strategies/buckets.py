"""The sums of a backward pass's buckets, over gloo or through memory that the ranks share.

torch's DistributedDataParallel calls the hook whenever a bucket's gradients are there, in the order
of the buckets, which is the same on all ranks. Runs in the engine's main thread; the end of a sum
over gloo is stamped in any.
"""

# No `from __future__ import annotations`: DistributedDataParallel reads the hook's annotations.

from collections.abc import Callable
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine import emit
from nbdist.engine.local_sum import LOCAL_SUM
from nbdist.engine.works import WORKS
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Op


class Buckets:
    """How far the sums of one backward pass are."""

    def __init__(self) -> None:
        self.ready_ns: int | None = None
        """When all gradients of the last bucket were there."""
        self.meanwhile: Callable[[], None] | None = None
        """To be called while it is on its way."""
        self.is_local = False
        """Whether they go through memory that all ranks share."""

    def begin(self, meanwhile: Callable[[], None] | None, *, is_local: bool) -> None:
        """A backward pass begins."""
        self.ready_ns, self.meanwhile, self.is_local = None, meanwhile, is_local

    def end(self, ready_ns: int) -> None:
        """The last bucket was there, and is on its way."""
        self.ready_ns = ready_ns
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None


def sum_bucket(
    state: Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook: sums, where torch's own would average; losses are scaled beforehand."""
    ready_ns = perf_counter_ns()
    emit.span(Kind.BUCKET_READY, ready_ns, ready_ns, ident=bucket.index())
    is_local = state.is_local and LOCAL_SUM.takes(bucket.buffer())
    summed = _sum_here(bucket) if is_local else _sum_on_gloo(bucket)
    if bucket.is_last():
        state.end(ready_ns)
    return summed


def _sum_here(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """At once: who adds up needs the core itself."""
    buffer, launched_ns = bucket.buffer(), perf_counter_ns()
    emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=bucket.index())
    LOCAL_SUM.sum_(buffer)
    num_ranks, index = dist.get_world_size(), bucket.index()
    emit.bucket_done(Op.ALL_REDUCE, num_ranks, launched_ns, index, buffer.nbytes)
    summed: torch.futures.Future[Tensor] = torch.futures.Future()
    summed.set_result(buffer)
    return summed


def _sum_on_gloo(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    index, buffer = bucket.index(), bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    launched_ns, num_ranks = perf_counter_ns(), dist.get_world_size()
    emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=index)

    def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = future.value()[0]
        emit.bucket_done(Op.ALL_REDUCE, num_ranks, launched_ns, index, buffer.nbytes)
        return summed

    return WORKS.follow(work).then(done)
