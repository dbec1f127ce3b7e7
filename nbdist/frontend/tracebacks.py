"""What the notebook shows of an error that is meant for the user: the user's own lines.

Installed with the magics; runs in the kernel, in the thread that runs the cell. Errors of
`nbdist.errors` show themselves, and engines leave out our lines before they send a traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import is_raised_by_us, leave_out_ours

if TYPE_CHECKING:
    from types import TracebackType

    from IPython.core.interactiveshell import InteractiveShell

KINDS: tuple[type[Exception], ...] = (ValueError, TypeError, TimeoutError)
"""Python's own kinds of what we raise on purpose: a wrong argument, a wait that is over."""

MAX_CAUSES = 8
"""A chain of causes may be a ring."""


def install(shell: InteractiveShell) -> None:
    """Show such errors without our lines, unless the user has a handler of another kind."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(KINDS, _show)  # type: ignore[no-untyped-call]


def uninstall(shell: InteractiveShell) -> None:
    """Take back what `install` did."""
    if shell.custom_exceptions is KINDS:
        shell.set_custom_exc((), None)  # type: ignore[no-untyped-call]


def _show(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType,
    tb_offset: int | None = None,
) -> None:
    """As IPython does; of what is no error of the user's, every line."""
    if is_raised_by_us(traceback):
        leave_out_ours(traceback)
        cause, left = error.__cause__, MAX_CAUSES
        while cause is not None and left:
            cause.__traceback__ = leave_out_ours(cause.__traceback__)
            cause, left = cause.__cause__, left - 1
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset, running_compiled_code=True)
