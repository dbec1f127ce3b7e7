"""What models cost of which each rank has a part: stages, panels, and both or rows in a mesh.

Nothing is measured: models are made without memory, and counted. Runs in any process that has
torch; does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nbdist.train.asked import Asked, in_ring, with_copies
from nbdist.train.needs import Estimate, Need
from nbdist.train.strategies import actions, schedules, splitting
from nbdist.train.strategies.axes import Axes, Portion
from nbdist.train.strategies.divided import without_memory
from nbdist.train.strategies.grid import Grid
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.slices import check_rows
from nbdist.train.strategies.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.train.strategies.mesh import Mesh


class _Laid(NamedTuple):
    """How a model lies on the ranks of a pipeline."""

    stages: list[list[splitting.Stage]]
    """Of each rank."""
    sent: list[int] | None
    """Bytes that each rank sends to others in a step; None: there is no input to tell."""
    idle_share: float

    def parameters(self, rank: int, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """Those of a rank's stages, by their names in the whole model."""
        return {names[id(p)]: p for stage in self.stages[rank] for p in stage.parameters()}


def of_stages(strategy: Pipeline, asked: Asked) -> Estimate:
    """Each rank its stages; between two ranks each micro-batch once forward, a gradient back."""
    laid, names = _laid(strategy, asked), _names(asked.model)
    needs = []
    for rank in range(asked.num_ranks):
        mine = {name: (p, tuple(p.shape)) for name, p in laid.parameters(rank, names).items()}
        needs.append(asked.need(mine, sent=None if laid.sent is None else laid.sent[rank]))
    return Estimate(strategy, with_copies(needs, strategy.copy_every), laid.idle_share)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _laid(strategy: Pipeline, asked: Asked) -> _Laid:
    n, num_stages = asked.num_ranks, strategy.stages
    blocks = splitting.blocks_of(asked.model, strategy.split)
    counts = splitting.counts_of(blocks, num_stages, strategy.split, lambda: _wanted(asked.sample))
    stages = splitting.cut(blocks, counts)
    samples = (asked.global_batch or 0) // asked.accumulate
    num_pieces = strategy.microbatches or schedules.default_microbatches(num_stages, samples)
    if isinstance(strategy.schedule, str):
        owners = schedules.owners(strategy.schedule, num_stages, n)
        idle = schedules.named(strategy.schedule).idle_share(n, num_stages // n, num_pieces)
    else:
        parsed = actions.parse(strategy.schedule)
        owners = actions.check(parsed, num_stages, num_pieces)
        idle = actions.idle_share(parsed, num_stages)
    of_rank: list[list[splitting.Stage]] = [[] for _ in range(n)]
    for stage, owner in zip(stages, owners, strict=True):
        of_rank[owner].append(stage)
    return _Laid(of_rank, _between(stages, owners, asked), idle)


def _wanted(sample: Any) -> Any:
    if sample is None:
        raise ValueError(
            "a pipeline that is cut by itself is cut by what its blocks cost: give sample=, the "
            "input of a batch of one sample"
        )
    return sample


def _between(stages: Sequence[nn.Module], owners: Sequence[int], asked: Asked) -> list[int] | None:
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


def of_panels(strategy: TensorParallel, asked: Asked) -> Estimate:
    """One part in n of what the plan cuts, the rest whole; 2(n-1)/n of what is summed in passes.

    That is, in each batch, what layers return that are cut by rows, and gradients of what those are
    given that are cut by columns.
    """
    n = asked.num_ranks
    if n == 1:
        all_of_it = {name: (p, tuple(p.shape)) for name, p in asked.model.named_parameters()}
        return Estimate(strategy, (asked.need(all_of_it, sent=0),))
    layers = _summed(strategy, asked, n)
    sent = None if layers is None else sum(layers.values())
    dims = _dims(strategy, asked.model, n)
    shapes = {
        name: (p, _of_panel(p, dims.get(name), n)) for name, p in asked.model.named_parameters()
    }
    needs = [asked.need(shapes, sent=sent)] * n
    return Estimate(strategy, with_copies(needs, strategy.copy_every))


def _dims(strategy: TensorParallel, model: nn.Module, num_ranks: int) -> dict[str, int | None]:
    """Name -> along which dimension the plan cuts a parameter."""
    if num_ranks == 1:
        return {}
    from nbdist.train.strategies.torch_tensor import Tensors  # noqa: PLC0415 - it takes a second

    tensors = Tensors(Portion(0, num_ranks), torch.device("cpu"), Axes())
    return tensors.cut(without_memory(model), strategy.plan_of(model, num_ranks))


def _of_panel(parameter: Tensor, dim: int | None, num_ranks: int) -> tuple[int, ...]:
    """The shape of a rank's panel."""
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] //= num_ranks
    return tuple(shape)


def _summed(strategy: TensorParallel, asked: Asked, num_ranks: int) -> dict[str, int] | None:
    """Of each layer of the plan what a rank sends in a step for what is summed in passes.

    None: that is not known.
    """
    if asked.sample is None or asked.global_batch is None:
        return None
    if num_ranks == 1:
        return {}
    from nbdist.train.strategies.torch_tensor import summed_bytes  # noqa: PLC0415 - it takes a second

    bare, plan = (
        splitting.bare(without_memory(asked.model)),
        strategy.plan_of(asked.model, num_ranks),
    )
    layers = summed_bytes(bare, plan, splitting.without_memory(asked.sample))
    factor = 2 * in_ring(num_ranks) * asked.global_batch
    return None if layers is None else {name: round(factor * n) for name, n in layers.items()}


def of_mesh(strategy: Mesh, asked: Asked) -> Estimate:
    """As the strategy along the model axis; twins sum gradients, 2(d-1)/d of their bytes."""
    n, axes = asked.num_ranks, strategy.axes()
    strategy.check_ranks(n)
    if isinstance(axes, Grid):
        return _of_divided(strategy, axes, asked)
    num_parts = axes.num_parts(n)
    num_twins = n // num_parts
    share = None if asked.global_batch is None else asked.global_batch // num_twins
    inner = strategy.along_model
    its = asked._replace(num_ranks=num_parts, global_batch=share)
    of_one = of_stages(inner, its) if isinstance(inner, Pipeline) else of_panels(inner, its)
    summed = 2 * in_ring(num_twins)
    needs = tuple(
        need._replace(
            sent=None if need.sent is None else need.sent + round(summed * need.gradients)
        )
        for need in of_one.ranks
    )
    return Estimate(strategy, needs * num_twins, of_one.idle_share)


def _of_divided(strategy: Mesh, axes: Grid, asked: Asked) -> Estimate:
    """Each rank its pieces of its stages; what passes between stages, and between their ranks."""
    n, pipeline, within = asked.num_ranks, strategy.along_model, strategy.within
    assert isinstance(pipeline, Pipeline)
    num_stages, num_pieces = axes.shape(n)
    samples = asked.global_batch
    if axes.has_rows and samples is not None:
        samples //= num_pieces
    laid = _laid(pipeline, asked._replace(num_ranks=num_stages, global_batch=samples))
    names, needs = _names(asked.model), []
    dims: dict[str, int | None] = {}
    layers: dict[str, int] | None = {}
    if isinstance(within, TensorParallel):
        dims = _dims(within, asked.model, num_pieces)
        layers = _summed(within, asked, num_pieces)
    for rank in range(n):
        at, piece = axes.stages(rank, n).rank, axes.pieces(rank, n)
        whole = laid.parameters(at, names)
        sent = None if laid.sent is None or layers is None else laid.sent[at]
        if axes.has_rows:
            need = _of_rows(asked, whole, piece)
            more = need.sent or 0
        else:
            need = asked.need(
                {k: (p, _of_panel(p, dims.get(k), num_pieces)) for k, p in whole.items()}
            )
            inside = {id(module) for stage in laid.stages[at] for module in stage.modules()}
            more = sum(
                num
                for name, num in (layers or {}).items()
                if id(asked.model.get_submodule(name)) in inside
            )
        needs.append(need._replace(sent=None if sent is None else sent + more))
    copied = with_copies(needs, pipeline.copy_every, axes.stride(n))
    return Estimate(strategy, copied, laid.idle_share)


def _of_rows(asked: Asked, whole: Mapping[str, nn.Parameter], piece: Portion) -> Need:
    """A rank's rows of its stages, which are gathered once in a step, and summed once."""
    num = piece.num_ranks
    if num == 1:
        return asked.need({name: (p, tuple(p.shape)) for name, p in whole.items()}, sent=0)
    check_rows(dict(whole))
    rows = {name: piece.rows(len(p)) for name, p in whole.items()}
    shapes = {
        name: (p, (rows[name].stop - rows[name].start, *p.shape[1:])) for name, p in whole.items()
    }
    padded = {
        name: piece.num_padded(len(p)) * p.shape[1:].numel() * p.itemsize
        for name, p in whole.items()
    }
    trained = [name for name, p in whole.items() if p.requires_grad]
    travels = sum(padded.values()) + sum(padded[name] for name in trained)
    gathered = sum(p.nbytes for p in whole.values()) + sum(whole[name].nbytes for name in trained)
    return asked.need(shapes, sent=travels * (num - 1) // num, gathered=gathered)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]
