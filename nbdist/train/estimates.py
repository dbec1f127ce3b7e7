"""What a strategy will cost, before anything is trained: memory of each rank, bytes, idle time.

Nothing is measured: models are made without memory, and counted. Runs in any process that has
torch; does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbdist.train.asked import Asked, adamw, in_ring, with_copies
from nbdist.train.checks import check_whole, shown
from nbdist.train.compression.quantise import sent_bytes
from nbdist.train.estimates_in_parts import of_mesh, of_panels, of_stages
from nbdist.train.needs import Estimate
from nbdist.train.strategies.axes import Portion
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.diloco import DiLoCo
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
    from collections.abc import Callable, Sequence

    from nbdist.train.asked import Make
    from nbdist.train.strategies import Strategy


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
    if not callable(model):
        raise TypeError(f"model is {shown(model)}; it must be a Module or a function that makes it")
    if isinstance(model, nn.Module):
        bare = model
    else:
        with torch.device("meta"):
            bare = model()
    asked = Asked(bare, devices, optimizer or adamw, global_batch, accumulate, sample)
    return counted(strategy, asked)


# ---- strategies


def _of_replicas(strategy: DataParallel, asked: Asked) -> Estimate:
    """Everything everywhere; gradients are summed once in a step, 2(n-1)/n of their bytes."""
    trained = [p for p in asked.model.parameters() if p.requires_grad]
    sent = _SENT[strategy.compress](strategy, asked.num_ranks, trained)
    whole = {name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()}
    return Estimate(strategy, (asked.need(whole, sent=round(sent)),) * asked.num_ranks)


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
    None: lambda _, n, trained: 2 * in_ring(n) * _num_bytes(trained),
    "fp16": lambda _, n, trained: in_ring(n) * _num_bytes(trained),
    "bf16": lambda _, n, trained: in_ring(n) * _num_bytes(trained),
    "int8": lambda _, n, trained: 65 / 128 * in_ring(n) * _num_bytes(trained),
    "topk": lambda s, n, trained: (1 / 32 + s.topk_share / 2) * (n - 1) * _num_bytes(trained),
    "powersgd": lambda s, n, trained: 2 * in_ring(n) * _thin(s, trained),
}
"""As `DataParallel.describe` says it."""


def _of_shards(strategy: Sharded, asked: Asked) -> Estimate:
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
    return Estimate(strategy, with_copies(needs, strategy.copy_every))


def _of_apart(strategy: LocalSGD | DiLoCo, asked: Asked) -> Estimate:
    """Everything everywhere, and what is shared; parameters are summed once in a period."""
    trained = [p for p in asked.model.parameters() if p.requires_grad]
    n, compress = asked.num_ranks, strategy.compress if isinstance(strategy, DiLoCo) else None
    if isinstance(strategy, DiLoCo) and compress == "int8":
        fragments = cut(asked.model, strategy.fragments, None)
        sizes = [sum(p.numel() for p in fragment.parameters) for fragment in fragments]
        sent = float(sum(sent_bytes(size, n) for size in sizes))
    else:
        num_bytes = sum(p.numel() * (2 if compress else p.itemsize) for p in trained)
        sent = 2 * in_ring(n) * num_bytes
    kept = 2 if isinstance(strategy, DiLoCo) and strategy.momentum else 1
    need = asked.need(
        {name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()},
        copies=kept * _num_bytes(trained),
        sent=round(sent / strategy.period),
    )
    return Estimate(strategy, (need,) * n)


def _of_server(strategy: ParameterServer, asked: Asked) -> Estimate:
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


_COUNTED: dict[type, Callable[[Any, Asked], Estimate]] = {
    DataParallel: _of_replicas,
    LocalSGD: _of_apart,
    DiLoCo: _of_apart,
    ParameterServer: _of_server,
    Sharded: _of_shards,
    Pipeline: of_stages,
    TensorParallel: of_panels,
    Mesh: of_mesh,
}
