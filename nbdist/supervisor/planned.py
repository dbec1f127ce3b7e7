"""What pipelines are to do, all slots together, as a table. Pure.

What the ranks told is a plan when nothing is missing: all stages are there, and their actions come
to their end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.plans import KINDS, TAKES, unpacked, walk
from nbdist.protocol.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from nbdist.protocol.plans import Action
    from nbdist.protocol.tables import Table
    from nbdist.supervisor.series import Series

    Orders = dict[int, tuple[int, list[Action]]]
    """Slot -> how many stages there are, and what it is to do."""

MAX_ACTIONS = 2_000
"""Of all ranks and plans that are told at once; a plan that is larger is not told."""


class PlanReader:
    """How far somebody has read.

    Args:
        since: what was told before is not looked at.
    """

    def __init__(self, since: float) -> None:
        self._since_ns = since * 1e9
        self._known: set[int] = set()
        """Generations whose plan was read."""

    def read(self, series: Series) -> Table:
        """Of each generation whose plan was not read yet the rows, oldest first.

        Where there is not room for all, those of the newest ones.
        """
        rows: list[tuple[float, ...]] = []
        for generation, orders in sorted(self._new(series).items(), reverse=True):
            its_rows = list(_rows(generation, orders))
            if its_rows:
                self._known.add(generation)
            if len(its_rows) + len(rows) <= MAX_ACTIONS:
                rows = its_rows + rows
        columns = TABLES["plans"]
        values = np.array(rows, dtype=np.float64).reshape(-1, len(columns))
        return {column: values[:, place] for place, column in enumerate(columns)}

    def _new(self, series: Series) -> dict[int, Orders]:
        found: dict[int, Orders] = {}
        for slot in series.slots:
            for records in series.plans(slot):
                generation = int(records["generation"][0])
                if generation in self._known or records["t0_ns"][0] < self._since_ns:
                    continue
                order = _order(records)
                if order is not None:
                    found.setdefault(generation, {})[slot] = order
        return found


def _order(records: NDArray[np.void]) -> tuple[int, list[Action]] | None:
    """How many stages there are, and the actions; None where some are missing."""
    if not np.array_equal(records["ident"], np.arange(len(records))):
        return None
    try:
        pairs = [unpacked(value) for value in records["value"].tolist()]
    except ValueError:
        return None
    return pairs[0][1], [action for action, _ in pairs]


def _rows(generation: int, orders: Orders) -> Iterator[tuple[float, ...]]:
    """Rows of the table, columns in its order; none where something is missing."""
    num_stages = next(num for num, _ in orders.values())
    actions = {slot: listed for slot, (_, listed) in orders.items()}
    if not _is_whole(num_stages, actions.values()):
        return
    walked = walk(actions, num_stages)
    if any(walked.next_at[slot] < len(listed) for slot, listed in actions.items()):
        return
    for slot, listed in sorted(actions.items()):
        for action, ended in zip(listed, walked.ends[slot], strict=True):
            kind, began = KINDS[action.kind], ended - TAKES[action.kind]
            yield (generation, slot, kind, action.microbatch, action.stage, began, ended)


def _is_whole(num_stages: int, orders: Iterable[Sequence[Action]]) -> bool:
    """Each stage goes forward as often as the others, and backward as often as forward."""
    counts = {letter: [0] * num_stages for letter in KINDS}
    for listed in orders:
        for action in listed:
            if action.stage >= num_stages:
                return False
            counts[action.kind][action.stage] += 1
    forward = counts["F"]
    backward = [b + i for b, i in zip(counts["B"], counts["I"], strict=True)]
    is_even = min(forward, default=0) > 0 and len(set(forward)) == 1
    return is_even and backward == forward and counts["I"] == counts["W"]
