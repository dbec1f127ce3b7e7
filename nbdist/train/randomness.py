"""The global random generators of torch, Python and numpy: seeded for a while, then put back.

So what a step draws follows from the step, and the user's own code goes on with its own random
numbers once training stands. Runs in the engine's main thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept:
    """The state of the global generators, as it is when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._generators = _torch_generators(device)
        self._torch = [generator.get_state() for generator in self._generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def put_back(self) -> None:
        """Have it again."""
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def seed_of(*key: int) -> int:
    """A seed of 63 bits for a key: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the global generators."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The global generators seeded within, and put back afterwards."""
    kept = Kept(device)
    seed_all(seed, device)
    try:
        yield
    finally:
        kept.put_back()


def _torch_generators(device: torch.device) -> list[torch.Generator]:
    """torch's own, and the device's."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]
