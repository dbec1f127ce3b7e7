"""What is used of torch.distributed.pipelining, and what of it is torch's own business.

Its schedules and stages are young, and change between versions of torch: everything that touches
them is here, with tests of its own (`tests/train/test_torch_pipeline.py`). A schedule passes a
batch through the stages of all ranks; a stage tells when it computes and when it sends. Where all
ranks have stages, neither holds the group: both use torch's default group, whichever that is at the
moment; a group within it is let go of by who has made them. Loading it costs a
second, so it is loaded where a pipeline is made.

Runs in the engine's main thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from nbdist.engine.works import WORKS
from nbdist.protocol.telemetry import Kind
from nbdist.train.strategies import schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.strategies.held import Held
    from nbdist.train.strategies.passage import Passage

# torch tells of an error in a stage with the whole schedule as a table, from every rank.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def _wait(work: list[Any]) -> None:
    """In place of torch's own: a send or receive may never end though its group was cut."""
    if work:
        WORKS.wait(work)


torch_schedules._wait_batch_p2p = _wait  # noqa: SLF001 - it looks the name up at each call


class Stage(PipelineStage):
    """A stage that tells what it does, and leaves no trace of torch's trials."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        num_stages: int,
        device: torch.device,
        passage: Passage,
        group: Any,
    ) -> None:
        super().__init__(module, number, num_stages, device, group=group)
        self._passage = passage
        self._kept: list[torch.Tensor] = []
        """Buffers, while torch tries the stage out."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch goes forward."""
        passage, stage = self._passage, self.stage_index
        passage.go_forward(fwd_chunk_id, self.device)
        with passage.computes(Kind.FORWARD, stage, fwd_chunk_id), passage.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """A micro-batch goes backward, to the weights too or only to the inputs."""
        if self.has_backward:
            kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
            with self._passage.computes(kind, self.stage_index, bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """A micro-batch goes backward to the weights."""
        if self.has_backward:
            with self._passage.computes(Kind.BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """What is received from the stage before."""
        return self._told(Kind.RECEIVE, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """What is received from the stage behind."""
        return self._told(Kind.RECEIVE, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """What is sent to the stage behind."""
        return self._told(Kind.SEND, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """What is sent to the stage before."""
        return self._told(Kind.SEND, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _told(self, kind: Kind, microbatch: int, ops: Any) -> Any:
        self._passage.tell(kind, microbatch, ops)
        return ops

    # Without a backward pass torch still hands gradients over on the rank where a V turns.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the stage before, on the same rank."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from the stage behind, on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # What torch tries out must leave no trace: neither in buffers nor in the step's loss.

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self._passage.is_trial = True
        try:
            return super()._prepare_backward_infra(*args, **kwargs)
        finally:
            self._passage.is_trial = False

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        """An input for it; zeros are what a user's function can best do with."""
        tensor: torch.Tensor = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            tensor.detach().zero_()
        return tensor

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        with self._passage.autocast():
            return super()._compute_outputs(*args, module=module, **kwargs)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self._kept = [buffer.clone() for buffer in self.submod.buffers()]
        return super()._prepare_forward_infra(*args, **kwargs)

    @torch.no_grad()
    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        for buffer, kept in zip(self.submod.buffers(), self._kept, strict=True):
            buffer.copy_(kept)


def merge(outputs: list[Any]) -> Any:
    """Of the outputs of all micro-batches, one of the whole batch."""
    return merge_chunks(outputs, None)


def make(
    held: Held,
    schedule: str | schedules.Order,
    num_microbatches: int,
    passage: Passage,
    *,
    device: torch.device,
    loss: Callable[[Any, Any], Any] | None,
    group: Any = None,
) -> Any:
    """A schedule of torch's for the stages of this rank; without a loss it only goes forward.

    `group`: of the ranks that have stages; None: all do.
    """
    owners = held.layout.owners
    stages = [
        Stage(held.stage(number), number, len(owners), device, passage, group)
        for number in held.layout.own
    ]
    if isinstance(schedule, str):
        facts = schedules.named(schedule)
        first: Any = stages[0] if facts.per_rank == 1 else stages
        return get_schedule_class(facts.torch_name)(
            first, num_microbatches, loss_fn=loss, scale_grads=False
        )
    own = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss, scale_grads=False)
    own.pipeline_order = {
        rank: [None if text is None else _Action.from_str(text) for text in listed]
        for rank, listed in schedule.items()
    }
    own._prepare_schedule_with_comms(own.pipeline_order)  # noqa: SLF001
    return own


def planned(schedule: Any) -> dict[int, list[str]]:
    """In which order each rank is to compute: rank -> actions, as "2F0"."""
    if isinstance(schedule, Schedule1F1B):
        # torch's own account of it counts the last rank's micro-batches from 1.
        num_stages, num = schedule._num_stages, schedule._n_microbatches  # noqa: SLF001
        return {r: schedules.one_by_one(r, num_stages, num) for r in range(num_stages)}
    return {
        rank: [
            str(part)
            for action in listed
            if action is not None
            for part in action.sub_actions or (action,)
            if part.computation_type.value in ("F", "B", "I", "W")
        ]
        for rank, listed in schedule.pipeline_order.items()
    }
