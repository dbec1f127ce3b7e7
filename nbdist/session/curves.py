"""From a snapshot of a run to the curves of each slot, for its report. No threads, no sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import NbdistError
from nbdist.protocol.frames import unpack
from nbdist.protocol.ids import Slot
from nbdist.session.run_record import OVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from nbdist.protocol import feed as fd
    from nbdist.protocol.frames import Table
    from nbdist.protocol.runs import RunState

    Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
    Curves = dict[Slot, dict[str, Curve]]

_COLUMNS = {
    "steps": ("step_s", "compute_s", "exposed_s", "wait_s", "data_s", "optimizer_s"),
    "memory": ("rss_bytes", "device_bytes"),
}
_AT = {"steps": "ended_at", "memory": "at"}


class SlotCurves:
    """Of one run, as they were fetched last."""

    def __init__(self) -> None:
        self.by_slot: Curves = {}
        """As in `RunStory.series`."""
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
        self.by_slot, thinned = curves_of(frame.data)
        some = [name for name in _COLUMNS if name in thinned]
        self.notes = [f"of each rank's {name} the extremes are shown" for name in some]
        self._is_complete = state in OVER


def curves_of(data: bytes) -> tuple[Curves, tuple[str, ...]]:
    """Curves as in `RunStory.series`, and the tables of which only some rows were sent.

    Raises:
        FrameError: the bytes are no frame.
    """
    header, tables = unpack(data)
    curves: Curves = {}
    for table, columns in _COLUMNS.items():
        if table in tables:
            _add(curves, tables[table], columns, at=_AT[table], is_memory=table == "memory")
    return curves, header.thinned


def _add(
    curves: Curves, table: Table, columns: tuple[str, ...], *, at: str, is_memory: bool
) -> None:
    slots = table["slot"].astype(np.int64)
    for slot in np.unique(slots).tolist():
        own = slots == slot
        for column in columns:
            x = table[at][own].astype(np.float64)
            y = table[column][own].astype(np.float64)
            known = np.isfinite(y)
            if known.any():
                name = f"memory_{column}" if is_memory else column
                curves.setdefault(Slot(slot), {})[name] = x[known], y[known]
