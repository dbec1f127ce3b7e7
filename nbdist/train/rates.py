"""The learning rate: read, and set so that a scheduler goes on from it.

Runs in the engine's main thread.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What of a parameter group grows with the base rate; the last two are OneCycleLR's."""


def present_rate(optimizer: Optimizer) -> float:
    """The rate that the optimizer uses for its first parameter group."""
    return float(optimizer.param_groups[0]["lr"])


def set_base_rate(optimizer: Optimizer, scheduler: LRScheduler | None, rate: float) -> None:
    """Change the rate that the scheduler works on; without one, the rate itself.

    Parameter groups keep their proportions.
    """
    first = optimizer.param_groups[0]
    base = float(first["initial_lr" if scheduler is not None else "lr"])
    for group in optimizer.param_groups:
        for name in GROUP_RATES:
            if name in group:
                group[name] = _scaled(group[name], base, rate)
    for part in _parts(scheduler):
        part.base_lrs = [_scaled(old, base, rate) for old in part.base_lrs]


def step_scheduler(scheduler: LRScheduler | None, *, is_applied: bool) -> None:
    """A step is committed; its update may have been left out."""
    if scheduler is None:
        return
    if is_applied:
        scheduler.step()
        return
    with warnings.catch_warnings():  # it misses the optimizer's step
        warnings.simplefilter("ignore")
        scheduler.step()


def _scaled(old: Any, base: float, rate: float) -> Any:
    new = rate if base in (0, float(old)) else float(old) * (rate / base)
    return old.fill_(new) if isinstance(old, Tensor) else new


def _parts(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it is made of."""
    if scheduler is None:
        return []
    below = [part for inner in getattr(scheduler, "_schedulers", []) for part in _parts(inner)]
    return [*below, scheduler] if hasattr(scheduler, "base_lrs") else below
