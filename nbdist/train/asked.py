"""What an estimate is asked for, and how parts of a model are counted. Does no communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nbdist.train.needs import Need
from nbdist.train.strategies.copies import NUM_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer

    Make = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


class Asked(NamedTuple):
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


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """What is counted where nobody says which optimizer."""
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


def in_ring(num_ranks: int) -> float:
    """The part of a sum's bytes that each rank sends once, of n pieces all but its own."""
    return (num_ranks - 1) / num_ranks


def with_copies(needs: list[Need], copy_every: int, stride: int = 1) -> tuple[Need, ...]:
    """Of each of the last steps that were copied, a rank's own state and that of another one.

    Args:
        needs: of all ranks.
        copy_every: 0: no copies are made.
        stride: whose; so many before it.
    """
    if not copy_every or len(needs) == 1:
        return tuple(needs)
    sizes = [need.parameters + need.optimizer for need in needs]
    return tuple(
        need._replace(copies=NUM_KEPT * (sizes[rank] + sizes[rank - stride]))
        for rank, need in enumerate(needs)
    )
