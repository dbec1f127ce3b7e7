"""Gradients of ranks that hold the same part of a model, and have seen different samples.

They are summed bucket by bucket, as replicas' are, once a step's last batch has gone backward: what
goes backward in pieces has its gradients complete only then. Runs in the engine's main thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn
    from torch.futures import Future

    from nbdist.train.strategies.axes import Axes

BUCKET_BYTES = 25 << 20
"""As large as replicas' are."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], axes: Axes) -> None:
    """Sum gradients over the twins; each has the same parameters, in the same order."""
    ready_ns = perf_counter_ns()
    trained = [p for p in parameters if p.requires_grad]
    has = torch.tensor([float(p.grad is not None) for p in trained])
    axes.sum_twins_(has)  # a parameter that one's samples do not need may be needed by another's
    gradients = []
    for parameter, num in zip(trained, has.tolist(), strict=True):
        if num and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    on_their_way: list[tuple[list[Tensor], Tensor, int, Future[list[Tensor]]]] = []
    for index, bucket in enumerate(buckets(gradients, BUCKET_BYTES)):
        flat: Tensor = _flatten_dense_tensors(bucket)
        launched_ns = perf_counter_ns()
        emit.span(Kind.BUCKET_READY, ready_ns, ready_ns, ident=index)
        emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=index)
        on_their_way.append((bucket, flat, launched_ns, axes.begin_sum(flat)))
    for index, (bucket, flat, launched_ns, future) in enumerate(on_their_way):
        future.wait()
        emit.bucket_done(Op.ALL_REDUCE, axes.num_twins, launched_ns, index, flat.nbytes)
        for gradient, its in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(its)


def buckets(tensors: Iterable[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one type that are about so large together, in their order."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        is_full = sum(t.nbytes for t in bucket) + tensor.nbytes > num_bytes
        if bucket and (is_full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
