"""What a parameter server and its workers send each other: a few numbers, and tensors as bytes.

Runs in the engine's main thread.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.train.strategies.base import Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


class Kind(enum.IntEnum):
    """What a message is."""

    ASK = 0
    """A worker has nothing to train."""
    PUSH = 1
    """A worker's gradients."""
    TRAIN = 2
    """A worker is to train this."""
    STAND = 3
    """All are to stand."""


class Asked(NamedTuple):
    """From a worker; and from the server to its replica, what it applies."""

    kind: int = Kind.ASK
    number: int = -1
    """The step."""
    version: int = -1
    """Of the parameters that it was computed with; to the replica: how many others came between."""
    loss_sum: float = 0.0
    weight: float = 0.0
    """What it is the sum over."""
    is_applied: float = 1.0
    """0: the loss is not finite."""
    wants_hold: float = 0.0
    is_called: float = 0.0
    """To the replica, with STAND: a hold was asked for."""
    rate_factor: float = 1.0
    num_late: float = 0.0
    """To the replica: parts that were applied with a later step than theirs, until now."""
    num_dropped: float = 0.0
    """Parts of steps that were applied without them, and that will be in none."""
    num_owed: float = 0.0
    """Those that may still come."""

    @property
    def late(self) -> dict[str, int]:
        """What is said of late parts."""
        names = "applied", "dropped", "owed"
        return dict(zip(names, map(int, self[-3:]), strict=True))


class Push(NamedTuple):
    """What a worker has sent."""

    asked: Asked
    values: list[Tensor | None]
    factor: float = 1.0
    """Times which its gradients count, beside their weight."""


class Answered(NamedTuple):
    """From the server."""

    kind: int
    number: int
    """The step; with STAND: committed steps."""
    version: int
    at: int = 0
    """Which part of the batch."""
    num_parts: int = 1
    is_called: float = 0.0
    """With STAND: a hold was asked for."""
    num_skipped: int = 0


class Parcels:
    """Parameters, gradients and buffers of a module as bytes; the same places on all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._parameters, *self._module.buffers()]

    @property
    def num_bytes(self) -> int:
        """Of one parcel."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def num_asked(self) -> int:
        """Numbers that come before a parcel, from a worker."""
        return len(Asked._fields) + len(self._tensors)

    def empty(self) -> Tensor:
        """For a parcel to be received."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def model(self) -> Tensor:
        """Parameters and buffers, as they are."""
        return _joined([tensor.detach() for tensor in self._tensors])

    def load_model(self, parcel: Tensor) -> None:
        """Have those of a parcel."""
        for tensor, value in zip(self._tensors, self._parts(parcel), strict=True):
            tensor.detach().copy_(value)

    def push(self, buffers: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients, and these buffers."""
        return [*(parameter.grad for parameter in self._parameters), *buffers]

    def buffers(self, changed: Sequence[float]) -> list[Tensor | None]:
        """Those that have changed."""
        pairs = zip(self._module.buffers(), changed, strict=True)
        return [buffer.detach() if has else None for buffer, has in pairs]

    def numbers(self, asked: Asked) -> Tensor:
        """Numbers before a parcel of nothing, or before none."""
        return torch.tensor([*asked, *(0.0 for _ in self._tensors)], dtype=torch.float64)

    def pack(self, asked: Asked, values: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Numbers and a parcel; of what is None nothing is made."""
        pairs = list(zip(values, self._tensors, strict=True))
        numbers = self.numbers(asked)
        numbers[len(Asked._fields) :] = torch.tensor([float(v is not None) for v, _ in pairs])
        return numbers, _joined([torch.zeros_like(like) if v is None else v for v, like in pairs])

    def unpack(self, numbers: Tensor, parcel: Tensor) -> tuple[Asked, list[Tensor | None]]:
        """What was packed."""
        num = len(Asked._fields)
        mask = numbers[num:].tolist()
        parts = zip(self._parts(parcel), mask, strict=True)
        return asked_of(numbers), [value if has else None for value, has in parts]

    def update(self, asked: Asked, values: Sequence[Tensor | None]) -> Update:
        """As a keeper applies it."""
        num = len(self._parameters)
        return Update(
            int(asked.number),
            asked.loss_sum,
            asked.weight,
            is_applied=bool(asked.is_applied),
            rate_factor=asked.rate_factor,
            gradients=list(values[:num]),
            buffers=list(values[num:]),
        )

    def mean(self, pushes: Sequence[Push]) -> list[Tensor | None]:
        """Of parts of batches: gradients weighted by what they count; buffers were already."""
        total = sum(push.asked.weight for push in pushes)
        num = len(self._parameters)
        means: list[Tensor | None] = [None] * len(self._tensors)
        for asked, values, factor in pushes:
            for place, value in enumerate(values):
                if value is None or (place < num and not asked.weight):
                    continue
                part = value * (asked.weight / total * factor) if place < num else value
                before = means[place]
                means[place] = part.clone() if before is None else before + part
        return means

    def with_buffers(
        self, means: Sequence[Tensor | None], pushes: Sequence[Push]
    ) -> list[Tensor | None]:
        """The same, with buffers as parts have them; of whole numbers those of the first."""
        num = len(self._parameters)
        columns = zip(*(push.values[num:] for push in pushes), strict=True)
        weights = [push.asked.weight for push in pushes]
        return [*means[:num], *(_mean(column, weights) for column in columns)]

    def _parts(self, parcel: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for tensor in self._tensors:
            piece = parcel[start : start + tensor.nbytes]
            whole = piece if start % tensor.itemsize == 0 else piece.clone()
            parts.append(whole.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        return parts


def _mean(values: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    """Of those that there are; of whole numbers the first."""
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if value is not None and weight
    ]
    if not pairs:
        return None
    first, total = pairs[0][0], sum(weight for _, weight in pairs)
    if not (first.is_floating_point() or first.is_complex()):
        return first
    mean = torch.zeros_like(first)
    for value, weight in pairs:
        mean += value * (weight / total)
    return mean


def asked_of(numbers: Tensor) -> Asked:
    """The numbers that a worker has sent, without what they say of the parcel."""
    return Asked(*numbers[: len(Asked._fields)].tolist())


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.contiguous().reshape(-1).cpu() for tensor in tensors]
    return torch.cat([piece.view(torch.uint8) for piece in flat if piece.numel()])
