"""What a trainer was given, checked. Every message names the argument, its value and what may be.

Runs in the engine's main thread; does no communication.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nbdist.train.checks import check_one_of, check_positive, check_whole, shown
from nbdist.train.evaluate import Evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.train.sampling import Tail
    from nbdist.train.strategies import Strategy

Precision = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of a trainer; `Trainer` says what they mean."""

    model: nn.Module | Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer]
    loss: Callable[..., Any] | None
    forward: Callable[..., Any] | None
    data: Any
    collate: Callable[[list[Any]], Any] | None
    num_workers: int
    tail: Tail
    global_batch: int
    seed: int
    scheduler: Callable[[Optimizer], LRScheduler] | None
    accumulate: int
    clip_norm: float | None
    precision: Precision
    evaluate: Any
    strategy: Strategy

    def __post_init__(self) -> None:
        """Check the values that can be checked without making anything of them."""
        for name in ("model", "optimizer"):
            _check_function(name, getattr(self, name))
        for name in ("loss", "forward", "collate", "scheduler"):
            if getattr(self, name) is not None:
                _check_function(name, getattr(self, name))
        if (self.loss is None) == (self.forward is None):
            given = "both are given" if self.loss is not None else "neither is given"
            raise ValueError(f"give one of loss and forward; {given}")
        check_whole("global_batch", self.global_batch, 1)
        check_whole("seed", self.seed, 0)
        check_whole("num_workers", self.num_workers, 0)
        check_whole("accumulate", self.accumulate, 1)
        if self.accumulate > self.global_batch:
            raise ValueError(
                f"accumulate is {self.accumulate}; it must not be more than global_batch, "
                f"{self.global_batch}"
            )
        self._check_rest()
        self.strategy.check(self)

    def _check_rest(self) -> None:
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        check_one_of("precision", self.precision, get_args(Precision))
        if self.evaluate is not None and not isinstance(self.evaluate, Evaluate):
            raise TypeError(
                f"evaluate is {shown(self.evaluate)}; it must be Evaluate(data, every=…), or None"
            )
        if isinstance(self.strategy, type) or not hasattr(self.strategy, "exchange"):
            raise TypeError(
                f"strategy is {shown(self.strategy)}; it must be a strategy, such as DataParallel()"
            )

    def for_axis(self, strategy: Strategy, num_places: int) -> Recipe:
        """The same for one axis of a mesh, where ranks take one of so many parts of a batch."""
        share = max(1, self.global_batch // num_places)
        accumulate = min(self.accumulate, share)
        return dataclasses.replace(
            self, strategy=strategy, global_batch=share, accumulate=accumulate
        )

    # ---- what is made of them

    def make_module(self) -> nn.Module:
        """The model; where it is made here, the caller has seeded the generators."""
        module = self.model if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(module, nn.Module):
            raise TypeError(f"model() returned a {type(module).__name__}; it must be a Module")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"model is a {type(module).__name__} without a parameter that requires a "
                "gradient; there is nothing to train"
            )
        return module

    def make_optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer of the module's parameters."""
        optimizer = self.optimizer(module.named_parameters())
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer(named_parameters) returned a {type(optimizer).__name__}; it must be "
                "an Optimizer, as from lambda named: torch.optim.AdamW(named, lr=3e-4)"
            )
        mine = {id(parameter) for parameter in module.parameters()}
        others = [
            tuple(parameter.shape)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in mine
        ]
        if others:
            raise ValueError(
                f"optimizer has {len(others)} parameters that are not the model's, of shapes "
                f"{others[:4]}; make it of the named_parameters that it is called with"
            )
        return optimizer

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The scheduler, where there is one."""
        if self.scheduler is None:
            return None
        scheduler = self.scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "scheduler returned a ReduceLROnPlateau, whose step needs a metric; it must be a "
                "scheduler that follows from the number of steps alone"
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"scheduler(optimizer) returned a {type(scheduler).__name__}; it must be an "
                "LRScheduler of torch.optim.lr_scheduler"
            )
        return scheduler


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        allowed = {
            "model": "a Module, or a function that returns one",
            "optimizer": "a function from named parameters to an Optimizer",
        }
        raise TypeError(f"{name} is {shown(value)}; it must be {allowed.get(name, 'a function')}")
