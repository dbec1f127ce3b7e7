"""Text in columns, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NO_VALUE = ("–", "")
"""Cells of a column of numbers may say that there is none."""


def columns(header: Sequence[str], rows: Iterable[Sequence[object]], *, indent: str = "") -> str:
    """A table: each column as wide as its widest cell, columns of numbers to the right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [
        any(_is_number(row[index]) for row in cells)
        and all(_is_number(row[index]) or row[index] in _NO_VALUE for row in cells)
        for index in range(len(header))
    ]
    lines = []
    for row in [list(header), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append(indent + "  ".join(padded).rstrip())
    return "\n".join(lines)


def printable(text: str) -> str:
    """Text of anybody's for one line of a terminal: what would steer it is written as Python does.

    Line ends and what turns the direction of writing too.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).isdecimal()


def duration(seconds: float) -> str:
    """A duration in the largest unit that fits: `12 s`, `5 min`, `3.2 h`, `2.5 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def milliseconds(seconds: float | None) -> str:
    """A duration in ms, or a dash where there is none."""
    return "–" if seconds is None else f"{seconds * 1000:.0f}"
