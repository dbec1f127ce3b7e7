"""Who is in the group of one generation. Pure."""

from __future__ import annotations

import msgspec

from nbdist.protocol.ids import EngineId, Generation, Rank, Slot


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a membership."""

    slot: Slot
    engine_id: EngineId
    pid: int
    host: str


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen map rank -> engine for one generation.

    A rank is a place in `members`, which are in slot order.
    """

    generation: Generation
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        slots = [m.slot for m in self.members]
        if slots != sorted(set(slots)):
            raise ValueError(f"members must be in slot order, each slot once: {slots}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots in rank order."""
        return tuple(m.slot for m in self.members)

    def rank_of(self, slot: Slot) -> Rank:
        """Rank of the engine on `slot`; KeyError where the slot is not in this membership."""
        for rank, member in enumerate(self.members):
            if member.slot == slot:
                return Rank(rank)
        raise KeyError(slot)

    def __contains__(self, slot: Slot) -> bool:
        return any(m.slot == slot for m in self.members)


EMPTY = Membership(generation=Generation(0), members=())
"""No group has been formed."""
