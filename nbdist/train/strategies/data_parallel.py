"""Data parallelism: every rank holds the whole model and takes a part of each batch.

Gradients are summed by torch's DistributedDataParallel, bucket by bucket while the backward pass
goes on: as they are, or by a codec that makes them smaller on their way. The module itself is
called and not the wrapper: its reducer is told of a backward pass when it begins, so a model may be
called in any way and as often as the user likes, and which pass exchanges gradients is decided
where it cannot be missed. Runs in the engine's main thread; a sum's end is stamped in any thread.
"""

# No `from __future__ import annotations`: DistributedDataParallel reads the hook's annotations.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine import emit, rebind
from nbdist.engine.local_sum import LOCAL_SUM
from nbdist.engine.native import PRESENT
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.checks import check_one_of, check_positive, check_share, check_whole
from nbdist.train.compression import Codec, Courier, LowRank, Quantise, Reduced, Sparse, take
from nbdist.train.randomness import seeded
from nbdist.train.strategies.base import Keeper, Place, Summed, Terms
from nbdist.train.strategies.buckets import Buckets, sum_bucket
from nbdist.train.strategies.whole import OfWhole
from nbdist.train.vote import join, split

DEFAULT_BUCKET_MB = 25
"""torch's own. With it, torch makes the first bucket smaller, so that sums begin early."""

Compression = Literal["fp16", "bf16", "int8", "topk", "powersgd"]

_CODECS: dict[str | None, Callable[["DataParallel"], Codec | None]] = {
    None: lambda _: None,
    "fp16": lambda _: Reduced(torch.float16),
    "bf16": lambda _: Reduced(torch.bfloat16),
    "int8": lambda _: Quantise(),
    "topk": lambda settings: Sparse(settings.topk_share),
    "powersgd": lambda settings: LowRank(settings.powersgd_rank),
}

_SENT: dict[str | None, Callable[["DataParallel"], str]] = {
    None: lambda _: "2(n−1)/n times their bytes",
    "fp16": lambda _: "(n−1)/n times their bytes, each number in 16 bits",
    "bf16": lambda _: "(n−1)/n times their bytes, each number in 16 bits",
    "int8": lambda _: "0.51(n−1)/n times their bytes, each number in 8 bits",
    "topk": lambda settings: (
        f"{1 / 32 + settings.topk_share / 2:.2f}(n−1) times their bytes, the largest "
        f"{settings.topk_share:.0%} of the numbers"
    ),
    "powersgd": lambda settings: (
        f"of an a × b matrix {settings.powersgd_rank}(a+b)/ab of 2(n−1)/n times its bytes"
    ),
}
"""In a step, by each rank."""


@dataclass(frozen=True)
class DataParallel:
    """Every rank holds the whole model; gradients are summed over all ranks."""

    is_replicated: ClassVar[bool] = True
    relief: ClassVar[str] = (
        "Every rank holds the whole model: strategy=Pipeline(stages) has each hold a part of it, "
        "strategy=Sharded() some rows of each parameter. "
        "Where it is the batch that is too large, accumulate=n goes through it in n parts"
    )

    bucket_mb: float = DEFAULT_BUCKET_MB
    """Gradients are summed in pieces of this size, in MiB."""
    compress: Compression | None = None
    """How gradients are made smaller on their way; None: not at all. "fp16", "bf16": half of the
    bytes. "int8": a quarter. "topk": only the largest. "powersgd": matrices as thin products. The
    last three leave a residual on each rank, which it sends later; a rank that joins begins with
    none, and that of a rank that is lost is lost with it. A gradient that is not finite is skipped.
    """
    topk_share: float = 0.2
    """With "topk": the share of the numbers that is sent, more than 0 and at most 1."""
    powersgd_rank: int = 8
    """With "powersgd": the columns of a product. More: nearer to the gradient, and more bytes."""
    shared_memory: bool = True
    """Whether gradients on the CPU are summed through shared memory where all ranks are on one host
    and nothing is compressed. It is faster at every size; False: gloo does it, as between hosts.
    """
    exact: bool = False
    """Whether sums are made in an order that does not depend on the number of ranks."""
    shards: int = 12
    """With `exact`: into how many parts a batch is cut."""
    find_unused: bool = False
    """Whether some parameters may have no part in a loss; costs a walk through the graph."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_positive("bucket_mb", self.bucket_mb)
        check_whole("shards", self.shards, 1)
        check_one_of("compress", self.compress, tuple(_CODECS))
        check_share("topk_share", self.topk_share)
        check_whole("powersgd_rank", self.powersgd_rank, 1)
        if self.exact:
            raise ValueError("exact is True; exact sums are not there yet: leave it at False")

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The whole model."""
        with seeded(terms.seed, torch.device("cpu")):
            return terms.make_module()

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> "Replicas":  # noqa: ARG002 - as for all strategies
        """The working half."""
        if self.compress is not None:
            _check_real(module)
        return Replicas(self, module, num_votes)

    def describe(self) -> str:
        """What it does and what it costs."""
        return (
            "Every rank holds the whole model and takes a part of each batch; each step sums the "
            f"gradients over the n ranks, in which each sends {_SENT[self.compress](self)}."
        )


class Replicas(OfWhole):
    """Sums gradients over the ranks, each of which holds a replica."""

    num_lost = 0
    has_optimizer = True

    def __init__(self, settings: DataParallel, module: nn.Module, num_votes: int) -> None:
        super().__init__(module)
        self.place = Place(0, 1)
        self._settings, self._num_votes = settings, num_votes
        self._ddp: DistributedDataParallel | None = None
        self._buckets = Buckets()
        codec = _CODECS[settings.compress](settings)
        self._courier = None if codec is None else Courier(codec)

    def twins(self, rank: int, world_size: int) -> Place:
        """All ranks hold the same."""
        return Place(rank, world_size)

    def begin(self, rank: int, world_size: int, generation: int) -> None:  # noqa: ARG002 - any will do
        """An attempt begins. The wrapper is made with the first that has company."""
        self.place = Place(rank, world_size)
        if self._courier is not None:
            self._courier.let_go()
            self._courier.codec.residual.begin()
        if world_size == 1:
            return
        if self._ddp is None:
            self._ddp = self._wrap()
        # In each group the reducer is another one.
        self._ddp.reducer._update_process_group(PRESENT)  # noqa: SLF001 - torch has no public name

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """Before the first step, all ranks take the weights of rank 0."""
        if keeper.step > 0 or self.place.num_places == 1:
            return False
        for tensor in [*self._module.parameters(), *self._module.buffers()]:
            take_from_first(tensor)
        return True

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add to the gradients; with the last, sum them over all ranks."""
        gradient = torch.full_like(loss, weight)
        if not is_last or self.place.num_places == 1:
            loss.backward(gradient)
            is_finite = not is_last or self._flush()
            return Summed(perf_counter_ns(), None if vote is None else list(vote), is_finite)
        assert self._ddp is not None
        carrier: _Carrier = self._ddp.module
        mine = torch.from_numpy(split(vote or [0.0] * self._num_votes))
        votes = carrier.votes.view(2, -1)  # no leaf, so that the reducer finds it in the graph
        _prepare(self._ddp.reducer, [loss, votes] if self._settings.find_unused else [])
        carrier.votes.grad = None
        self._buckets.begin(meanwhile, is_local=self._sums_locally())
        if self._courier is not None:
            self._courier.begin(carrier.votes, self.place, self._buckets.end)
        torch.autograd.backward([loss, votes], [gradient, mine.to(votes.device)])
        return self._summed(carrier, vote is not None)

    def _summed(self, carrier: "_Carrier", has_vote: bool) -> Summed:
        """What a backward pass has left."""
        ready_ns, votes = self._buckets.ready_ns, carrier.votes.grad
        if ready_ns is None or votes is None:
            raise RuntimeError(self._unused())
        is_finite = self._courier is None or self._courier.deliver()
        return Summed(ready_ns, join(votes.tolist()) if has_vote else None, is_finite)

    def _flush(self) -> bool:
        """Alone, there is nothing to compress: what was left out until now is added at last.

        Returns:
            whether the gradient is finite; as with company, that is asked where there is a codec.
        """
        if self._courier is None:
            return True
        parameters = list(self._module.parameters())
        self._courier.codec.residual.flush(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """What it has left out is to be sent later."""
        if self._courier is not None:
            self._courier.codec.residual.settle(is_applied=is_applied, factor=factor)

    def forget(self) -> None:
        """The parameters are others now."""
        if self._courier is not None:
            self._courier.codec.residual.forget()

    def restart(self) -> None:
        """Nor has a rank sent less than it should have."""
        self.forget()

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote over all ranks."""
        tensor = torch.tensor(vote, dtype=torch.float64)
        self.sum_(tensor)
        return tensor.tolist()

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self.place.num_places > 1:
            sum_on_backend(tensor)

    def sum_places_(self, tensor: Tensor) -> None:
        """All ranks hold the same."""
        self.sum_(tensor)

    def owned(self) -> list[object]:
        """The wrapper."""
        return [] if self._ddp is None else [self._ddp]

    def end(self) -> None:
        """Let go of the wrapper: where a step failed it waits for gradients that never come.

        Others may still refer to it, as an error's frames do.
        """
        if self._ddp is not None:
            rebind.retire(self._ddp)
        self._ddp = None
        if self._courier is not None:
            self._courier.let_go()

    def _wrap(self) -> DistributedDataParallel:
        """Nothing in here communicates: a newcomer does this when the others do not."""
        bucket_mb = self._settings.bucket_mb
        ddp = DistributedDataParallel(
            _Carrier(self._module, self._num_votes),
            init_sync=False,
            forward_sync_buffers=False,
            bucket_cap_mb=None if bucket_mb == DEFAULT_BUCKET_MB else bucket_mb,
            find_unused_parameters=self._settings.find_unused,
            gradient_as_bucket_view=True,
        )
        if self._courier is None:
            ddp.register_comm_hook(self._buckets, sum_bucket)
        else:
            ddp.register_comm_hook(self._courier, take)
        return ddp

    def _sums_locally(self) -> bool:
        """Whether buckets go through memory that all ranks share; all ranks ask."""
        settings = self._settings
        return settings.shared_memory and settings.compress is None and LOCAL_SUM.agree()

    def _unused(self) -> str:
        names = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        return (
            f"the loss does not depend on {len(names)} of the model's parameters: "
            f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}. Freeze them "
            "(requires_grad_(False)), use them, or give strategy=DataParallel(find_unused=True)"
        )


def _prepare(reducer: Any, outputs: list[Tensor]) -> None:
    """What the wrapper's own forward does.

    Apart, since the frame that goes backward must not hold the reducer: an error would keep it
    alive, and with it its hold on the parameters.
    """
    try:
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()  # noqa: SLF001 - torch has no public name for it
        reducer.prepare_for_backward(outputs)
    finally:
        del reducer  # an interrupt may come in here, too


class _Carrier(nn.Module):
    """The model, and what stands beside its parameters: its gradient is a rank's vote.

    So votes are summed together with gradients, in a bucket of theirs.
    """

    def __init__(self, module: nn.Module, num_votes: int) -> None:
        super().__init__()
        self.module = module
        device = next(module.parameters()).device
        self.votes = nn.Parameter(torch.zeros(2 * num_votes, device=device))


def _check_real(module: nn.Module) -> None:
    """torch's hook is given half of a complex gradient (2.13)."""
    names = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
    if names:
        raise ValueError(
            f"complex parameters cannot be compressed: {', '.join(names[:8])}; give compress=None"
        )


def take_from_first(tensor: Tensor) -> None:
    """All ranks have the value of rank 0."""
    dense = tensor.detach().contiguous()
    given_bytes = dense.nbytes if dist.get_rank() == 0 else 0
    with emit.exchange(Op.BROADCAST, Axis.ALL, dist.get_world_size(), given_bytes):
        WORKS.follow(dist.broadcast(dense, 0, async_op=True)).wait()
    tensor.copy_(dense)


def sum_on_backend(tensor: Tensor, group: Any = None, axis: Axis = Axis.ALL) -> None:
    """Sum over all ranks, or those of a group. NCCL sums on its own devices alone."""
    with emit.exchange(Op.ALL_REDUCE, axis, dist.get_world_size(group), tensor.nbytes):
        if "gloo" in str(dist.get_backend_config()):
            WORKS.follow(dist.all_reduce(tensor, group=group, async_op=True)).wait()
            return
        there = tensor.to(torch.device("cuda", torch.cuda.current_device()))
        dist.all_reduce(there, group=group)
        tensor.copy_(there)
