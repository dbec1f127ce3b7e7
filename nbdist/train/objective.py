"""What is minimised: from a batch, or from what the user's function returns, to a weighted loss.

Runs in the engine's main thread.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nbdist.train.checks import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Weighed(NamedTuple):
    """A loss: `value * factor` is a sum over `weight` samples."""

    value: Tensor
    factor: float
    weight: float


def weigh(returned: Any, count: float, where: str) -> Weighed:
    """Read what a user's function returned: a mean, or (sum, count).

    Args:
        returned: what it returned.
        count: over how many samples the mean is, where it is one.
        where: the function, for the message.

    Raises:
        TypeError, ValueError: it is neither, or the count is no number.
    """
    factor = count
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise ValueError(f"{where} returned {len(returned)} values; it must be (sum, count)")
        returned, given = returned
        try:
            count, factor = float(given), 1.0
        except (TypeError, ValueError):
            raise TypeError(
                f"{where}: count is {shown(given)}; it must be a number, 0 or more"
            ) from None
    if not isinstance(returned, Tensor):
        raise TypeError(
            f"{where} returned a {type(returned).__name__}; it must be a tensor with one element, "
            "the mean over the samples given, or a tuple (sum, count)"
        )
    if returned.numel() != 1:
        raise ValueError(
            f"{where} returned a tensor of shape {tuple(returned.shape)}; it must have one "
            "element: a mean over the samples, or a tuple (sum, count)"
        )
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"{where}: count is {count}; it must be a number, 0 or more")
    return Weighed(returned, factor, count)


class Objective:
    """What the trainer was given as `loss` or `forward`."""

    def __init__(
        self, loss: Callable[..., Any] | None, forward: Callable[..., Any] | None, precision: str
    ) -> None:
        self._loss, self._forward = loss, forward
        self.name = "loss" if forward is None else "forward"
        self._is_reduced = precision == "bf16"

    def autocast(
        self, device: torch.device, *, is_suspended: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model computes; suspended for a backward pass within it."""
        if not self._is_reduced:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=not is_suspended)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch, as the user's function returns it."""
        if self._forward is not None:
            return self._forward(model, batch)
        inputs, target = pair_of(batch)
        return self.of(model(inputs), target)

    def of(self, output: Any, target: Any) -> Any:
        """The same, of what the model gave; with `loss` only."""
        assert self._loss is not None
        return self._loss(output, target)


def pair_of(batch: Any) -> Any:
    """Input and target of a batch.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch
    kind = f"{type(batch).__name__}"
    if isinstance(batch, list | tuple):
        kind += f" of {len(batch)}"
    raise TypeError(
        f"with loss=, data[i] must be (input, target); a batch is a {kind}. For other batches use "
        "forward=lambda model, batch: (sum, count)"
    )
