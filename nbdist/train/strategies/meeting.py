"""How ranks that train apart find together in a new group: who lacks what, and who gives it.

The rules are pure; `gather` and `pass_on` communicate, in the engine's main thread.
"""

from __future__ import annotations

import enum
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.train.strategies.copies import pass_on
from nbdist.train.strategies.data_parallel import sum_on_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.train.strategies.base import Place

__all__ = [
    "Lack",
    "Stand",
    "gather",
    "gather_numbers",
    "gather_rows",
    "giver",
    "lack",
    "packed",
    "pass_on",
    "unpacked",
]


class Stand(NamedTuple):
    """How far a rank has come."""

    ident: int
    """Of the rank, through all groups."""
    step: int
    num_ended: int
    """Outer steps that it has ended."""
    has_begun: bool
    """It has shared something with others."""


class Lack(enum.Flag):
    """What a rank lacks of what the one that gives has."""

    END = enum.auto()
    """The end of the last outer step: the group broke in it."""
    STEP = enum.auto()
    """The last step: the others had all votes, and this one had not."""
    ALL = enum.auto()
    """Everything: it joins."""


def lack(stand: Stand, top: Stand) -> Lack:
    """What a rank lacks."""
    steps, ends = top.step - stand.step, top.num_ended - stand.num_ended
    if not stand.has_begun or steps not in (0, 1) or ends not in (0, 1):
        return Lack.ALL
    return (Lack.STEP if steps else Lack(0)) | (Lack.END if ends else Lack(0))


def giver(stands: Sequence[Stand]) -> int | None:
    """The lowest of those that have come furthest; None: nobody has begun."""
    begun = [at for at, stand in enumerate(stands) if stand.has_begun]
    return max(begun, key=lambda at: (stands[at].step, stands[at].num_ended, -at), default=None)


def gather(own: Stand, place: Place) -> list[Stand]:
    """How far each rank of the present group has come."""
    rows = gather_rows([int(value) for value in own], place)
    return [Stand(ident, step, num, bool(has)) for ident, step, num, has in rows]


def gather_numbers(own: int, place: Place) -> list[int]:
    """The numbers of all ranks."""
    return [number for (number,) in gather_rows([own], place)]


def gather_rows(own: Sequence[int], place: Place) -> list[list[int]]:
    """Rows of numbers of all ranks."""
    table = torch.zeros(place.num_places, len(own), dtype=torch.int64)
    table[place.at] = torch.tensor(own)
    if place.num_places > 1:
        sum_on_backend(table)
    rows: list[list[int]] = table.tolist()
    return rows


def packed(value: dict[str, Any]) -> bytes:
    """As torch writes it to files."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """What was packed; it came over the group, and nothing in it is run."""
    loaded: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return loaded
