"""What ranks send to one another: the collectives, between whom, and what each of them costs. Pure.

Engines tell of each as telemetry. A payload is what a rank hands over; of it follows by a formula
what a rank has to send at least, whichever way the backend goes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_OPS, _AXES = 16, 16


class Op(IntEnum):
    """What is done with payloads."""

    ALL_REDUCE = 1
    """All have the sum of all."""
    ALL_GATHER = 2
    """All have everybody's; the payload is one rank's own."""
    REDUCE_SCATTER = 3
    """Each has its part of the sum of all; the payload is a whole."""
    ALL_TO_ALL = 4
    """Each has everybody's part for it; the payload is all parts of one rank, its own too."""
    BROADCAST = 5
    """All have the first one's."""
    SEND = 6
    """One other rank has it."""


class Axis(IntEnum):
    """Between which ranks."""

    DATA = 1
    """Those that take other parts of a batch."""
    PIPELINE = 2
    """Those that have other stages."""
    TENSOR = 3
    """Those that have other parts of each layer."""
    ALL = 4
    """All of the group: votes, norms, buffers, a beginning's weights."""
    COPIES = 5
    """Each and the next one, which keeps a copy of its state."""


OPS = {
    Op.ALL_REDUCE: "all-reduce",
    Op.ALL_GATHER: "all-gather",
    Op.REDUCE_SCATTER: "reduce-scatter",
    Op.ALL_TO_ALL: "all-to-all",
    Op.BROADCAST: "broadcast",
    Op.SEND: "send",
}
AXES = {
    Axis.DATA: "data",
    Axis.PIPELINE: "pipeline",
    Axis.TENSOR: "tensor",
    Axis.ALL: "all ranks",
    Axis.COPIES: "copies",
}
SHARES: dict[Op, tuple[str, Callable[[int], float]]] = {
    Op.ALL_REDUCE: ("2(n−1)/n", lambda n: 2 * (n - 1) / n),
    Op.ALL_GATHER: ("n−1", lambda n: n - 1),
    Op.REDUCE_SCATTER: ("(n−1)/n", lambda n: (n - 1) / n),
    Op.ALL_TO_ALL: ("(n−1)/n", lambda n: (n - 1) / n),
    Op.BROADCAST: ("1", lambda _: 1),
    Op.SEND: ("1", lambda _: 1),
}
"""Of n ranks each sends so many times its payload: as a formula, and reckoned."""


class Road(NamedTuple):
    """What is done, between whom, and between how many of them."""

    op: Op
    axis: Axis
    num_ranks: int

    def sent_bytes(self, payload_bytes: float) -> float:
        """What a rank has to send for it at least."""
        return payload_bytes * SHARES[self.op][1](self.num_ranks)


def packed(op: Op, axis: Axis, num_ranks: int) -> int:
    """As a record names it."""
    return (num_ranks * _AXES + axis) * _OPS + op


def unpacked(ident: int) -> Road:
    """The other way round.

    Raises:
        ValueError: it names nothing that is known.
    """
    rest, op = divmod(ident, _OPS)
    num_ranks, axis = divmod(rest, _AXES)
    return Road(Op(op), Axis(axis), num_ranks)
