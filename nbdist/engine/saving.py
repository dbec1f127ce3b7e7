"""Checkpoints on this engine: what the kernel calls between two steps, and the thread that writes.

The calls run in the main thread. A state is copied in the call; a thread writes the copy while
training goes on, and says so to the supervisor where it cannot.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch.distributed as dist

from nbdist import checkpoints
from nbdist.engine import runs
from nbdist.engine.port import is_trainer
from nbdist.errors import WrongState
from nbdist.protocol import saves as sv

if TYPE_CHECKING:
    from nbdist.engine.runs import Runs

log = logging.getLogger(__name__)
_read: dict[str, tuple[Any, Any]] = {}
"""Name -> the trainer and what was read for it, between `read` and `take`."""


class Part(Protocol):
    """A copy of what this rank writes: `train.checkpoint.Part`."""

    @property
    def num_bytes(self) -> int:
        """Of the copy."""

    def write(self, partial: Path) -> None:
        """Write it, and leave the receipt."""


class Savable(Protocol):
    """A trainer, as far as its checkpoints go."""

    @property
    def step(self) -> int:
        """Committed steps."""

    def part(self, rank: int, num_ranks: int) -> Part:
        """A copy of what this rank is to write."""

    def read(self, folder: Path) -> Any:
        """Read a checkpoint; changes nothing."""

    def take(self, loaded: Any) -> None:
        """Have what was read."""


def standing(name: str | None) -> tuple[str, int]:
    """`protocol.calls.STANDING`."""
    name, trainer = _find(name)
    return name, trainer.step


def save(name: str, partial: str) -> int:
    """`protocol.calls.SAVE`."""
    _, trainer = _find(name)
    part = trainer.part(dist.get_rank(), dist.get_world_size())
    writer = threading.Thread(
        target=_write, args=(_present(), part, partial), name="nbdist-checkpoint", daemon=True
    )
    writer.start()
    return part.num_bytes


def read(name: str, folder: str) -> tuple[int, list[str]]:
    """`protocol.calls.READ`."""
    _, trainer = _find(name)
    loaded = trainer.read(Path(folder))
    _read[name] = trainer, loaded
    return loaded.step, loaded.notes


def take(name: str, *, is_wanted: bool) -> None:
    """`protocol.calls.TAKE`."""
    found = _read.pop(name, None)
    if is_wanted:
        assert found is not None  # this call comes after that of `read`
        trainer, loaded = found
        trainer.take(loaded)


def _write(present: Runs, part: Part, partial: str) -> None:
    """In a thread of its own."""
    path = Path(partial)
    try:
        part.write(path)
    except OSError as error:
        kind, message = "FileUnwritable", checkpoints.unwritable(path.parent, error)
    except Exception as error:
        log.exception("a checkpoint could not be written")
        kind, message = "SaveAbandoned", f"{path}: {type(error).__name__}: {error}"
    else:
        return
    log.warning("%s", message)
    slot, pid = present.slot, os.getpid()
    present.tell(sv.PartFailed(slot=slot, pid=pid, partial=partial, kind=kind, message=message))


def _find(name: str | None) -> tuple[str, Savable]:
    """A trainer and its name; None: the one that trains, or the only one there is.

    Raises:
        NameError: the name is not bound here.
        TypeError: it is bound to something else.
        WrongState: there is no trainer, or more than one.
    """
    its = _present()
    names = [n for n, value in its.user_ns.items() if is_trainer(value) and n[0] != "_"]
    if name is None and its.trained_name in names:
        name = its.trained_name
    if name is None:
        if len({id(its.user_ns[n]) for n in names}) != 1:
            shown = f"are {', '.join(names)}: say which" if names else "is none"
            raise WrongState(f"which trainer? On slot {its.slot} there {shown}")
        name = names[0]
    if name not in its.user_ns:
        raise NameError(f"name {name!r} is not defined on slot {its.slot}")
    trainer = its.user_ns[name]
    if not is_trainer(trainer):
        raise TypeError(f"{name} is a {type(trainer).__name__}, not a nbdist.train.Trainer")
    return name, cast("Savable", trainer)


def _present() -> Runs:
    present = runs.present()
    if present is None:
        raise RuntimeError("this process is no engine of nbdist")
    return present
