"""What a strategy will cost, before anything is trained: memory of each rank, bytes, idle time.

Nothing is measured: models are made without memory, and counted. Runs in any process that has
torch; does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nbdist.train.checks import check_whole, shown
from nbdist.train.compression.quantise import sent_bytes
from nbdist.train.needs import Estimate, Need
from nbdist.train.strategies import actions, schedules, splitting
from nbdist.train.strategies.axes import Axes, Portion
from nbdist.train.strategies.copies import NUM_KEPT
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.diloco import DiLoCo
from nbdist.train.strategies.divided import without_memory
from nbdist.train.strategies.local_sgd import LocalSGD
from nbdist.train.strategies.mesh import Mesh
from nbdist.train.strategies.outer import cut
from nbdist.train.strategies.parameter_server import ParameterServer
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.roles import Roles
from nbdist.train.strategies.sharded import Sharded
from nbdist.train.strategies.slices import bundles_of, check_rows
from nbdist.train.strategies.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from nbdist.train.strategies import Strategy

    Make = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    strategy: Strategy | None = None,
    devices: int = 1,
    *,
    optimizer: Make | None = None,
    global_batch: int | None = None,
    accumulate: int = 1,
    sample: Any = None,
) -> Estimate:
    """What each of so many ranks needs for a model, and sends in a step.

    Memory is that of parameters, gradients and the optimizer's state (with AdamW in float32 4, 4
    and 8 bytes for each number), exactly; `DataParallel` has all of it on each rank, `Sharded` one
    part in n, `Pipeline` that of its stages, `TensorParallel` one part in n of what is cut. What is
    sent is in `strategy.describe()`: 2(n-1)/n times the gradients' bytes, 3(n-1)/n times the
    parameters' bytes for each batch, what passes between stages, 2(n-1)/n times what passes between
    layers that are cut, 2(n-1)/n times the parameters' bytes every `period` steps, or the model's
    bytes to a parameter server and back.

    Args:
        model: a Module, or a function that returns one, which is called without memory.
        strategy: as for a trainer; None: `DataParallel()`.
        devices: ranks.
        optimizer: as for a trainer; None: AdamW.
        global_batch: samples a step; wanted for what a pipeline, or `TensorParallel`, sends.
        accumulate: batches in which a rank goes through its share.
        sample: the input of a batch of one sample; wanted by a pipeline that is cut by itself, and
            for what it or `TensorParallel` sends.
    """
    check_whole("devices", devices, 1)
    check_whole("accumulate", accumulate, 1)
    strategy = strategy or DataParallel()
    counted = next((c for kind, c in _COUNTED.items() if isinstance(strategy, kind)), None)
    if counted is None:
        raise TypeError(
            f"strategy is {shown(strategy)}; what it costs is known of "
            f"{', '.join(kind.__name__ for kind in _COUNTED)}"
        )
    if isinstance(model, nn.Module):
        bare = model
    else:
        with torch.device("meta"):
            bare = model()
    asked = _Asked(bare, devices, optimizer or _adamw, global_batch, accumulate, sample)
    return counted(strategy, asked)


class _Asked(NamedTuple):
    """What is to be counted."""

    model: nn.Module
    num_ranks: int
    make_optimizer: Make
    global_batch: int | None
    accumulate: int
    sample: Any

    def need(self, shapes: Mapping[str, tuple[Tensor, tuple[int, ...]]], **more: Any) -> Need:
        """Of parameters of these shapes: name -> the whole, and the shape of a rank's part."""
        parts = {
            name: nn.Parameter(
                torch.empty(shape, dtype=whole.dtype, device="meta"),
                requires_grad=whole.requires_grad,
            )
            for name, (whole, shape) in shapes.items()
        }
        kept = sum(part.nbytes for part in parts.values())
        trained = sum(part.nbytes for part in parts.values() if part.requires_grad)
        return Need(kept, trained, _state_bytes(self.make_optimizer(parts.items())), **more)


def _adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.AdamW(named)


def _state_bytes(optimizer: Optimizer) -> int:
    """What it keeps after a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


# ---- strategies


def _of_replicas(strategy: DataParallel, asked: _Asked) -> Estimate:
    """Everything everywhere; gradients are summed once in a step, 2(n-1)/n of their bytes."""
    trained = [p for p in asked.model.parameters() if p.requires_grad]
    sent = _SENT[strategy.compress](strategy, asked.num_ranks, trained)
    whole = {name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()}
    return Estimate(strategy, (asked.need(whole, sent=round(sent)),) * asked.num_ranks)


def _in_ring(num_ranks: int) -> float:
    """The part of a sum's bytes that each rank sends once, of n pieces all but its own."""
    return (num_ranks - 1) / num_ranks


def _num_bytes(trained: Sequence[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in trained)


def _thin(settings: DataParallel, trained: Sequence[Tensor]) -> int:
    """Bytes of the products that stand for matrices, and of the rest as it is."""
    total = 0
    for parameter in trained:
        rows = parameter.shape[0] if parameter.dim() > 1 else parameter.numel()
        columns = parameter.numel() // max(1, rows)
        as_product = settings.powersgd_rank * (rows + columns)
        total += parameter.itemsize * min(parameter.numel(), as_product)
    return total


_SENT: dict[str | None, Callable[[DataParallel, int, Sequence[Tensor]], float]] = {
    None: lambda _, n, trained: 2 * _in_ring(n) * _num_bytes(trained),
    "fp16": lambda _, n, trained: _in_ring(n) * _num_bytes(trained),
    "bf16": lambda _, n, trained: _in_ring(n) * _num_bytes(trained),
    "int8": lambda _, n, trained: 65 / 128 * _in_ring(n) * _num_bytes(trained),
    "topk": lambda s, n, trained: (1 / 32 + s.topk_share / 2) * (n - 1) * _num_bytes(trained),
    "powersgd": lambda s, n, trained: 2 * _in_ring(n) * _thin(s, trained),
}
"""As `DataParallel.describe` says it."""


def _of_shards(strategy: Sharded, asked: _Asked) -> Estimate:
    """One part in n of each parameter, by rows; what is in no block, and a block, whole for a time.

    Two gathers and one sum for each batch, in which rows are filled up to as many on each rank:
    3(n-1)/n of these bytes.
    """
    n, parameters = asked.num_ranks, dict(asked.model.named_parameters())
    if n == 1:
        whole = {name: (p, tuple(p.shape)) for name, p in parameters.items()}
        return Estimate(strategy, (asked.need(whole, sent=0),))
    check_rows(parameters)
    bundles = bundles_of(asked.model, strategy.blocks_of(asked.model))
    padded = {
        name: Portion(0, n).num_padded(len(p)) * (p.nbytes // max(1, len(p)))
        for name, p in parameters.items()
    }
    sizes = [sum(padded[name] for name in bundle.names) for bundle in bundles]
    trained = sum(padded[name] for name, p in parameters.items() if p.requires_grad)
    sent = asked.accumulate * (2 * sum(sizes) + trained) * (n - 1) // n
    gathered = 2 * (sizes[-1] + max(sizes[:-1], default=0))
    needs = []
    for rank in range(n):
        rows = {name: Portion(rank, n).rows(len(p)) for name, p in parameters.items()}
        mine = {
            name: (p, (rows[name].stop - rows[name].start, *p.shape[1:]))
            for name, p in parameters.items()
        }
        needs.append(asked.need(mine, sent=sent, gathered=gathered))
    return Estimate(strategy, _with_copies(needs, strategy.copy_every))


def _with_copies(needs: list[Need], copy_every: int) -> tuple[Need, ...]:
    """Of each of the last steps that were copied, a rank's own state and that of the one before."""
    if not copy_every or len(needs) == 1:
        return tuple(needs)
    sizes = [need.parameters + need.optimizer for need in needs]
    return tuple(
        need._replace(copies=NUM_KEPT * (sizes[rank] + sizes[rank - 1]))
        for rank, need in enumerate(needs)
    )


def _of_apart(strategy: LocalSGD | DiLoCo, asked: _Asked) -> Estimate:
    """Everything everywhere, and what is shared; parameters are summed once in a period."""
    trained = [p for p in asked.model.parameters() if p.requires_grad]
    n, compress = asked.num_ranks, strategy.compress if isinstance(strategy, DiLoCo) else None
    if isinstance(strategy, DiLoCo) and compress == "int8":
        fragments = cut(asked.model, strategy.fragments, None)
        sizes = [sum(p.numel() for p in fragment.parameters) for fragment in fragments]
        sent = float(sum(sent_bytes(size, n) for size in sizes))
    else:
        num_bytes = sum(p.numel() * (2 if compress else p.itemsize) for p in trained)
        sent = 2 * _in_ring(n) * num_bytes
    kept = 2 if isinstance(strategy, DiLoCo) and strategy.momentum else 1
    need = asked.need(
        {name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()},
        copies=kept * _num_bytes(trained),
        sent=round(sent / strategy.period),
    )
    return Estimate(strategy, (need,) * n)


def _of_server(strategy: ParameterServer, asked: _Asked) -> Estimate:
    """The whole model everywhere, the optimizer's state at the server and its replica.

    An update is a worker's batch, or in synchronous mode parts of it from all. For each push the
    server sends the model to its worker; to the replica an update.
    """
    roles = Roles.of(asked.num_ranks, strategy.server, has_replica=strategy.replica)
    num_bytes = _num_bytes([*asked.model.parameters(), *asked.model.buffers()])
    num_workers = len(roles.workers)
    num_pushes = num_workers if strategy.mode == "sync" else min(1, num_workers)
    whole = asked.need({name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()})
    sent = round(num_bytes * num_pushes / max(1, num_workers))
    needs = [whole._replace(optimizer=0, sent=sent)] * asked.num_ranks
    num_replicas = 0 if roles.replica is None else 1
    needs[roles.server] = whole._replace(sent=num_bytes * (num_pushes + num_replicas))
    if roles.replica is not None:
        needs[roles.replica] = whole._replace(sent=0)
    return Estimate(strategy, tuple(needs))


def _of_stages(strategy: Pipeline, asked: _Asked) -> Estimate:
    """Each rank its stages; between two ranks each micro-batch once forward, a gradient back."""
    n, num_stages = asked.num_ranks, strategy.stages
    blocks = splitting.blocks_of(asked.model, strategy.split)
    counts = splitting.counts_of(blocks, num_stages, strategy.split, lambda: _wanted(asked.sample))
    stages = splitting.cut(blocks, counts)
    samples = (asked.global_batch or 0) // asked.accumulate
    num_pieces = strategy.microbatches or schedules.default_microbatches(num_stages, samples)
    idle: float | None
    if isinstance(strategy.schedule, str):
        owners = schedules.owners(strategy.schedule, num_stages, n)
        idle = schedules.named(strategy.schedule).idle_share(n, num_stages // n, num_pieces)
    else:
        parsed = actions.parse(strategy.schedule)
        owners = actions.check(parsed, num_stages, num_pieces)
        idle = actions.idle_share(parsed, num_stages)
    sent = _between(stages, owners, asked)
    names = {id(p): name for name, p in asked.model.named_parameters()}
    needs = []
    for rank in range(n):
        mine = {
            names[id(p)]: (p, tuple(p.shape))
            for stage, owner in zip(stages, owners, strict=True)
            if owner == rank
            for p in stage.parameters()
        }
        needs.append(asked.need(mine, sent=None if sent is None else sent[rank]))
    return Estimate(strategy, _with_copies(needs, strategy.copy_every), idle)


def _wanted(sample: Any) -> Any:
    if sample is None:
        raise ValueError(
            "a pipeline that is cut by itself is cut by what its blocks cost: give sample=, the "
            "input of a batch of one sample"
        )
    return sample


def _between(stages: Sequence[nn.Module], owners: Sequence[int], asked: _Asked) -> list[int] | None:
    """Bytes that each rank sends to others in a step; None where there is no input to tell."""
    if asked.sample is None or asked.global_batch is None:
        return None
    value = splitting.without_memory(asked.sample)
    sent = [0] * asked.num_ranks
    for stage, owner, behind in zip(stages[:-1], owners, owners[1:], strict=False):
        with torch.no_grad(), torch.device("meta"):
            value = splitting.bare(stage)(value)
        if owner != behind:
            num_bytes = asked.global_batch * sum(t.nbytes for t in _tensors(value))
            sent[owner] += num_bytes
            sent[behind] += num_bytes
    return sent


def _of_panels(strategy: TensorParallel, asked: _Asked) -> Estimate:
    """One part in n of what the plan cuts, the rest whole; 2(n-1)/n of what is summed in passes.

    That is, in each batch, what layers return that are cut by rows, and gradients of what those are
    given that are cut by columns.
    """
    n, whole = asked.num_ranks, without_memory(asked.model)
    if n == 1:
        all_of_it = {name: (p, tuple(p.shape)) for name, p in whole.named_parameters()}
        return Estimate(strategy, (asked.need(all_of_it, sent=0),))
    from nbdist.train.strategies.torch_tensor import Tensors, summed_bytes  # noqa: PLC0415 - it takes a second

    plan = strategy.plan_of(asked.model, n)
    sent = None
    if asked.sample is not None and asked.global_batch is not None:
        summed = summed_bytes(splitting.bare(whole), plan, splitting.without_memory(asked.sample))
        if summed is not None:
            sent = round(2 * _in_ring(n) * asked.global_batch * summed)
    shapes = {}
    parameters = dict(whole.named_parameters())
    dims = Tensors(Portion(0, n), torch.device("cpu"), Axes()).cut(whole, plan)
    for name, parameter in parameters.items():
        shape = list(parameter.shape)
        if (dim := dims.get(name)) is not None:
            shape[dim] //= n
        shapes[name] = parameter, tuple(shape)
    needs = [asked.need(shapes, sent=sent)] * n
    return Estimate(strategy, _with_copies(needs, strategy.copy_every))


def _of_mesh(strategy: Mesh, asked: _Asked) -> Estimate:
    """As the strategy along the model axis; twins sum gradients, 2(d-1)/d of their bytes."""
    n, axes = asked.num_ranks, strategy.axes()
    strategy.check_ranks(n)
    num_parts = axes.num_parts(n)
    num_twins = n // num_parts
    share = None if asked.global_batch is None else asked.global_batch // num_twins
    inner = strategy.along_model
    of_one = _COUNTED[type(inner)](inner, asked._replace(num_ranks=num_parts, global_batch=share))
    summed = 2 * _in_ring(num_twins)
    needs = tuple(
        need._replace(
            sent=None if need.sent is None else need.sent + round(summed * need.gradients)
        )
        for need in of_one.ranks
    )
    return Estimate(strategy, needs * num_twins, of_one.idle_share)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


_COUNTED: dict[type, Callable[[Any, _Asked], Estimate]] = {
    DataParallel: _of_replicas,
    LocalSGD: _of_apart,
    DiLoCo: _of_apart,
    ParameterServer: _of_server,
    Sharded: _of_shards,
    Pipeline: _of_stages,
    TensorParallel: _of_panels,
    Mesh: _of_mesh,
}
