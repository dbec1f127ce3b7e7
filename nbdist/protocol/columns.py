"""Structured arrays as columns of plain values, for files of JSON lines. Pure.

A column whose values are all equal has one value; numbers that JSON lacks stand as "nan", "inf" and
"-inf".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Columns = dict[str, list[int | float | str]]
"""Name of a field -> its values, or the one that all have."""

MAX_ENTRIES = 1_000_000
"""In one array; nobody writes more."""


def to_columns(array: NDArray[np.void]) -> Columns:
    """The columns of an array."""
    return {name: _plain(array[name]) for name in array.dtype.names or ()}


def from_columns(columns: Columns, dtype: np.dtype[np.void], num: int) -> NDArray[np.void]:
    """An array of `num` entries.

    Raises:
        ValueError: these are not the columns of so many entries of that dtype.
    """
    if not 0 <= num <= MAX_ENTRIES:
        raise ValueError(f"{num} entries, expected up to {MAX_ENTRIES}")
    if set(columns) != set(dtype.names or ()):
        raise ValueError(f"columns {sorted(columns)}, expected {sorted(dtype.names or ())}")
    array = np.empty(num, dtype)
    for name, column in columns.items():
        if len(column) not in (1, num):
            raise ValueError(f"column {name!r} has {len(column)} values, expected {num}")
        is_real = dtype[name].kind == "f"
        try:
            array[name] = [float(value) for value in column] if is_real else column
        except (OverflowError, TypeError) as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return array


def _plain(values: NDArray[np.generic]) -> list[int | float | str]:
    if len(values) and (values == values[0]).all():
        values = values[:1]
    plain: list[int | float | str] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        plain = [value if np.isfinite(value) else str(value) for value in values.tolist()]
    return plain
