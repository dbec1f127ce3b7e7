"""int8 with error feedback: each number as one of 255 steps of a scale that a block has.

A block of 256 numbers x has the scale s = max|x| / 127, and is sent as s and round(x / s). One
scale for a whole bucket would be cheaper by 1/256 of a byte a number, and lose whatever is small
beside the bucket's largest (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

Numbers of different scales cannot be added as they are, so sums are made as a ring does it, in two
rounds: an all-to-all brings each rank its piece from all others, it adds up what they stand for,
and an all-gather spreads its sum, quantised again. Bytes of a rank for N numbers on n ranks:
(n-1)/n · N(1 + 4/256) and 1/n · N(1 + 4/256), together N(1 + 1/64), 0.254 of the 4N that an
all-reduce in float32 is handed; on the wire it is the same share, for any n. One all-gather of all
would need one round, and n/2 times as many bytes on the wire: no fewer on 2 ranks, and as many as
float32 on 8. (Tang et al. 2019, "DoubleSqueeze", has both roundings with error feedback.)

The second rounding is done by one rank alone and everybody decodes the same bytes, number by
number, so all ranks have the same bits. Its error goes into that rank's own residual. Runs in the
engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.train.compression.residual import Residual

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from nbdist.train.compression.parcel import Parcel, Wait

BLOCK = 256
"""Numbers that share a scale."""
_LARGEST_CODE = 127
_NOTHING = 1e-30
"""A block of smaller numbers is sent as zeros: the inverse of its scale could not be written."""
_SCALE_BYTES = 4


class Coded(NamedTuple):
    """Rows of numbers as codes, and for each block of them a scale."""

    codes: Tensor
    scales: Tensor


def encode(rows: Tensor) -> Coded:
    """Quantise rows whose length is a multiple of a block. What is not finite gives such scales."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(2) / _LARGEST_CODE
    scales.masked_fill_(scales < _NOTHING, 0)
    inverse = scales.reciprocal().masked_fill_(scales == 0, 0)
    codes = (blocks * inverse[..., None]).nan_to_num_(0, 0, 0).round_().to(torch.int8)
    return Coded(codes.view(rows.shape), scales)


def decode(coded: Coded) -> Tensor:
    """What they stand for."""
    codes, scales = coded
    return (codes.view(*scales.shape, BLOCK) * scales[..., None]).view(codes.shape)


class Quantise:
    """Two rounds of int8."""

    def __init__(self) -> None:
        self.residual = Residual()

    def rounds(self, parcel: Parcel) -> Generator[Wait, None, None]:
        """The vote goes to every rank with its piece, as it is, and each adds them up."""
        self.residual.add_to(parcel.flat, parcel.parameters)
        num, num_ranks = len(parcel.flat), parcel.num_ranks
        length = -(-num // (num_ranks * BLOCK)) * BLOCK
        left = torch.zeros((num_ranks, length), device=parcel.flat.device)
        left.view(-1)[:num] = parcel.flat
        coded = encode(left)
        left -= decode(coded)
        self.residual.note(left.view(-1)[:num], parcel.parameters)
        votes = parcel.vote.view(torch.uint8).expand(num_ranks, -1)
        rows = yield from parcel.all_to_all(torch.cat([_packed(coded), votes], 1))
        vote_bytes = votes.shape[1]
        mine = _sum_rows(decode(_unpacked(rows[:, : rows.shape[1] - vote_bytes], length)))
        vote = _sum_rows(rows[:, rows.shape[1] - vote_bytes :].contiguous().view(torch.float32))
        again = encode(mine[None])
        left[parcel.rank] += mine - decode(again)[0]
        result = _unpacked((yield from parcel.all_gather(_packed(again)[0])), length)
        is_finite = bool(result.scales.isfinite().all())
        parcel.put(decode(result).view(-1)[:num], vote, is_finite=is_finite)


def _packed(coded: Coded) -> Tensor:
    """Rows of bytes: scales, then codes."""
    return torch.cat([coded.scales.view(torch.uint8), coded.codes.view(torch.uint8)], 1)


def _unpacked(rows: Tensor, length: int) -> Coded:
    """The same, of bytes."""
    scale_bytes = length // BLOCK * _SCALE_BYTES
    scales = rows[:, :scale_bytes].contiguous().view(torch.float32)
    return Coded(rows[:, scale_bytes:].contiguous().view(torch.int8), scales)


def _sum_rows(rows: Tensor) -> Tensor:
    """In the order of the ranks."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
