"""Who is what where one rank is a parameter server. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Roles(NamedTuple):
    """Ranks of a group."""

    server: int
    replica: int | None
    workers: tuple[int, ...]
    """None: the server is alone, and trains."""

    @classmethod
    def of(cls, num_ranks: int, server: int, *, has_replica: bool) -> Roles:
        """In a group of this size."""
        first = min(server, num_ranks - 1)
        second = (first + 1) % num_ranks if has_replica and num_ranks > 2 else None
        rest = tuple(rank for rank in range(num_ranks) if rank not in (first, second))
        return cls(first, second, rest)

    @property
    def holders(self) -> set[int]:
        """Who holds the optimizer."""
        return {self.server} if self.replica is None else {self.server, self.replica}
