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
    from collections.abc import Callable, Generator

    from torch import Tensor

    from nbdist.train.compression.parcel import Parcel
    from nbdist.train.compression.rounds import Rounds, Wait

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
        total = yield from summed(
            parcel,
            parcel.flat,
            parcel.vote,
            lambda left: self.residual.note(left, parcel.parameters),
        )
        parcel.put(total.flat, total.beside, is_finite=total.is_finite)


class Total(NamedTuple):
    """What is the same on all ranks."""

    flat: Tensor
    beside: Tensor
    is_finite: bool


def sent_bytes(num: int, num_ranks: int) -> int:
    """What a rank sends for so many numbers: each other rank's piece to it, and one piece's sum."""
    piece = _length(num, num_ranks) // BLOCK * (BLOCK + _SCALE_BYTES)
    return 2 * (num_ranks - 1) * piece


def summed(
    rounds: Rounds, flat: Tensor, beside: Tensor, note: Callable[[Tensor], None]
) -> Generator[Wait, None, Total]:
    """Sum numbers over all ranks, as codes.

    Args:
        rounds: the collectives.
        flat: the numbers, in float32.
        beside: some that go along as they are; none: there are none.
        note: is given what this rank has not sent of its numbers, before the last round. The last
            round may still write to it.
    """
    num, num_ranks = len(flat), rounds.num_ranks
    length = _length(num, num_ranks)
    left = torch.zeros((num_ranks, length), device=flat.device)
    left.view(-1)[:num] = flat
    coded = encode(left)
    left -= decode(coded)
    note(left.view(-1)[:num])
    votes = beside.view(torch.uint8).expand(num_ranks, -1)
    rows = yield from rounds.all_to_all(torch.cat([_packed(coded), votes], 1))
    vote_bytes = votes.shape[1]
    mine = _sum_rows(decode(_unpacked(rows[:, : rows.shape[1] - vote_bytes], length)))
    vote = _sum_rows(rows[:, rows.shape[1] - vote_bytes :].contiguous().view(torch.float32))
    again = encode(mine[None])
    left[rounds.rank] += mine - decode(again)[0]
    result = _unpacked((yield from rounds.all_gather(_packed(again)[0])), length)
    is_finite = bool(result.scales.isfinite().all())
    return Total(decode(result).view(-1)[:num], vote, is_finite)


def _length(num: int, num_ranks: int) -> int:
    """Of a rank's piece, in numbers: whole blocks."""
    return -(-num // (num_ranks * BLOCK)) * BLOCK


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
