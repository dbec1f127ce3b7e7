"""What a codec works on: the gradients of one bucket, and the collectives that it may use.

`Courier` begins the collectives of all buckets in one order, which must be the same on all ranks.
Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbdist.train.compression.rounds import Rounds

if TYPE_CHECKING:
    from torch import Tensor


class Parcel(Rounds):
    """One bucket's gradients, to be summed over all ranks; beside them the vote, if it is there.

    Attributes:
        index: the bucket's.
        parameters: whose gradients they are.
        flat: a copy of the gradients, end to end, in float32; the codec's to write to.
        vote: a copy of the vote, in float32; empty where the bucket has none.
        is_finite: whether the sums are; the same on all ranks.
    """

    def __init__(self, bucket: Any, vote: Tensor, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self.index = bucket.index()
        self.parameters: list[Tensor] = []
        self._views: list[Tensor] = []
        self._vote_view: Tensor | None = None
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter is vote:
                self._vote_view = view
            else:
                self.parameters.append(parameter)
                self._views.append(view)
        empty = torch.zeros(0, device=vote.device)
        self.flat = torch.cat([empty, *(view.flatten() for view in self._views)]).float()
        self.vote = empty if self._vote_view is None else self._vote_view.clone()
        self.is_finite = True

    def put(self, gradients: Tensor, vote: Tensor, *, is_finite: bool) -> None:
        """Write the sums to where they belong: gradients end to end, and the vote."""
        start = 0
        for view in self._views:
            view.copy_(gradients[start : start + view.numel()].view(view.shape))
            start += view.numel()
        if self._vote_view is not None:
            self._vote_view.copy_(vote)
        self.is_finite = is_finite
