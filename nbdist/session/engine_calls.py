"""Calls of functions on engines, between cells and between the steps of a run.

Runs in the thread of the kernel that calls.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, RankError, SegmentGone
from nbdist.protocol import calls, values
from nbdist.segments import Kept, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.session.cell_run import CellRun
    from nbdist.session.cells import Cells
    from nbdist.session.client import EngineClient


class EngineCalls:
    """Calls functions of `protocol.calls`."""

    def __init__(self, cells: Cells, client: EngineClient) -> None:
        self._cells, self._client = cells, client
        self._kept = Kept()
        self._is_lending = True
        """Whether large values go through shared memory: until engines turn out not to reach it."""
        self._note = ""

    @contextlib.contextmanager
    def between(self, ranks: tuple[int, ...] | None) -> Iterator[CellRun]:
        """No cell runs on these ranks meanwhile, and a run stands between two steps."""
        run = self._cells.begin("", ranks=ranks, once=True)
        try:
            yield run
        finally:
            self._cells.end(run, succeeded=False)

    def look(
        self, function: str, ranks: tuple[int, ...] | None, *args: Any, **kwargs: Any
    ) -> dict[int, Any]:
        """Call one function that changes nothing; what each rank returned."""
        with self.between(ranks) as run:
            return self.call(function, run, *args, **kwargs)

    def push(self, ranks: tuple[int, ...] | None, named: Mapping[str, Any]) -> None:
        """Bind names on engines; those that join later get them too, where ranks is None.

        Large values go through shared memory, where there is enough of it and engines reach it.

        Raises:
            TypeError: a value cannot be sent; the message says which, and why.
        """
        if not (self._is_lending and self._push_lent(ranks, named)):
            self._push(ranks, values.pack_named(named))

    def pull(self, ranks: tuple[int, ...] | None, name: str, *, as_numpy: bool) -> dict[int, Any]:
        """Rank -> value of a name."""
        packed = self.look(calls.PULL, ranks, name, as_numpy=as_numpy)
        return {rank: values.unpack(data) for rank, data in packed.items()}

    @property
    def notes(self) -> list[str]:
        """What the user should know of the last push of large values."""
        return [self._note] if self._note else []

    def close(self) -> None:
        """Keep nothing for engines that come later."""
        self._kept.close()

    def _push_lent(self, ranks: tuple[int, ...] | None, named: Mapping[str, Any]) -> bool:
        """Push, large values through shared memory; False where engines do not reach it."""
        segment = Segment()
        with contextlib.ExitStack() as undo:
            undo.callback(segment.close)
            packed = values.pack_named(named, segment.lend)
            segment.seal()
            try:
                self._push(ranks, packed)
            except CellFailed as failed:
                if not _is_out_of_reach(failed):
                    raise
                self._is_lending = False
                self._note = f"large values are pushed in messages from now on: {failed}"
                return False
            undo.pop_all()
        self._note = segment.reason
        if segment.num_bytes:
            self._kept.add(segment)
        return True

    def _push(self, ranks: tuple[int, ...] | None, packed: dict[str, bytes]) -> None:
        run = self._cells.begin("", ranks=ranks, once=False, pushed=packed)
        succeeded = False
        try:
            self.call(calls.PUSH, run, packed)
            succeeded = True
        finally:
            self._cells.end(run, succeeded=succeeded)

    def call(self, function: str, run: CellRun, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call a function on the ranks of a cell, or of `between`."""
        engines = {rank: run.membership.members[rank].engine_id for rank in run.ranks}
        return self._client.call(engines, function, *args, check=run.raise_if_ended, **kwargs)


def _is_out_of_reach(failed: CellFailed) -> bool:
    """Whether a push failed for shared memory alone."""
    names = {error.ename for error in failed.errors.values() if isinstance(error, RankError)}
    return names == {SegmentGone.__name__}
