"""What trainers that are gone hold is let go; errors that say that memory ran out say for what.

Runs in the engine's main thread, or in a process of its own.
"""

from __future__ import annotations

import resource
import weakref
from typing import TYPE_CHECKING

import torch

from nbdist.engine.room import give_back
from nbdist.errors import OutOfMemory

if TYPE_CHECKING:
    from torch import nn

    from nbdist.train.strategies import Strategy

_SAID = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "could not create a primitive",
)
"""How torch says it, and oneDNN, where a plain RuntimeError is raised."""
_LIMITS = {"RLIMIT_DATA": resource.RLIMIT_DATA, "RLIMIT_AS": resource.RLIMIT_AS}

_held: list[tuple[weakref.ref[object], weakref.ref[object]]] = []
"""Trainers of this process, and what each of them holds."""


def note(trainer: object, state: object) -> None:
    """A trainer holds this; once it is gone, `make_room` lets go of it."""
    _held.append((weakref.ref(trainer), weakref.ref(state)))


def make_room() -> None:
    """Before a trainer is made: let go of what those hold that are gone.

    torch's wrappers make cycles, through which gigabytes may wait until Python looks for them.
    """
    _held[:] = [pair for pair in _held if pair[1]() is not None]
    if any(trainer() is None for trainer, _ in _held):
        give_back()


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory has run out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def explained(
    error: BaseException, strategy: Strategy, module: nn.Module | None = None
) -> BaseException:
    """What to raise in place of an error: itself, or where memory ran out, what says more.

    Args:
        error: any.
        strategy: of the trainer.
        module: what this rank holds of the model; None: it is being made.
    """
    if not is_exhausted(error) or isinstance(error, OutOfMemory):
        return error
    said = OutOfMemory(f"{_what(module)}{_limit()}. {strategy.relief}")
    said.__cause__ = error
    return said


def _what(module: nn.Module | None) -> str:
    if module is None:
        return "memory ran out while the model was being made"
    parameters = list(module.parameters())
    size_mb = sum(p.nbytes for p in parameters) / 1e6
    return (
        f"memory ran out in training: this rank holds {sum(p.numel() for p in parameters):,} "
        f"parameters, {size_mb:,.0f} MB; gradients take as much again, and what the optimizer "
        "keeps comes on top (Adam: twice as much)"
    )


def _limit() -> str:
    """What the process may have, where it is limited."""
    limits = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    given = [f"{n} is {v / 1e6:,.0f} MB" for n, v in limits.items() if v != resource.RLIM_INFINITY]
    return f" ({', '.join(given)})" if given else ""
