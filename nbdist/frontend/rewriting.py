"""What is typed, rewritten before IPython reads it: `%%rank[...]`, and plain cells in `%dist_mode`.

Runs in the kernel, in the thread that runs the cell. The mode is on where its transformer is among
the shell's, so there is no state that could say otherwise.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, magics_class

from nbdist.frontend.arguments import magic, option, read_line
from nbdist.frontend.display import show_line

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["ModeMagics", "install", "is_mode_on", "rewrite_rank_cell", "set_mode", "uninstall"]

MODE_ON = (
    "Plain cells run on all ranks; cells that begin with % stay in the notebook. "
    "%dist_mode -d ends it."
)
MODE_OFF = "Plain cells run in the notebook."
_RANK_CELL = re.compile(r"%%rank[ \t]*(?:\[(?P<ranks>[^\]\n]*)\]|(?P<unclosed>\[[^\n]*))")


def install(shell: InteractiveShell) -> None:
    """Have a shell read `%%rank[...]`; twice is once."""
    if rewrite_rank_cell not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(rewrite_rank_cell)


def uninstall(shell: InteractiveShell) -> None:
    """Take back what `install` and `set_mode` did."""
    set_mode(shell, is_on=False)
    if rewrite_rank_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(rewrite_rank_cell)


def set_mode(shell: InteractiveShell, *, is_on: bool) -> None:
    """Whether every plain cell of a shell is a distributed cell."""
    if is_on and not is_mode_on(shell):
        shell.input_transformers_cleanup.append(distribute_plain_cell)
    elif not is_on and is_mode_on(shell):
        shell.input_transformers_cleanup.remove(distribute_plain_cell)


def is_mode_on(shell: InteractiveShell) -> bool:
    """Whether every plain cell of a shell is a distributed cell."""
    return distribute_plain_cell in shell.input_transformers_cleanup


def rewrite_rank_cell(lines: list[str]) -> list[str]:
    """Turn `%%rank[0,2] -t 5` into `%%distributed -r "0,2" -t 5`; other cells stay as they are.

    A blank before the bracket is allowed.

    IPython by itself finds no magic by the first spelling.
    """
    found = _RANK_CELL.match(lines[0]) if lines else None
    if found is None:
        return lines
    # Where the closing bracket is missing, the opening one is kept: to be refused, not guessed.
    ranks = (found["ranks"] or found["unclosed"] or "").replace('"', "'")
    return [f'%%distributed -r "{ranks}"{lines[0][found.end() :]}', *lines[1:]]


def distribute_plain_cell(lines: list[str]) -> list[str]:
    """Turn a plain cell into a `%%distributed` one; in the mode only.

    Plain is what does not begin with a magic, but for comments before it. A cell of comments alone
    stays as it is, and so does what a cell that runs has IPython run: the body of `%%capture`.
    """
    code = (line.strip() for line in lines)
    first = next((line for line in code if line and not line.startswith("#")), "%")
    if first.startswith("%") or _is_in_cell():
        return lines
    return ["%%distributed\n", *lines]


distribute_plain_cell.has_side_effects = True  # type: ignore[attr-defined]
"""So IPython does not use it to find out whether what was typed in a terminal is complete."""


@magics_class
class ModeMagics(Magics):
    """The magic that makes plain cells distributed ones, of one shell."""

    @magic(
        "line",
        option("-e", "--enable", action="store_true", help="plain cells run on all ranks"),
        option("-d", "--disable", action="store_true", help="they run in the notebook again"),
    )
    def dist_mode(self, line: str) -> None:
        """Have every plain cell run on all ranks, as if it began with %%distributed; or end that.

        Cells that begin with % stay as they are. Without an argument it says which is so. The end
        of the cluster by %dist_shutdown or %dist_reset is the end of it too.
        """
        args = read_line(self.dist_mode, line)
        assert self.shell is not None
        if args.enable and args.disable:
            raise UsageError("-e and -d exclude one another; give one of them")
        if args.enable or args.disable:
            set_mode(self.shell, is_on=args.enable)
        show_line(MODE_ON if is_mode_on(self.shell) else MODE_OFF)


def _is_in_cell() -> bool:
    """Whether a cell runs in this thread now: then what IPython reads is none of the user's."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation
    while frame is not None and frame.f_code is not InteractiveShell.run_code.__code__:
        frame = frame.f_back
    return frame is not None
