"""Parcels whose collectives happen in one process: all ranks' codecs take turns."""

from __future__ import annotations

import torch

from nbdist.train.compression import LowRank, Quantise, Reduced, Sparse

CODECS = {
    "fp16": lambda: Reduced(torch.float16),
    "bf16": lambda: Reduced(torch.bfloat16),
    "int8": Quantise,
    "topk": lambda: Sparse(0.1),
    "powersgd": lambda: LowRank(2),
}
FEEDBACK = ("int8", "topk", "powersgd")


class FakeParcel:
    """As `Parcel`, without a bucket and a group."""

    def __init__(self, rank, parameters, flat, vote, *, num_ranks, table):
        self.rank, self.num_ranks = rank, num_ranks
        self.parameters, self.flat, self.vote = parameters, flat.clone(), vote.clone()
        self.payload_bytes, self._table, self._num_begun = 0, table, 0
        self.result = None

    def put(self, gradients, vote, *, is_finite):
        self.result = gradients.float().clone(), vote.clone(), is_finite

    def _lay(self, tensor):
        """Hand it to a collective; a row for each rank, complete when the others have, too."""
        self._num_begun += 1
        rows = self._table.setdefault(self._num_begun, [None] * self.num_ranks)
        rows[self.rank] = tensor.clone()
        return rows

    def all_reduce(self, *tensors):
        laid = [self._lay(tensor) for tensor in tensors]
        self.payload_bytes += sum(tensor.nbytes for tensor in tensors)
        yield
        for tensor, rows in zip(tensors, laid, strict=True):
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            tensor.copy_(total)

    def all_gather(self, block):
        rows = self._lay(block)
        self.payload_bytes += block.nbytes
        yield
        return torch.stack(rows)

    def all_to_all(self, blocks):
        rows = self._lay(blocks)
        self.payload_bytes += blocks.nbytes // self.num_ranks * (self.num_ranks - 1)
        yield
        return torch.stack([row[self.rank] for row in rows])


def attempt(codecs, parameters, flats, votes=None):
    """One sum over as many ranks as there are codecs; the parcels of all.

    Each has its own parameters: they stand for one another by their place.
    """
    table, num_ranks = {}, len(codecs)
    votes = votes or [torch.zeros(0)] * num_ranks
    parcels = [
        FakeParcel(rank, *mine, num_ranks=num_ranks, table=table)
        for rank, mine in enumerate(zip(parameters, flats, votes, strict=True))
    ]
    under_way = []
    for codec, parcel in zip(codecs, parcels, strict=True):
        codec.residual.begin()
        under_way.append(codec.rounds(parcel))
    while under_way:
        going = [next(rounds, "over") is None for rounds in under_way]
        assert len(set(going)) == 1  # the same rounds on all ranks
        if not going[0]:
            break
    return parcels


def settle(codecs, *, is_applied=True, factor=1.0):
    """The attempt's step is committed on all ranks."""
    for codec in codecs:
        codec.residual.settle(is_applied=is_applied, factor=factor)
