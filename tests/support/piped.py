"""A made-up run of a pipeline: four ranks, one stage on each, and what was planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from synthetic import SyntheticRun

from nbdist.protocol.plans import KINDS, TAKES, needed_from_others, walk
from nbdist.protocol.traffic import Axis, Op, Road
from nbdist.train.strategies.actions import parse
from nbdist.train.strategies.schedules import one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.protocol.plans import Action

FORWARD_S = 0.012
DELAY_S = 0.002
"""Until what one rank sends is on the next one."""
STEP_S = 0.65
SENT_BYTES = 65_536.0


def orders(num_ranks: int, num_microbatches: int) -> dict[int, list[Action]]:
    """What each rank is to do in "1f1b"."""
    return parse({rank: one_by_one(rank, num_ranks, num_microbatches) for rank in range(num_ranks)})


def passed(
    actions: Mapping[int, Sequence[Action]], num_stages: int, slow: Mapping[int, float]
) -> dict[Action, tuple[int, float, float]]:
    """When each action begins and ends, in seconds, and on which rank; some are slow."""
    done: dict[Action, tuple[int, float, float]] = {}
    next_at, ends = dict.fromkeys(actions, 0), dict.fromkeys(actions, 0.0)
    while any(next_at[rank] < len(listed) for rank, listed in actions.items()):
        for rank, listed in actions.items():
            if next_at[rank] == len(listed):
                continue
            action = listed[next_at[rank]]
            needed = needed_from_others(action, num_stages)
            there = [done[other][2] + DELAY_S for other in needed if other in done]
            if needed and not there:
                continue
            began = max([ends[rank], *there])
            ends[rank] = began + TAKES[action.kind] * FORWARD_S * slow.get(rank, 1.0)
            done[action] = rank, began, ends[rank]
            next_at[rank] += 1
    return done


class PipedRun(SyntheticRun):
    """Its whole course; before `KILL_AT` nobody is killed."""

    def __init__(
        self, *, num_slots: int = 4, num_microbatches: int = 8, length_s: float = 18.0
    ) -> None:
        self._orders = orders(num_slots, num_microbatches)
        self._passed = passed(self._orders, num_slots, {1: 1.25})
        self._planned: set[int] = set()
        super().__init__(num_slots=num_slots, length_s=length_s, has_details=False, step_s=STEP_S)

    def _step(self, at: float, step: int, generation: int) -> float:
        end = super()._step(at, step, generation)
        if generation not in self._planned:
            self._planned.add(generation)
            self._plan(at, generation)
        for action, (slot, began, ended) in self._passed.items():
            where = {"step": step, "slot": slot, "generation": generation, "attempt": 0}
            stage, kind, microbatch = action
            times = {"began_at": at + began, "ended_at": at + ended}
            self._add(
                "spans", end, **where, **times, kind=KINDS[kind], ident=microbatch, value=stage
            )
        for slot, listed in self._orders.items():
            where = {"step": step, "slot": slot, "generation": generation, "attempt": 0}
            num = len(listed) // (2 if slot in (0, self.num_slots - 1) else 1)
            for kind in (23, 24):
                passed_on = {"kind": kind, "ident": num, "value": num * SENT_BYTES}
                self._add("spans", end, **where, began_at=at, ended_at=end, **passed_on)
            sending = Road(Op.SEND, Axis.PIPELINE, 2)
            self._flow(end, sending, num, num * SENT_BYTES, **where)
            if step % 10 == 0:
                copying = Road(Op.SEND, Axis.COPIES, 2)
                self._flow(end, copying, 1, 40 * SENT_BYTES, **where | {"seconds": 0.004})
        return end

    def _plan(self, at: float, generation: int) -> None:
        walked = walk(self._orders, self.num_slots)
        for slot, listed in self._orders.items():
            for action, ended in zip(listed, walked.ends[slot], strict=True):
                self._add(
                    "plans",
                    at,
                    generation=generation,
                    slot=slot,
                    kind=KINDS[action.kind],
                    ident=action.microbatch,
                    stage=action.stage,
                    began=ended - TAKES[action.kind],
                    ended=ended,
                )
