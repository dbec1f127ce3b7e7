"""How much is measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.cli.bench import BENCHMARKS

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does.

    Each round does everything once, so that a machine that slows down slows all of it.
    """

    only: tuple[str, ...] = BENCHMARKS
    """Names of the benchmarks, in the order in which they are reported."""
    num_rounds: int = DEFAULT_ROUNDS
    """Rounds; each starts its own processes and clusters."""
    num_pairs: int = 75
    """Empty cells in a round."""
    num_blocks: int = 6
    """Blocks of training steps in a round."""
    num_kills_at_4: int = 3
    """Engines killed in a round, of a cluster of four."""
    num_kills_in_run: int = 5
    """Engines killed in a round under a training run."""
    num_kills_at_8: int = 2
    """Likewise of eight. In the default number of rounds every rank is killed, of either."""

    @classmethod
    def of(cls, *, only: Sequence[str] | None, rounds: int | None, is_quick: bool) -> Plan:
        """The plan that the options ask for; None: the default."""
        chosen = tuple(name for name in BENCHMARKS if not only or name in only)
        if is_quick:
            return cls(
                only=chosen,
                num_rounds=rounds or 1,
                num_pairs=20,
                num_blocks=2,
                num_kills_at_4=1,
                num_kills_at_8=1,
                num_kills_in_run=2,
            )
        return cls(only=chosen, num_rounds=rounds or DEFAULT_ROUNDS)

    def wants(self, *names: str) -> bool:
        """Whether one of these benchmarks is to be run."""
        return any(name in self.only for name in names)

    def victims(self, round_number: int, size: int) -> list[int]:
        """The ranks to kill in a round, counted from 0: one after the other, over all rounds."""
        num_kills = self.num_kills_at_8 if size == 8 else self.num_kills_at_4
        first = round_number * num_kills
        return [index % size for index in range(first, first + num_kills)]

    def __str__(self) -> str:
        rounds = "1 round" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return f"{', '.join(self.only)}; {rounds}"
