"""Looks at what replicas should have alike: a digest of each block of the model, told as telemetry.

Runs in the engine's main thread, between steps, while no parameter changes. It asks nobody: who
has which digest is compared where all are told of.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from nbdist.engine import emit
from nbdist.protocol.looks import DIGEST_BITS, EVERY, MAX_BLOCKS, Of, is_due, packed
from nbdist.protocol.telemetry import Kind
from nbdist.train.strategies.apart import Apart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from nbdist.train.ports import RunPort
    from nbdist.train.state import State

MAX_BYTES = 4 * 2**20
"""Of a larger model a part is looked at, evenly spread, another one each time: some milliseconds,
every so many steps of a model whose step takes longer than each of them."""


class Lookout:
    """The looks of one rank in one run."""

    def __init__(self) -> None:
        self._generation, self._began = -1, 0
        """The present group, and the step with which it began."""
        self._last: int | None = None
        """Step of the last look in it."""

    def look(self, state: State, port: RunPort) -> None:
        """Where it is time, tell the digests; all ranks stand at the same boundary."""
        if port.generation != self._generation:
            self._generation, self._began, self._last = port.generation, state.step, None
        if port.world_size == 1 or port.go_until is None:
            return
        if not is_due(state.step, self._began, self._last, port.go_until):
            return
        self._last = state.step
        found = blocks(alike(state))
        is_anchor = not state.recipe.strategy.is_replicated
        stride = stride_of(tensor for tensors in found.values() for tensor in tensors)
        for number, tensors in enumerate(found.values()):
            value = digest(tensors, stride, state.step // EVERY)
            emit.scalar(Kind.DIGEST, value, ident=packed(Of(number, stride, is_anchor)))


def alike(state: State) -> Iterable[tuple[str, Tensor]]:
    """What all ranks should have alike, by its name; nothing where each has something of its own.

    Ranks that train apart have what they came to at their last outer step.
    """
    if state.recipe.strategy.is_replicated:
        return state.module.named_parameters()
    if isinstance(state.exchange, Apart):
        return state.exchange.agreed()
    return ()


def blocks(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """The parameters of each block, in their order.

    A block is a child of the model or, of a list of layers, one of those; `MAX_BLOCKS` at most: of
    more, neighbours are one.
    """
    found: dict[str, list[Tensor]] = {}
    for name, tensor in parameters:
        first, *rest = name.split(".")
        is_listed = len(rest) > 1 and rest[0].isdigit()
        found.setdefault(f"{first}.{rest[0]}" if is_listed else first, []).append(tensor)
    if len(found) <= MAX_BLOCKS:
        return found
    together: dict[str, list[Tensor]] = {}
    names: dict[int, str] = {}
    for place, (name, tensors) in enumerate(found.items()):
        first = names.setdefault(place * MAX_BLOCKS // len(found), name)
        together.setdefault(first, []).extend(tensors)
    return together


def stride_of(tensors: Iterable[Tensor]) -> int:
    """One value in so many is looked at."""
    return max(1, -(-sum(tensor.nbytes for tensor in tensors) // MAX_BYTES))


@torch.no_grad()
def digest(tensors: Iterable[Tensor], stride: int, turn: int) -> float:
    """Of the bytes of these values, bit for bit; equal for equal ones on every rank.

    Args:
        tensors: of one block, on one device.
        stride: one value in so many is looked at, of each tensor at least one.
        turn: which; after `stride` turns all were looked at.
    """
    parts = [
        tensor.detach().flatten()[turn % max(1, min(stride, tensor.numel())) :: stride]
        for tensor in tensors
    ]
    # A clone: a slice of one value counts as contiguous, and cannot be seen as bytes all the same.
    plain = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    raw = torch.cat([part.view(torch.uint8) for part in plain]).cpu()
    whole = int.from_bytes(hashlib.sha256(raw.numpy().data).digest()[:8], "little")
    return float(whole >> (64 - DIGEST_BITS))
