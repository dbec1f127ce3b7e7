"""A batch's way through a pipeline: what was computed when, who waited, beside the plan. Pure.

For what is drawn from tables in Python; the live view reckons by the same rules (`pipeline.js`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.plans import KINDS, TAKES, Action, needed_from_others
from nbdist.protocol.telemetry import Kind
from nbdist.views.palette import FAINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.protocol.tables import Table

_LETTERS = {int(kind): letter for letter, kind in KINDS.items()}
_PASSED_ON = (int(Kind.SEND), int(Kind.RECEIVE))
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to inputs",
    "W": "backward to weights",
}
COLOURS = {"F": "#56B4E9", "B": "#0072B2", "I": "#0072B2", "W": "#009E73"}
PALE_COLOURS = {kind: f"{colour}66" for kind, colour in COLOURS.items()}
"""Of what is planned: half clear, for light and dark pages alike."""
WAIT_COLOUR = FAINT
_LIKE_FORMULA = 0.005
"""A formula that gives something else is not that of this plan."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """An action of a slot that lasted, in seconds since the first began; of a plan in forwards."""

    slot: int
    action: Action
    began: float
    ended: float

    @property
    def what(self) -> str:
        """In words."""
        stage, kind, microbatch = self.action
        return f"{NAMES[kind]}, micro-batch {microbatch}, stage {stage}"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A slot had nothing to compute until something came from another one."""

    slot: int
    whom: int
    """The other slot."""
    microbatch: int
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Passage:
    """One attempt at a step."""

    step: int
    parts: list[Part]
    """In the order in which they ended."""
    planned: list[Part] = field(default_factory=list)
    """Empty where the plan is not known."""

    @property
    def slots(self) -> list[int]:
        """From the first stage on."""
        first: dict[int, int] = {}
        for part in self.parts:
            first[part.slot] = min(part.action.stage, first.get(part.slot, part.action.stage))
        return sorted(first, key=lambda slot: (first[slot], slot))

    def stages(self, slot: int) -> list[int]:
        """Those of a slot."""
        return sorted({part.action.stage for part in self.parts if part.slot == slot})

    @property
    def end(self) -> float:
        """Seconds from the first beginning to the last end."""
        return max(part.ended for part in self.parts)

    @property
    def idle(self) -> float:
        """The share of the slots' time in which they did not compute."""
        return _idle(self.parts)

    @property
    def idle_planned(self) -> float:
        """The same of the plan; NaN where that is not known."""
        return _idle(self.planned) if self.planned else float("nan")

    @property
    def forward_s(self) -> float:
        """What one of the plan's units lasted in this step."""
        units = sum(TAKES[part.action.kind] for part in self.parts)
        return sum(part.ended - part.began for part in self.parts) / units

    @property
    def waits(self) -> list[Wait]:
        """Times in which a slot waited for what another one sends."""
        lines = _lines(self.planned or self.parts)
        whose = {(lines.get(p.slot, 0), p.action.stage): p.slot for p in self.parts}
        num_stages = len({stage for _, stage in whose})
        found: list[Wait] = []
        until: dict[int, float] = defaultdict(float)
        for part in sorted(self.parts, key=lambda part: part.began):
            needed, line = needed_from_others(part.action, num_stages), lines.get(part.slot, 0)
            whom = whose.get((line, needed[0].stage), part.slot) if needed else part.slot
            began = until[part.slot]
            if whom != part.slot and part.began > began:
                found.append(
                    Wait(
                        slot=part.slot,
                        whom=whom,
                        microbatch=part.action.microbatch,
                        began=began,
                        ended=part.began,
                    )
                )
            until[part.slot] = part.ended
        return found

    def most_at_once(self, slot: int) -> int:
        """Micro-batches that have gone forward on a slot's stages and not yet backward, at most."""
        now = most = 0
        for part in self.parts:
            if part.slot == slot and part.action.kind != "W":
                now += 1 if part.action.kind == "F" else -1
                most = max(most, now)
        return most

    @property
    def formula(self) -> str:
        """By which the plan's idle share comes about; empty where no formula gives it."""
        lines = _lines(self.planned)
        num_ranks = len(lines) // (1 + max(lines.values(), default=0))
        stages = {part.action.stage for part in self.planned}
        num = 1 + max((part.action.microbatch for part in self.planned), default=0)
        if num_ranks < 2:
            return ""
        per_rank = len(stages) // num_ranks
        halves = 3 if any(part.action.kind == "W" for part in self.planned) else 1
        share = (num_ranks - 1) / (halves * per_rank * num + num_ranks - 1)
        if abs(share - self.idle_planned) > _LIKE_FORMULA:
            return ""
        factors = ("3·" if halves > 1 else "") + ("v·" if per_rank > 1 else "")
        with_v = f", v = {per_rank}" if per_rank > 1 else ""
        of_all = f" of {len(lines)} ranks" if len(lines) > num_ranks else ""
        return f"(p−1)/({factors}m+p−1) with p = {num_ranks}{of_all}{with_v}, m = {num}"

    @property
    def sentence(self) -> str:
        """What it shows."""
        slots = self.slots
        if len(slots) < 2:
            return f"Step {self.step}: one rank has all stages; nothing is sent, nobody waits."
        planned = "what was planned is not known"
        if self.planned:
            formula = f" = {self.formula}" if self.formula else " with equal forwards"
            planned = f"planned are {self.idle_planned:.0%}{formula}"
        waited = dict.fromkeys(slots, 0.0)
        for wait in self.waits:
            waited[wait.slot] += wait.ended - wait.began
        longest = max(slots, key=lambda slot: waited[slot])
        fullest = max(slots, key=self.most_at_once)
        num = self.most_at_once(fullest)
        return (
            f"Step {self.step}: the bubble is {self.idle:.0%} of the ranks' time; {planned}. "
            f"Slot {longest} waits longest for others, {waited[longest] * 1000:,.1f} ms; slot "
            f"{fullest} holds {num} micro-batch{'' if num == 1 else 'es'} at once."
        )


def is_pipeline(tables: Mapping[str, Table]) -> bool:
    """Whether the run was one, as far as its tables tell."""
    plans, spans = tables.get("plans"), tables.get("spans")
    is_planned = plans is not None and len(plans["slot"]) > 0
    return is_planned or (spans is not None and bool(np.isin(spans["kind"], _PASSED_ON).any()))


def newest_passage(tables: Mapping[str, Table]) -> Passage | None:
    """Of the newest attempt at a step that went through all stages; None: no step is known.

    Where none did, the newest one.
    """
    spans = tables.get("spans")
    if spans is None or not is_pipeline(tables):
        return None
    attempts: dict[tuple[float, ...], list[Part]] = {}
    names = ("generation", "step", "attempt")
    for place in np.flatnonzero(np.isin(spans["kind"], list(_LETTERS))).tolist():
        key = tuple(float(spans[name][place]) for name in names)
        attempts.setdefault(key, []).append(_part(spans, place, "value", "began_at", "ended_at"))
    newest = None
    for key in sorted(attempts, reverse=True):
        passage = _passage(key, attempts[key], tables.get("plans"))
        newest = newest or passage
        if _is_whole(passage):
            return passage
    return newest


def _passage(key: tuple[float, ...], parts: list[Part], plans: Table | None) -> Passage:
    zero = min(part.began for part in parts)
    shifted = [
        Part(slot=p.slot, action=p.action, began=p.began - zero, ended=p.ended - zero)
        for p in sorted(parts, key=lambda part: part.ended)
    ]
    planned: list[Part] = []
    if plans is not None:
        its = np.flatnonzero(plans["generation"] == key[0]).tolist()
        planned = [_part(plans, place, "stage", "began", "ended") for place in its]
    return Passage(step=int(key[1]), parts=shifted, planned=planned)


def _is_whole(passage: Passage) -> bool:
    """Each stage went backward as often as forward, and all stages as often."""
    counts: dict[int, int] = defaultdict(int)
    for part in passage.parts:
        if part.action.kind != "W":
            counts[part.action.stage] += 1
    is_even = len(set(counts.values())) == 1 and max(counts) + 1 == len(counts)
    num = sum(part.action.kind != "W" for part in passage.planned)
    return is_even and num in (0, sum(counts.values()))


def _part(table: Table, place: int, stage: str, began: str, ended: str) -> Part:
    kind, microbatch = _LETTERS[int(table["kind"][place])], int(table["ident"][place])
    return Part(
        slot=int(table["slot"][place]),
        action=Action(int(table[stage][place]), kind, microbatch),
        began=float(table[began][place]),
        ended=float(table[ended][place]),
    )


def _lines(parts: Iterable[Part]) -> dict[int, int]:
    """Slot -> its pipeline of those side by side: slots with the same stages are twins."""
    stages: dict[int, set[int]] = defaultdict(set)
    for part in parts:
        stages[part.slot].add(part.action.stage)
    twins: Counter[frozenset[int]] = Counter()
    lines = {}
    for slot in sorted(stages):
        own = frozenset(stages[slot])
        lines[slot], twins[own] = twins[own], twins[own] + 1
    return lines


def _idle(parts: list[Part]) -> float:
    num = len({part.slot for part in parts})
    length = max(part.ended for part in parts) - min(part.began for part in parts)
    busy = sum(part.ended - part.began for part in parts)
    return 1 - busy / (num * length) if length > 0 else 0.0
