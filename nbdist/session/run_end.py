"""How a wait for a run ends other than well. No threads, no sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import CellFailed, NbdistError, RankError, named_error
from nbdist.protocol.story import OVER

if TYPE_CHECKING:
    from nbdist.protocol.runs import RunFault, RunView


class Detached(KeyboardInterrupt):
    """An interrupt ended a wait for a run. The run goes on."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this line alone."""
        return [f"{type(self).__name__}: {self}"]


def raise_if_failed(view: RunView | None, gone: tuple[str, str] | None) -> None:
    """Raise what a run failed with; nothing where it did not, or goes on.

    Args:
        view: as the supervisor told it last.
        gone: kind and message of the error, where the cluster ended before it.
    """
    if view is not None and view.state in OVER:
        if view.state == "failed":
            raise _failure_of(view.fault)
    elif gone is not None:
        raise named_error(*gone)


def in_words(fault: RunFault | None) -> str:
    """A run's fault in a line; empty where there is none."""
    if fault is None:
        return ""
    first = fault.message.partition("\n")[0]
    return f"{fault.kind}: {first}" if first else fault.kind


def in_brackets(fault: RunFault | None) -> str:
    """A run's fault within a line about it; empty where there is none."""
    words = in_words(fault)
    return f" ({words})" if words else ""


def _failure_of(fault: RunFault | None) -> NbdistError:
    """The error of a run that failed."""
    if fault is None:
        return CellFailed("the run failed; the supervisor's log says more")
    if fault.rank is None and not fault.traceback:
        return named_error(fault.kind, fault.message)
    rank = -1 if fault.rank is None else fault.rank
    error = RankError(rank, fault.kind, fault.message, fault.traceback)
    error.traceback = error.traceback or [str(error)]
    where = "" if fault.rank is None else f" (rank {fault.rank})"
    return CellFailed(f"{error}{where}", {} if fault.rank is None else {rank: error})
