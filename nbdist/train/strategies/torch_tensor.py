"""Everything that touches torch's DTensor: cuts a module by a plan, and lets it compute.

`parallelize_module` puts its hooks on a module once, and these hold a mesh, which names a group.
The name is that of a group of ours, which hands each collective on to the default group of the
moment: nothing holds that, so it can be left well, and what waits for a collective waits through
`engine.works`, as a cut can break it. Values are not torch's to cut: modules are cut without
memory, and each rank fills in its own. What is not public in torch is held by a test. Runs in the
engine's main thread, and in torch's own for backward passes on accelerators.
"""

from __future__ import annotations

import functools
import itertools
from fnmatch import fnmatchcase
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    _create_work_from_future,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.futures import Future

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.train.strategies.axes import Axes, Portion

_numbers = itertools.count()


class Traffic:
    """What the collectives of one rank have cost so far."""

    def __init__(self) -> None:
        self.waited_ns = 0
        """In them, for all of them together."""
        self.summed_bytes = self.gathered_bytes = self.scattered_bytes = 0
        """Handed to sums over all ranks; and of gathers and sums that are scattered, for others."""


class Standing(dist.ProcessGroup):
    """A group that stays while the default group changes: it hands on to the present one.

    Or, where only some of the ranks have pieces of the same layers, to the group of those.
    """

    def __init__(self, portion: Portion, traffic: Traffic, axes: Axes) -> None:
        super().__init__(*portion)  # type: ignore[arg-type, call-arg] # torch's stub lacks it
        self._num_ranks, self._traffic, self._axes = portion.num_ranks, traffic, axes
        self.own_name = GroupName(f"nbdist-tensor-{next(_numbers)}")

    def enter(self) -> None:
        """Be known to torch, which forgets all groups when the default one is left."""
        _unregister_process_group(self.own_name)
        _register_process_group(self.own_name, self)

    # ---- what torch calls

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override] # all that is called
        """A sum on all ranks, or whatever the options say."""
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        is_mean = op == dist.ReduceOp.AVG and _is_gloo()  # it takes a mean for a sum
        if is_mean:
            op = dist.ReduceOp.SUM
        self._traffic.summed_bytes += tensor.nbytes
        with emit.exchange(Op.ALL_REDUCE, Axis.TENSOR, self._num_ranks, tensor.nbytes):
            self._wait(functools.partial(dist.all_reduce, tensor, op))
        if is_mean:
            tensor /= self._num_ranks
        return _done(tensors)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """The tensors of all ranks, one after the other."""
        del opts
        for output, tensor in zip(outputs, inputs, strict=True):
            self._traffic.gathered_bytes += (self._num_ranks - 1) * tensor.nbytes
            with emit.exchange(Op.ALL_GATHER, Axis.TENSOR, self._num_ranks, tensor.nbytes):
                self._wait(functools.partial(dist.all_gather_single, output, tensor))
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """A sum of which each rank has its part."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for output, tensor in zip(outputs, inputs, strict=True):
            self._traffic.scattered_bytes += tensor.nbytes - output.nbytes
            with emit.exchange(Op.REDUCE_SCATTER, Axis.TENSOR, self._num_ranks, tensor.nbytes):
                self._reduce_scatter(output, tensor, op)
        return _done(outputs)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        """Gloo has none, so there ranks exchange pieces, and each sums its own."""
        scatter, exchange = dist.reduce_scatter_single, dist.all_to_all_single
        if not _is_gloo():
            self._wait(functools.partial(scatter, output, tensor, op))
            return
        pieces = torch.empty_like(tensor)
        self._wait(functools.partial(exchange, pieces, tensor))
        torch.sum(pieces.view(self._num_ranks, *output.shape), 0, out=output)
        if op == dist.ReduceOp.AVG:
            output /= self._num_ranks

    def _wait(self, begin: Callable[..., Any]) -> None:
        began_ns = perf_counter_ns()
        work = begin(group=self._axes.of_pieces, async_op=True)
        if _is_gloo():
            WORKS.follow(work).wait()
        else:
            work.wait()
        self._traffic.waited_ns += perf_counter_ns() - began_ns


def _is_gloo() -> bool:
    return "gloo" in str(dist.get_backend_config())


def _done(tensors: list[Tensor]) -> Any:
    future: Future[list[Tensor]] = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


class _Mesh(DeviceMesh):
    """All ranks in a row; torch would ask the default group's records for a place in ours."""

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        del mesh_dim
        return self._rank


class Tensors:
    """How a module is cut over ranks, of which this is one.

    Args:
        portion: which rank, of how many.
        device: the module's.
        axes: how all ranks share the model.
    """

    def __init__(self, portion: Portion, device: torch.device, axes: Axes) -> None:
        self.traffic, self._portion = Traffic(), portion
        self._group = Standing(portion, self.traffic, axes)
        name, num = self._group.own_name, portion.num_ranks
        self._mesh = _Mesh(
            device.type,
            torch.arange(num),
            # torch keeps what it finds out for a mesh, and uses it for those that are equal.
            mesh_dim_names=(name,),
            _init_backend=False,
            _rank=portion.rank,
        )
        self._mesh._dim_group_names = [name]  # noqa: SLF001 - as `DeviceMesh.from_group` does
        self._mesh._pg_registry[name] = self._group  # noqa: SLF001 - likewise; it keeps it alive

    def enter(self) -> None:
        """The module is about to compute in the present group."""
        self._group.enter()

    # ---- cutting

    def cut(self, module: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, int | None]:
        """Have a module without memory compute with pieces of its parameters.

        Returns:
            Name of each parameter that the plan has something to do with -> the dimension that it
            is cut along; None: it stays whole.

        Raises:
            ValueError: the plan does not fit the module.
        """
        before = set(dict(module.named_parameters()))
        for name, style in planned(module, plan):
            part = module.get_submodule(name)
            try:
                parallelize_module(part, self._mesh, style, src_data_rank=None)
            except (NotImplementedError, RuntimeError) as error:
                first = str(error).splitlines()[0]
                raise ValueError(f"plan: {type(style).__name__} for {name!r}: {first}") from error
        parameters = dict(module.named_parameters())
        if doubled := sorted(set(parameters) ^ before):
            raise ValueError(
                f"plan: {', '.join(doubled)}: one parameter that is used in two places cannot be "
                "cut in one of them; leave both out"
            )
        dims = {n: _dim(n, p) for n, p in parameters.items() if isinstance(p, DTensor)}
        if not any(dim is not None for dim in dims.values()):
            raise ValueError("plan cuts no parameter of the model")
        for name, dim in dims.items():
            if dim is not None and parameters[name].shape[dim] % self._portion.num_ranks:
                raise ValueError(
                    f"{name} of shape {tuple(parameters[name].shape)} cannot be cut along its "
                    f"dimension {dim} for {self._portion.num_ranks} ranks alike"
                )
        return dims

    def filled(self, parameter: Any, piece: Tensor) -> nn.Parameter:
        """A parameter like one that was cut, with this piece of it in memory."""
        with torch.no_grad():
            made = DTensor.from_local(
                piece,
                self._mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    # ---- parameters

    @staticmethod
    def piece(parameter: Any) -> Tensor:
        """The piece of a cut parameter that this rank has; the same memory."""
        local: Tensor = parameter.to_local()
        return local.detach()

    @staticmethod
    def take_gradient(parameter: Any) -> Tensor | None:
        """The gradient of this piece, taken away; where ranks have parts of it, their sum."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return None
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        local: Tensor = gradient.to_local()
        return local


def _dim(name: str, parameter: DTensor) -> int | None:
    (placement,) = parameter.placements
    if isinstance(placement, Replicate):
        return None
    if type(placement) is Shard:
        return placement.dim % parameter.dim()
    raise ValueError(f"plan: {name} lies as {placement}; a piece of it must be rows or columns")


def planned(
    module: nn.Module, plan: Mapping[str, ParallelStyle]
) -> list[tuple[str, ParallelStyle]]:
    """Names of parts of a module, and how each is cut; one may be there more than once.

    Raises:
        ValueError: something in the plan is nowhere.
    """
    found: list[tuple[str, ParallelStyle]] = []
    for pattern, style in plan.items():
        names = [name for name, _ in module.named_modules() if _is_meant(name, pattern)]
        if not names:
            raise ValueError(f"plan: no part of the model is named {pattern!r}")
        found += [(name, style) for name in names]
    return found


def _is_meant(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def summed_bytes(
    model: nn.Module, plan: Mapping[str, ParallelStyle], inputs: Any
) -> dict[str, int] | None:
    """Name of each planned layer -> what a pass forward and back sums over the ranks, in bytes.

    Layers that are cut by rows sum what they return; those that are cut by columns the gradient of
    what they are given, if that has one.

    Args:
        model: without memory, and whole.
        plan: how it would be cut.
        inputs: of a batch, without memory.

    Returns:
        None: other layers are planned, of which this is not known.
    """
    hooks, found = [], planned(model, plan)
    num_bytes = {name: 0 for name, _ in found}

    def by_rows(name: str, _module: Any, _given: Any, returned: Tensor) -> None:
        num_bytes[name] += returned.nbytes

    def by_columns(name: str, _module: Any, given: tuple[Tensor, ...]) -> None:
        num_bytes[name] += given[0].nbytes if given[0].requires_grad else 0

    if not all(_is_usual(style) for _, style in found):
        return None
    for name, style in found:
        part = model.get_submodule(name)
        if isinstance(style, RowwiseParallel):
            hooks.append(part.register_forward_hook(functools.partial(by_rows, name)))
        else:
            hooks.append(part.register_forward_pre_hook(functools.partial(by_columns, name)))
    with torch.device("meta"), torch.enable_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return num_bytes


def _is_usual(style: Any) -> bool:
    """Whether it cuts a layer and leaves what passes between layers whole, or as the next wants."""
    whole, last = (Replicate(),), (Shard(-1),)
    if type(style) is ColwiseParallel:
        return bool(style.input_layouts == whole and style.output_layouts == last)
    is_by_rows = type(style) is RowwiseParallel
    return bool(is_by_rows and style.input_layouts == last and style.output_layouts == whole)


def cut_parameters(module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Those that are torch's."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            yield name, parameter
