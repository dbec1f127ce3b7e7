"""Which names a newcomer is given, decided from digests of everybody's values. Pure.

A name is copied when it is equal on all survivors, and missing or different on the newcomer. What
survivors hold differently (`x = rank`) is the newcomer's own, made by the replay. The trainer of a
run goes from the lowest holder of the newest step to newcomers and to members that lag a step
behind, and counts as handed over only when its digest is the holder's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol.runs import TRAINER
from nbdist.supervisor.instructions import Instruction, Tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.ids import Generation, Slot
    from nbdist.protocol.runs import RunSpec
    from nbdist.protocol.topology import Membership

REPLICATED = ("module:", "optimizer:", "ddp:", "trainer:")
"""Kinds that are replicas of one another by nature.

With a single survivor "equal on all" says nothing: then only these, and names that the newcomer
lacks, are copied.
"""

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


HandoverEvent = ev.NamesFingerprinted | ev.NamesOffered | ev.NamesReceived


class Handover:
    """One hand-over: digests are collected, names offered by the donor, received by newcomers.

    Args:
        membership: the group that has just been formed.
        newcomers: members that lack what the others hold.
        run: a run that is under way.
        steps: slot -> steps that its trainer has committed; None: it has no trainer yet.
    """

    def __init__(
        self,
        membership: Membership,
        newcomers: tuple[Slot, ...],
        run: RunSpec | None = None,
        steps: Mapping[Slot, int | None] = MappingProxyType({}),
    ) -> None:
        self._membership = membership
        self._newcomers = newcomers
        self._survivors = tuple(s for s in membership.slots if s not in newcomers)
        held = {s: step for s in self._survivors if (step := steps.get(s)) is not None}
        self.run = run if held else None
        """The run whose trainer is handed over; None where nobody holds one."""
        self._steps = steps
        self.step = max(held.values(), default=0)
        """The newest step that a member has committed."""
        is_run = self.run is not None
        self._donor = next(s for s in self._survivors if not is_run or held.get(s) == self.step)
        self._laggards = tuple(s for s in self._survivors if is_run and held.get(s) != self.step)
        self._digest = ""
        """Of the donor's trainer."""
        self.unfit: dict[Slot, str] = {}
        """Members whose trainer is not the donor's after all, and why."""
        self._digests: dict[Slot, dict[str, str]] = {}
        self._plan: Plan | None = None
        self._receivers: list[Slot] = []
        self.unsettled: dict[Slot, dict[str, str]] = {}
        """Newcomer -> name -> why it could not be given its value."""

    @property
    def is_done(self) -> bool:
        """Every newcomer has what can be given."""
        return self._plan is not None and not self._receivers and not self.unfit

    @property
    def is_needed(self) -> bool:
        """Whether anybody lacks anything."""
        return bool(self._newcomers or self._laggards)

    @property
    def silent(self) -> tuple[Slot, ...]:
        """Members whose part is waited for."""
        if self._plan is not None:
            return tuple(self._receivers)
        return tuple(s for s in self._membership.slots if s not in self._digests)

    def begin(self) -> list[Instruction]:
        """Ask everybody for digests; without a newcomer, have the trainer offered at once."""
        if not self._newcomers:
            self._plan = Plan({}, {})
            return self._ask_donor(self._membership.generation)
        order = od.FingerprintNames(generation=self._membership.generation)
        return [Tell(slot, order) for slot in self._membership.slots]

    def drop_run(self) -> None:
        """The run is over: engines let go of its trainer, so that nobody is given it any more."""
        self.run, self._laggards = None, ()
        self.unfit.clear()

    def take(self, event: HandoverEvent) -> list[Instruction]:
        """What follows from an event."""
        match event:
            case ev.NamesFingerprinted():
                return self._fingerprinted(event)
            case ev.NamesOffered():
                return self._offered(event)
            case ev.NamesReceived():
                if event.slot in self._receivers:
                    self._receivers.remove(event.slot)
                    self._received(event)
                return []

    def _fingerprinted(self, event: ev.NamesFingerprinted) -> list[Instruction]:
        self._digests[event.slot] = event.digests
        if self._plan is not None or self.silent:
            return []
        self._plan = self._decide()
        self.unsettled = {slot: dict(why) for slot, why in self._plan.unsettled.items()}
        return self._ask_donor(event.generation)

    def _ask_donor(self, generation: Generation) -> list[Instruction]:
        assert self._plan is not None
        name = self.run.name if self.run is not None else ""
        for slot in (*self._newcomers, *self._laggards) if self.run is not None else ():
            is_there = self._steps.get(slot) is not None
            if not is_there and not name and slot in self._newcomers:
                continue  # it came when the cell whose loop held the trainer was over
            names = [n for n in self._plan.names.get(slot, ()) if n != name]
            self._plan.names[slot] = (*names, *(() if is_there or not name else (name,)), TRAINER)
        self._receivers = sorted(slot for slot, names in self._plan.names.items() if names)
        if not self._receivers:
            return []
        ranks = tuple(int(self._membership.rank_of(slot)) for slot in self._receivers)
        order = od.OfferNames(generation=generation, names=self._plan.all_names, receivers=ranks)
        return [Tell(self._donor, order)]

    def _received(self, event: ev.NamesReceived) -> None:
        if self.run is not None and event.trainer_digest != self._digest:
            why = event.failed.get(TRAINER, "its digest is another")
            self.unfit[event.slot] = f"its trainer is not the donor's after the hand-over: {why}"
        others = {name: why for name, why in event.failed.items() if name != TRAINER}
        self.unsettled.setdefault(event.slot, {}).update(others)

    def _offered(self, event: ev.NamesOffered) -> list[Instruction]:
        out: list[Instruction] = []
        if self._plan is None:
            return out
        self._digest = event.trainer_digest
        if TRAINER in event.failed or (self.run is not None and not self._digest):
            # Its state is as good as before, and it may be the last that has one: it trains on.
            why = event.failed.get(TRAINER, "no digest came with it")
            rank = self._membership.rank_of(event.slot)
            text = f"rank {rank} could not give it the trainer: {why}"
            wanting = [s for s in self._receivers if TRAINER in self._plan.names[s]]
            self.unfit |= dict.fromkeys(wanting, text)
            return out
        for slot in self._receivers:
            names = self._plan.names[slot]
            failed = {n: why for n, why in event.failed.items() if n in names}
            self.unsettled.setdefault(slot, {}).update(failed)
            order = od.ReceiveNames(
                generation=event.generation,
                donor=self._membership.rank_of(event.slot),
                sha256=event.sha256,
                num_bytes=event.num_bytes,
                names=tuple(n for n in names if n not in event.failed),
            )
            out.append(Tell(slot, order))
        return out

    def _decide(self) -> Plan:
        held = [self._digests[slot] for slot in self._survivors]
        common = {
            name: held[0][name]
            for name in held[0]
            if all(d.get(name) == held[0][name] for d in held)
        }
        plan = Plan({}, {})
        for slot in self._newcomers:
            mine = self._digests[slot]
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
            on_all = set(held[0]).intersection(*held) - set(common)
            for name in sorted(on_all):
                kind = held[0][name]
                if kind.startswith(REPLICATED):
                    unsettled[name] = "differs between the survivors, though it should be a replica"
                elif name not in mine and not kind.startswith(IMPORTED):
                    unsettled[name] = (
                        "differs between the survivors, and the replay did not make it"
                    )
            plan.names[slot] = tuple(sorted(names))
            plan.unsettled[slot] = unsettled
        return plan
