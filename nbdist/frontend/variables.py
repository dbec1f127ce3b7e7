"""The magic that lists the engines' variables, and how they are put in rows.

Runs in the kernel, in the thread that runs the cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, magics_class

from nbdist.frontend.arguments import as_name, magic, option, read_line
from nbdist.frontend.display import show_line, show_page_table
from nbdist.frontend.targets import name_ranks
from nbdist.protocol.variables import MAX_NAMES
from nbdist.session import start as session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.session.variables import Variable

__all__ = ["VariableMagics", "rows_of"]

HEADINGS = ("name", "type", "shape", "dtype", "device", "equal", "")
MAX_ROWS = 200
MAX_NOTE = 240
MAX_GROUPS = 4
"""Ranks that have different things are told apart in so many groups; then their number."""
_EQUAL = {True: "yes", False: "no", None: None}


@magics_class
class VariableMagics(Magics):
    """The magics for the engines' variables, of one shell."""

    @magic(
        "line",
        option(
            "names",
            nargs="*",
            type=as_name,
            metavar="NAME",
            help="these only, compared however large they are; default: all but imported modules",
        ),
    )
    def dist_vars(self, line: str) -> None:
        """List the engines' variables: type, shape, dtype, device, whether equal on all ranks.

        Where they are not: which rank differs, and how far if that is cheap to tell. Where they
        were not compared: why. What cannot be sent is named with the member at fault. Of a module
        the parameters are compared, not the buffers.
        """
        args = read_line(self.dist_vars, line)
        found = session.current().variables(*args.names)
        if not found:
            show_line("The engines have no variables of yours.")
            return
        left_out = len(found) - MAX_ROWS
        below = [f"{left_out} more; cluster.variables() has them."] if left_out > 0 else []
        below += [f"Only the first {MAX_NAMES} names were looked at."] * (len(found) == MAX_NAMES)
        show_page_table(HEADINGS, rows_of(found[:MAX_ROWS]), below=below)


def rows_of(found: Sequence[Variable]) -> list[list[str | None]]:
    """A row for each variable; None where there is nothing to be said."""
    return [
        [
            one.name,
            *(
                _folded({rank: getattr(told, column) for rank, told in one.ranks.items()})
                for column in ("type", "shape", "dtype", "device")
            ),
            _EQUAL[one.is_equal],
            _note(one),
        ]
        for one in found
    ]


def _folded(texts: Mapping[int, str]) -> str:
    """The same on all ranks once; else each with its ranks."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    if len(groups) == 1:
        return next(iter(groups))
    shown = list(groups.items())[:MAX_GROUPS]
    said = [f"{text or 'none'} on {name_ranks(ranks)}" for text, ranks in shown]
    num_left = len(groups) - len(shown)
    return "; ".join([*said, *([f"{num_left} more kinds"] if num_left else [])])


def _note(one: Variable) -> str:
    """The value where it is short, who differs and how far, and what was not done."""
    parts = [_folded({rank: told.text for rank, told in one.ranks.items()})]
    if one.missing:
        parts.append(f"missing on {name_ranks(one.missing)}")
    if one.distance or (one.differing and not parts[0]):
        parts.append(_difference(one))
    if one.why_not_compared:
        parts.append(f"not compared: {one.why_not_compared}")
    elif reason := next((t.not_sent for t in one.ranks.values() if t.not_sent), ""):
        parts.append(reason)
    note = "; ".join(filter(None, parts))
    return note if len(note) <= MAX_NOTE else f"{note[: MAX_NOTE - 1]}…"


def _difference(one: Variable) -> str:
    if not one.distance:
        return f"{name_ranks(one.differing)} unlike rank {one.like}"
    shown = sorted(one.distance.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_GROUPS]
    said = ", ".join(f"rank {rank} by up to {far:.3g}" for rank, far in shown)
    num_left = len(one.differing) - len(shown)
    more = f", and {num_left} more {'rank' if num_left == 1 else 'ranks'}" if num_left else ""
    return f"{said}{more} unlike rank {one.like}"
