"""Calls of functions on engines, between cells and between the steps of a run.

Runs in the thread of the kernel that calls.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nbdist.protocol import calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.session.cell_run import CellRun
    from nbdist.session.cells import Cells
    from nbdist.session.client import EngineClient


class EngineCalls:
    """Calls functions of `protocol.calls`."""

    def __init__(self, cells: Cells, client: EngineClient) -> None:
        self._cells, self._client = cells, client

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

    def push(self, ranks: tuple[int, ...] | None, packed: dict[str, bytes]) -> None:
        """Bind names on engines; those that join later get them too, where ranks is None."""
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
