"""A module's buffers: put back where a step fails, made equal on all ranks where it is committed.

Running means and the like differ from rank to rank, since each has seen its own share. At a commit
those of floating point become their average, weighted by the shares; the others are taken from
rank 0. Whether a buffer has changed is told by comparing it with a copy: torch's batch norm writes
to its buffers without raising their version. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


class Buffers:
    """The buffers of a module, each beside a copy of how the last commit left it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._kept = [buffer.detach().clone() for buffer in self._present()]

    def __len__(self) -> int:
        return len(self._places)

    @torch.no_grad()
    def changed(self) -> list[float]:
        """For each buffer 1.0 if it has changed since the last commit, else 0.0."""
        pairs = zip(self._present(), self._kept, strict=True)
        return [float(not torch.equal(buffer, kept)) for buffer, kept in pairs]

    @torch.no_grad()
    def settle(
        self, changed: Sequence[float], sum_: Callable[[Tensor], None], *, weight: float, rank: int
    ) -> None:
        """Make those equal on all ranks that have changed on any.

        Args:
            changed: for each buffer, on how many ranks it has changed.
            sum_: sums a tensor over all ranks, in place.
            weight: this rank's part of the batch.
            rank: this rank.
        """
        buffers = [b for b, num in zip(self._present(), changed, strict=True) if num]
        if not buffers:
            return
        parts = []
        for buffer in buffers:
            is_averaged = buffer.is_floating_point() or buffer.is_complex()
            factor = weight if is_averaged else float(rank == 0)
            flat = _real(buffer).flatten().double()
            parts.append(flat * factor if factor else torch.zeros_like(flat))
        together = torch.cat(parts)
        sum_(together)
        start = 0
        for buffer in buffers:
            real = _real(buffer)
            end = start + real.numel()
            real.copy_(together[start:end].view(real.shape))
            start = end

    @torch.no_grad()
    def keep(self, changed: Sequence[float]) -> None:
        """What these buffers hold now is committed."""
        for buffer, kept, num in zip(self._present(), self._kept, changed, strict=True):
            if num:
                kept.copy_(buffer)

    @torch.no_grad()
    def put_back(self) -> None:
        """Have again what the last commit left."""
        for buffer, kept in zip(self._present(), self._kept, strict=True):
            if not torch.equal(buffer, kept):
                buffer.copy_(kept)

    def keep_all(self) -> None:
        """All that the buffers hold now is committed: a state was loaded."""
        self.keep([1.0] * len(self))

    def _present(self) -> list[Tensor]:
        """The tensors as they are now; a module may put others in their places."""
        return [getattr(owner, name) for owner, name in self._places]


def _real(buffer: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(buffer.detach()) if buffer.is_complex() else buffer.detach()
