"""A run second by second, as lines of text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.protocol.record import World
    from nbdist.supervisor.replay import Replay

_MAX_IDLE_LINES = 3
"""Of more seconds without a step, one line tells."""


@dataclass(frozen=True, kw_only=True)
class Second:
    """What one second of a run came to."""

    number: int
    step: int
    """Steps committed at its end."""
    loss: float
    """Of its last step."""
    rate: float
    """Samples, or tokens where the run counts them, of each rank in this second."""
    unit: str
    world_size: int
    generation: int

    def __str__(self) -> str:
        return (
            f"{self.number:7d} s  step {self.step:6d}  loss {self.loss:8.4f}  "
            f"{self.rate:9,.0f} {self.unit}/s per rank  "
            f"world {self.world_size}  generation {self.generation}"
        )


def lines(replay: Replay) -> Iterator[str]:
    """A line for each second up to the last step; some for a longer time without any."""
    expected = 0
    for second in seconds(replay):
        yield from _idle(replay, expected, second.number)
        yield str(second)
        expected = second.number + 1


def seconds(replay: Replay) -> Iterator[Second]:
    """The seconds in which steps were committed."""
    rows = replay.rows
    numbers = np.floor(rows["at"] - replay.header.at).astype(np.int64)
    for number in np.unique(numbers).tolist():
        here = rows[numbers == number]
        last = here[-1]
        has_tokens = bool(replay.tokens)
        done = replay.tokens.get(number, 0.0) if has_tokens else float(here["samples"].sum())
        yield Second(
            number=number,
            step=int(last["step"]) + 1,
            loss=float(last["loss"]),
            rate=done / max(1, int(last["world_size"])),
            unit="tokens" if has_tokens else "samples",
            world_size=int(last["world_size"]),
            generation=int(last["generation"]),
        )


def _idle(replay: Replay, begin: int, end: int) -> Iterator[str]:
    """Seconds in which no step was committed."""
    if end - begin > _MAX_IDLE_LINES:
        yield f"{begin:7d} s  to {end - 1} s: no step{_world_at(replay, end)}"
        return
    for number in range(begin, end):
        yield f"{number:7d} s  no step{_world_at(replay, number + 1)}"


def _world_at(replay: Replay, second: int) -> str:
    """What the world was then, in words; empty where the record does not say."""
    world: World | None = None
    for one in replay.worlds:
        if one.at - replay.header.at < second:
            world = one
    if world is None:
        return ""
    why = f" ({world.reason})" if world.reason else ""
    return f"; {world.phase}{why}, world {len(world.slots)}, generation {world.generation}"
