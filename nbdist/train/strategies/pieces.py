"""How a batch comes apart into micro-batches of equal size, and together again. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbdist.train.sampling import share


class Pieces:
    """How a batch of `num` samples comes apart into micro-batches of equal size.

    Where it does not come out even, a micro-batch's last sample stands in it more than once.
    """

    def __init__(self, num: int, num_microbatches: int) -> None:
        cuts = [share(num, i, num_microbatches) for i in range(num_microbatches)]
        self.size = cuts[0].stop
        """Of each."""
        self.cuts = cuts
        """The samples of each."""
        self.is_even = num == self.size * num_microbatches
        rows = [np.minimum(np.arange(c.start, c.start + self.size), c.stop - 1) for c in cuts]
        self._rows = torch.from_numpy(np.concatenate(rows).clip(0))
        places = [np.arange(i * self.size, i * self.size + n) for i, n in enumerate(self.sizes)]
        self._places = torch.from_numpy(np.concatenate(places))

    @property
    def sizes(self) -> list[int]:
        """Samples of each that count."""
        return [cut.stop - cut.start for cut in self.cuts]

    def fill(self, inputs: Tensor) -> Tensor:
        """As many rows as all micro-batches have together."""
        return inputs if self.is_even else inputs[self._rows.to(inputs.device)]

    def drop_filling(self, output: Any) -> Any:
        """Of what comes out for these, the rows that count."""
        return output if self.is_even else rows_of(output, self._places, self._rows.numel())


def rows_of(value: Any, rows: slice | Tensor, num: int) -> Any:
    """The same with some of the rows of each tensor that has so many."""
    if isinstance(value, Tensor):
        there = rows.to(value.device) if isinstance(rows, Tensor) else rows
        return value[there] if value.dim() and len(value) == num else value
    if isinstance(value, dict):
        return {key: rows_of(item, rows, num) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [rows_of(item, rows, num) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
