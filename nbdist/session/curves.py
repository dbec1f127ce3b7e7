"""From a snapshot of a run to what each slot did, for its report. No threads, no sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import NbdistError
from nbdist.protocol.frames import unpack
from nbdist.protocol.story import OVER, curves_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.protocol import feed as fd
    from nbdist.protocol.runs import RunState
    from nbdist.protocol.story import Curves
    from nbdist.protocol.tables import Table


_NAMED = ("steps", "memory")
"""Tables of which a report says whether all of it was there."""
_LEFT_OUT = ("rows",)
"""A story has them whole."""


class SlotCurves:
    """Of one run, as they were fetched last."""

    def __init__(self) -> None:
        self.by_slot: Curves = {}
        """As in `RunStory.series`."""
        self.tables: dict[str, Table] = {}
        """As in `RunStory.tables`."""
        self.notes: list[str] = []
        """What is missing, in words."""
        self._is_complete = False

    def refresh(self, fetch: Callable[[], fd.Frame], state: RunState) -> None:
        """Fetch them; where that fails, what is known stays as it is."""
        if self._is_complete:
            return
        try:
            frame = fetch()
        except (NbdistError, TimeoutError) as error:
            if not self.by_slot:
                self.notes = [f"what each rank did is not known: {error}"]
            return
        header, tables = unpack(frame.data)
        self.tables = {name: tables[name] for name in tables if name not in _LEFT_OUT}
        self.by_slot = curves_of(self.tables)
        some = [name for name in _NAMED if name in header.thinned]
        self.notes = [f"of each rank's {name} the extremes are shown" for name in some]
        self._is_complete = state in OVER
