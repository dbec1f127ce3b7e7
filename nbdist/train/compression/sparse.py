"""Top-k with error feedback: only the largest numbers of a bucket are sent, with their places.

The others wait in the residual, and grow until they are among the largest (Stich et al. 2018,
"Sparsified SGD with memory"; Lin et al. 2018, "Deep gradient compression"). Each rank chooses its
own, so sums cannot be made on the way: an all-gather brings all to all. Bytes of a rank for a share
s of N numbers: 8sN, 4 for a number and 4 for its place, which is 2s of what an all-reduce in
float32 is handed. On the wire it is (n-1)8sN, against 2(n-1)/n · 4N: fewer as long as s < 1/n. All
ranks add the same numbers in the order of the ranks, and have the same bits. Runs in the engine's
main thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from nbdist.train.compression.residual import Residual

if TYPE_CHECKING:
    from collections.abc import Generator

    from nbdist.train.compression.parcel import Parcel, Wait


class Sparse:
    """A share of the numbers: the largest."""

    def __init__(self, share: float) -> None:
        self.residual = Residual()
        self._share = share

    def rounds(self, parcel: Parcel) -> Generator[Wait, None, None]:
        """One all-gather of places, numbers and the vote, 4 bytes each."""
        left = parcel.flat
        self.residual.add_to(left, parcel.parameters)
        num = math.ceil(self._share * len(left))
        places = left.abs().topk(num, sorted=False).indices
        chosen = left[places]
        left[places] = 0
        self.residual.note(left, parcel.parameters)
        parts = [places.int(), chosen.view(torch.int32), parcel.vote.view(torch.int32)]
        rows = yield from parcel.all_gather(torch.cat(parts))
        total, vote = torch.zeros_like(left), torch.zeros_like(parcel.vote)
        numbers = rows[:, num:].contiguous().view(torch.float32)
        for its_places, its_numbers in zip(rows[:, :num], numbers, strict=True):
            total.index_add_(0, its_places, its_numbers[:num])  # no place twice: no order in it
            vote += its_numbers[num:]
        parcel.put(total, vote, is_finite=bool(numbers[:, :num].isfinite().all()))
