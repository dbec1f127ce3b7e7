"""Error feedback: what a rank's compression has left out, to be sent with a later gradient.

A step sends C(g + e) instead of g, and leaves e' = g + e - C(g + e). So what T steps have sent
differs from the T gradients by the last e alone, however coarse C is: the error of the mean falls
as 1/T (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, "Error
feedback fixes SignSGD"). Each rank has its own, of its own part of the gradient; the sum of all is
what the sum of all gradients lacks.

What an attempt leaves is pending until its step is committed: a step that is repeated or skipped
counts for nothing. It is kept for each parameter, since buckets are laid out anew with each group.
Runs in the engine's main thread; no communication.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


class Residual:
    """What one rank has not sent yet, of each parameter's gradient."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        """Of committed steps."""
        self._pending: dict[Tensor, Tensor | None] = {}
        """Of the present attempt; None: nothing is left."""

    def begin(self) -> None:
        """An attempt begins; what the one before has left, and was not committed, is forgotten."""
        self._pending = {}

    def add_to(self, flat: Tensor, parameters: Iterable[Tensor]) -> None:
        """Add what was kept to these parameters' gradients, which lie end to end."""
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            if (kept := self._kept.get(parameter)) is not None:
                flat[start:end] += kept
            start = end

    def note(self, flat: Tensor, parameters: Iterable[Tensor]) -> None:
        """What this attempt leaves, end to end; it may still be written to."""
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            self._pending[parameter] = flat[start:end]
            start = end

    @torch.no_grad()
    def flush(self, parameters: Sequence[Tensor]) -> None:
        """Add all that was kept to the gradients themselves: there is nobody to send it to."""
        for parameter in parameters:
            kept, gradient = self._kept.get(parameter), parameter.grad
            if kept is not None and gradient is not None:
                gradient += kept.view(gradient.shape)
                self._pending[parameter] = None

    def settle(self, *, is_applied: bool, factor: float) -> None:
        """The attempt's step is committed.

        Args:
            is_applied: what was sent is in the parameters; else it was dropped, on all ranks.
            factor: how many times as large the next step has the gradient of the same loss.
        """
        if is_applied:
            for parameter, left in self._pending.items():
                if left is None:
                    self._kept.pop(parameter, None)
                else:
                    self._kept[parameter] = left
        self._pending = {}
        if factor != 1:
            for kept in self._kept.values():
                kept.mul_(factor)

    def forget(self) -> None:
        """Nothing is left: the parameters are others now."""
        self._kept, self._pending = {}, {}

    def total(self) -> float:
        """The Euclidean norm of all that was kept."""
        return math.hypot(*(float(kept.norm()) for kept in self._kept.values()))
