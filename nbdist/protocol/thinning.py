"""Of tables that are too long for a frame, which rows are sent. Pure.

The last rows are always whole: what is said of the last steps is exact, whoever says it, and the
same in every view.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from nbdist.protocol.tables import num_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.tables import Table

NUM_LAST = 64
"""Rows at the end of which none is left out, where they take no more than half of the room."""

_THINNED_BY = {
    "rows": ("loss", "seconds"),
    "steps": ("compute_s", "step_s"),
    "memory": ("bytes",),
}
"""Columns whose extremes are kept; of a table of two such parts each has half the room. Of others
rows are kept evenly: how often a value comes stays as it is."""


def extremes(values: NDArray[np.floating], num_bins: int) -> NDArray[np.intp]:
    """Places of the least and the greatest of each of `num_bins` equal parts, in order.

    The first and the last place are always among them; values that are not finite come last.
    """
    num = len(values)
    if num <= 2 * num_bins:
        return np.arange(num)
    edges = np.linspace(0, num, num_bins + 1).astype(np.intp)
    known = np.isfinite(values)
    low, high = np.where(known, values, np.inf), np.where(known, values, -np.inf)
    chosen = [0, num - 1]
    for start, end in itertools.pairwise(edges):
        chosen += [start + int(low[start:end].argmin()), start + int(high[start:end].argmax())]
    return np.unique(np.array(chosen, dtype=np.intp))


def thin(name: str, table: Table, max_rows: int) -> Table:
    """At most so many rows, or a few more: the last ones, the first, and the extremes.

    For those tables of which a frame may hold only some rows; each part, of a slot or of what it
    held, for itself.
    """
    num = num_rows(table)
    if num <= max_rows:
        return table
    if name not in _THINNED_BY:
        places = np.linspace(0, num - 1, max_rows).astype(np.intp)
        return {column: table[column][places] for column in table}
    num_last = min(NUM_LAST, max_rows // 2)
    values = [np.asarray(table[column], dtype=np.float64) for column in _THINNED_BY[name]]
    num_bins = max(1, (max_rows - num_last) // (2 * len(values)))
    last = np.arange(num - num_last, num)
    before = [extremes(one[: num - num_last], num_bins) for one in values]
    places = np.unique(np.concatenate([*before, last]))
    return {column: table[column][places] for column in table}
