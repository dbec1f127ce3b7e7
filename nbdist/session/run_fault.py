"""What a run that failed raises where somebody waits for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import CellFailed, NbdistError, RankError, named_error

if TYPE_CHECKING:
    from nbdist.protocol import runs as rn


def failure_of(fault: rn.RunFault | None) -> NbdistError:
    """The error for a run's fault; None: the supervisor named none."""
    if fault is None:
        return CellFailed("the run failed; the supervisor's log says more")
    if fault.rank is None and not fault.traceback:
        return named_error(fault.kind, fault.message)
    rank = -1 if fault.rank is None else fault.rank
    error = RankError(rank, fault.kind, fault.message, fault.traceback)
    error.traceback = error.traceback or [str(error)]
    where = "" if fault.rank is None else f" (rank {fault.rank})"
    return CellFailed(f"{error}{where}", {} if fault.rank is None else {rank: error})
