"""PowerSGD with error feedback: a matrix of gradients as the product of two thin ones.

With M of n × m summed over the ranks, and a basis Q of m × r from the step before: P = MQ, made
orthonormal; Q = MᵀP; the sum is taken to be PQᵀ, M's projection onto P. Both products are linear in
M, so each rank makes them of its own part and an all-reduce adds them up: one step of subspace
iteration over the sum, which no rank has (Vogels et al. 2019, "PowerSGD: practical low-rank
gradient compression for distributed optimization"). Bytes for a matrix: 4r(n + m) of an
all-reduce's, where float32 has 4nm. What is no matrix, or would be no smaller, goes as it is.

A rank's residual is M - PPᵀM of its own part, so the sum of all is what the result lacks. Bases may
differ between ranks, as after a newcomer has come with one of its own: P and Q are summed, so the
result is a projection of the whole still. Whatever ranks must have alike is computed from sums
number by number, in an order that does not depend on threads, vector units or where a tensor lies.

torch's hook for it is not used: it keeps its state by bucket, and buckets are laid out anew with
each group; it begins its second sum when the first is there, whichever bucket that is, and gloo
mixes up sums that ranks begin in different orders; and it compresses means. Runs in the engine's
main thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.train.compression.residual import Residual

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from nbdist.train.compression.parcel import Parcel
    from nbdist.train.compression.rounds import Wait

_DEPENDENT = 1e-6
"""A column that keeps a smaller share of its length depends on those before it."""


class _Matrix(NamedTuple):
    """A parameter's gradient as a matrix, in place, and the basis that it is looked at in."""

    parameter: Tensor
    part: Tensor
    basis: Tensor


class LowRank:
    """Matrices by their projections; the rest as it is."""

    def __init__(self, rank: int) -> None:
        self.residual = Residual()
        self._rank = rank
        self._bases: dict[Tensor, Tensor] = {}

    def rounds(self, parcel: Parcel) -> Generator[Wait, None, None]:
        """An all-reduce of vote, rest and P; one of Q."""
        left = parcel.flat
        self.residual.add_to(left, parcel.parameters)
        matrices, rest = self._sort(parcel)
        ps = [matrix.part @ matrix.basis for matrix in matrices]
        sent = torch.cat([parcel.vote, *rest, *(p.flatten() for p in ps)])
        yield from parcel.all_reduce(sent)
        vote, *sums = sent.split([len(parcel.vote), *map(len, rest), *(p.numel() for p in ps)])
        ps = [orthonormal(s.view(p.shape)) for s, p in zip(sums[len(rest) :], ps, strict=True)]
        qs = [matrix.part.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        total = torch.empty_like(left)
        for part, its in zip(rest, sums[: len(rest)], strict=True):
            _over(total, part, left).copy_(its)
            part.zero_()
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            matrix.part.addmm_(p, q.T, alpha=-1)
        self.residual.note(left, parcel.parameters)
        second = torch.cat([sent[:0], *(q.flatten() for q in qs)])
        yield from parcel.all_reduce(second)
        pieces = second.split([q.numel() for q in qs])
        for matrix, p, piece in zip(matrices, ps, pieces, strict=True):
            q = piece.view(-1, self._rank)
            _over(total, matrix.part, left).copy_(product(p, q))
            self._bases[matrix.parameter] = q
        is_finite = bool(sent[len(vote) :].isfinite().all() and second.isfinite().all())
        parcel.put(total, vote, is_finite=is_finite)

    def _sort(self, parcel: Parcel) -> tuple[list[_Matrix], list[Tensor]]:
        """Those that are sent as products, and the others, all in place in `parcel.flat`."""
        matrices: list[_Matrix] = []
        rest: list[Tensor] = []
        start = 0
        for parameter in parcel.parameters:
            shape = parameter.shape
            num = math.prod(shape)
            part = parcel.flat[start : start + num]
            start += num
            num_rows = shape[0] if len(shape) > 1 else 1
            num_columns = num // max(num_rows, 1)
            if self._rank * (num_rows + num_columns) < num:
                basis = self._basis(parameter, num_columns)
                matrices.append(_Matrix(parameter, part.view(num_rows, num_columns), basis))
            else:
                rest.append(part)
        return matrices, rest

    def _basis(self, parameter: Tensor, num_columns: int) -> Tensor:
        """Of the step before, its columns of length 1; chance stands in for those that are zero."""
        generator = torch.Generator().manual_seed(num_columns)
        basis = torch.randn(num_columns, self._rank, generator=generator).to(parameter.device)
        if (before := self._bases.get(parameter)) is not None:
            lengths = before.norm(dim=0)
            is_good = (lengths > 0) & lengths.isfinite()
            basis = torch.where(is_good, before / lengths, basis)
        return basis


def orthonormal(columns: Tensor) -> Tensor:
    """The columns made orthogonal, of length 1; zero where one depends on those before it.

    By Gram and Schmidt, in float64: they are few.
    """
    num_rows, num_columns = columns.shape
    done = columns.new_zeros((1 << (num_rows - 1).bit_length(), num_columns), dtype=torch.float64)
    done[:num_rows] = columns
    squares = _summed(done * done)
    for place in range(num_columns):
        column = done[:, place : place + 1]
        products = _summed(column * done[:, place:])  # with itself, and with those after it
        is_new = (products[0] > _DEPENDENT**2 * squares[place]) & (products[0] > 0)
        inverse = torch.where(is_new, 1 / products[0], 0.0)
        done[:, place + 1 :] -= column * (products[1:] * inverse)
        column *= inverse.sqrt()
    return done[:num_rows].float()


def product(p: Tensor, q: Tensor) -> Tensor:
    """PQᵀ, column by column: a matrix product's order of additions is the library's own affair."""
    total = p[:, :1] * q[:, 0]
    for place in range(1, p.shape[1]):
        total += p[:, place : place + 1] * q[:, place]
    return total


def _summed(rows: Tensor) -> Tensor:
    """The sum of all rows, as many as a power of two: one half onto the other until one is left."""
    while len(rows) > 1:
        upper, lower = rows.chunk(2)
        rows = upper + lower
    return rows[0]


def _over(total: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """Where in `total` a part lies as it does in `whole`, in its shape."""
    start = part.storage_offset() - whole.storage_offset()
    return total[start : start + part.numel()].view(part.shape)
