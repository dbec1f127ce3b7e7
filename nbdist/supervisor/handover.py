"""Which names a newcomer is given, decided from digests of everybody's values. Pure.

A name is copied when it is equal on all survivors, and missing or different on the newcomer. What survivors hold
differently (`x = rank`) is the newcomer's own, made by the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nbdist.protocol.ids import Slot

REPLICATED = ("module:", "optimizer:", "ddp:")
"""Kinds that are replicas of one another by nature. With a single survivor "equal on all" says nothing, so that then
only these, and names that the newcomer lacks, are copied."""


IMPORTED = "import:"
"""A module that only some survivors have imported is nobody's state."""


@dataclass(frozen=True)
class Plan:
    """Names that go to each newcomer, and what cannot be settled."""

    names: dict[Slot, tuple[str, ...]]
    unsettled: dict[Slot, dict[str, str]]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Everything that the donor packs."""
        return tuple(sorted({name for names in self.names.values() for name in names}))


@dataclass
class Handover:
    """Collects digests until all members have sent theirs."""

    survivors: tuple[Slot, ...]
    newcomers: tuple[Slot, ...]
    digests: dict[Slot, dict[str, str]] = field(default_factory=dict)
    plan: Plan | None = None
    awaited: set[Slot] = field(default_factory=set)

    def add(self, slot: Slot, digests: dict[str, str]) -> bool:
        """Take one member's digests; True once the plan is made."""
        self.digests[slot] = digests
        if self.plan is None and set(self.digests) >= {*self.survivors, *self.newcomers}:
            self.plan = self._decide()
            self.awaited = {slot for slot, names in self.plan.names.items() if names}
            return True
        return False

    def _decide(self) -> Plan:
        held = [self.digests[slot] for slot in self.survivors]
        common = {
            name: held[0][name]
            for name in held[0]
            if all(d.get(name) == held[0][name] for d in held)
        }
        plan = Plan({}, {})
        for slot in self.newcomers:
            mine = self.digests[slot]
            names, unsettled = [], {}
            for name, digest in common.items():
                if mine.get(name) == digest and digest:
                    continue
                if not digest:
                    if name not in mine:
                        unsettled[name] = "missing, and its value cannot be copied"
                elif len(held) > 1 or name not in mine or digest.startswith(REPLICATED):
                    names.append(name)
                else:
                    unsettled[name] = "differs from the only survivor's; kept as the replay made it"
            missing = {n for d in held for n in d if not d[n].startswith(IMPORTED)}
            missing -= {*common, *mine}
            unsettled |= dict.fromkeys(
                sorted(missing), "differs between the survivors, and the replay did not make it"
            )
            plan.names[slot] = tuple(sorted(names))
            plan.unsettled[slot] = unsettled
        return plan
