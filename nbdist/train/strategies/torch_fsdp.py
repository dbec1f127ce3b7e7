"""Everything that touches torch's FSDP2: cuts a module over the ranks, and binds it to a group.

`fully_shard` puts its hooks on a module once. The group in which they gather and sum is the default
group of the present generation: it is put in when one begins and taken out when it is left, since
a group cannot be left well while something holds it. FSDP's names for that are torch's own; a test
holds that they exist. Gloo has no reduce-scatter: torch (2.13) sums the whole gradient on all ranks
in its place, which sends twice the bytes, and takes an average for a sum (pytorch#162338). So
gradients are exchanged in pieces here, and each rank sums its own. Runs in the engine's main
thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from nbdist.engine import emit, rebind
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.spreading import gather_, scatter_sum_

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn


class Traffic:
    """What the collectives of one rank have cost so far."""

    def __init__(self) -> None:
        self.waited_ns = 0
        """In them, for all of them together."""
        self.gathered_bytes = self.scattered_bytes = 0
        """Payload: what this rank has handed to collectives for others."""
        self.num_sums = 0
        """Sums of gradients in the present step."""


class Fsdp:
    """A module that is cut over the ranks of the default group, block by block.

    Made in a group of the size and with the rank that all later groups have.
    """

    def __init__(self, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._mesh = DeviceMesh.from_group(group, device.type)
        self.traffic = Traffic()
        self._cut: list[FSDPModule] = []
        """In the order in which they were cut: the root is the last."""
        self._is_disturbed = False
        """A pass has begun, and has not come to the end of its backward part."""
        rebind.watch(self)

    def cut(self, module: nn.Module) -> None:
        """Leave this rank its rows of the parameters below a module that are not cut yet.

        Communicates nothing. The root comes last.
        """
        cut = fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        # Losses are scaled beforehand: gradients are summed, and not divided by the ranks.
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        # A parameter that one rank's samples do not need is summed on all ranks all the same.
        cut.set_reduce_scatter_unused_params(True, recurse=False)
        cut.set_custom_all_gather(_Gather(self.traffic))
        cut.set_custom_reduce_scatter(_Scatter(self.traffic))
        self._cut.append(cut)

    # ---- the group

    def bind(self) -> None:
        """Have the present default group; what an earlier attempt has left is let go."""
        group = dist.group.WORLD
        for its in self._groups():
            its.mesh_info.shard_process_group = group
        if self._is_disturbed:
            self._cut[-1].reset_iter_state()
            for parameter in self._parameters():
                parameter.unsharded_accumulated_grad = parameter.sharded_param.grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None  # noqa: SLF001 - torch leaves it
            self._is_disturbed = False

    def let_go(self) -> None:
        """The group is about to be left."""
        for its in self._groups():
            its.mesh_info.shard_process_group = None
        self._mesh._pg_registry.clear()  # noqa: SLF001 - torch has no public name for it

    def begin_pass(self) -> None:
        """A forward pass begins."""
        if any(its.mesh_info.shard_process_group is None for its in self._groups()):
            self.bind()
        self._is_disturbed = True

    def end_pass(self) -> None:
        """Its backward pass has come to its end."""
        self._is_disturbed = False

    # ---- parameters

    @staticmethod
    def rows(parameter: Any) -> Tensor:
        """The rows of a cut parameter that this rank has; the same memory."""
        local: Tensor = parameter.to_local()
        return local.detach()

    @staticmethod
    def take_gradient(parameter: Any) -> Tensor | None:
        """The gradient of these rows, taken away."""
        if parameter.grad is None:
            return None
        local: Tensor = parameter.grad.to_local()
        parameter.grad = None
        return local

    def _groups(self) -> Iterator[Any]:
        """What FSDP gathers together: the parameters of a block, or the rest of the root."""
        for module in self._cut:
            yield from module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 - no public name

    def _parameters(self) -> Iterator[Any]:
        for its in self._groups():
            yield from its.fsdp_params


class _Gather(DefaultAllocMixin, AllGather):
    """Gathers the rows of a block from all ranks."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        del async_op  # what it waits for must be broken by a cut (`engine.works`)
        began_ns = perf_counter_ns()
        with emit.exchange(Op.ALL_GATHER, Axis.DATA, group.size(), input_tensor.nbytes):
            gather_(output_tensor, input_tensor, group)
        self._traffic.waited_ns += perf_counter_ns() - began_ns
        self._traffic.gathered_bytes += (group.size() - 1) * input_tensor.nbytes


class _Scatter(DefaultAllocMixin, ReduceScatter):
    """Sums the gradients of a block, of which each rank keeps its own rows."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        del op, async_op  # always a sum
        ident, began_ns = self._traffic.num_sums, perf_counter_ns()
        emit.span(Kind.BUCKET_READY, began_ns, began_ns, ident=ident)
        emit.span(Kind.BUCKET_LAUNCH, began_ns, began_ns, ident=ident)
        scatter_sum_(output_tensor, input_tensor, group)
        emit.bucket_done(Op.REDUCE_SCATTER, group.size(), began_ns, ident, input_tensor.nbytes)
        self._traffic.num_sums += 1
        self._traffic.waited_ns += perf_counter_ns() - began_ns
        self._traffic.scattered_bytes += input_tensor.nbytes - output_tensor.nbytes
