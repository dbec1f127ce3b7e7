"""What the kernel knows of one run's committed steps. No threads, no sockets.

Filled by `session.run` from the supervisor's reports, which hold only what is new.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.protocol.story import OVER, ROWS, is_known, unknown_in_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nbdist.protocol.runs import RunReport
    from nbdist.protocol.story import Evaluation

NUM_RECENT = 20
"""The pace is that of so many last steps."""

_COLUMNS = ("step", "loss", "samples", "seconds", "generation", "world_size", "lr")


class RunRecord:
    """The rows and evaluations of a run, as far as they were fetched."""

    def __init__(self) -> None:
        self.rows: NDArray[np.void] = np.empty(0, ROWS)
        """In the order in which they were committed."""
        self.evaluations: tuple[Evaluation, ...] = ()
        self.remarks: tuple[str, ...] = ()
        """What the user did to it that a reader should know."""
        self.has_end = False
        """The run was over when they were fetched."""
        self.is_complete = False
        """Nothing more will come."""
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        """Of each row, counted from the run's first one."""

    @property
    def num_known(self) -> int:
        """Place of the first row that is not known."""
        return int(self._places[-1]) + 1 if self._places.size else 0

    @property
    def num_missing(self) -> int:
        """Rows that the supervisor had dropped before they were fetched."""
        return self.num_known - self.rows.size

    def notes(self, of_curves: list[str], unread: str, state: str) -> list[str]:
        """What a reader should know.

        Args:
            of_curves: what there is to say of what each slot did.
            unread: why the last ones could not be fetched; empty: they could.
            state: of the run.
        """
        notes = [*self.remarks, *([] if unread else of_curves)]
        if self.num_missing:
            notes.append(f"{self.num_missing} steps were dropped before they were read")
        if num := self.num_unknown():
            notes.append(unknown_in_words(num))
        if unread and not self.has_end:
            notes.append(f"steps after the last one here are not known: {unread}")
        elif not self.has_end:
            notes.append(f"the run was {state} when this was written")
        return notes

    def told(self, first: int) -> dict[str, Any]:
        """What a story holds of it; `first`: steps of the trainer before it, 0: the rows tell."""
        return {
            "rows": self.rows[is_known(self.rows)],
            "evaluations": list(self.evaluations),
            "first": first or None,
            "started": self._started(),
        }

    def _started(self) -> str:
        """When it began, by the wall clock: rows tell the time of this host's other clock."""
        if not self.rows.size or not np.isfinite(at := float(self.rows["at"][0])):
            return ""
        ago_s = time.monotonic() - at + float(np.nan_to_num(self.rows["seconds"][0]))
        began = datetime.now(tz=UTC) - timedelta(seconds=ago_s)
        return began.isoformat(timespec="seconds")

    def take(self, report: RunReport) -> None:
        """Add what is new; where rows were replaced, the new ones count.

        A supervisor that took over may know fewer rows at first: those that it lacks stay, unless
        its last one is of a later generation, in which they are committed again.
        """
        new = np.frombuffer(report.rows, ROWS)
        end, newest = report.first + new.size, int(new["generation"][-1]) if new.size else 0
        before = self._places < report.first
        after = (self._places >= end) & (self.rows["generation"] >= newest)
        places = np.arange(report.first, end, dtype=np.int64)
        self.rows = np.concatenate([self.rows[before], new, self.rows[after]])
        self._places = np.concatenate([self._places[before], places, self._places[after]])
        self.evaluations, self.remarks = report.evaluations, report.remarks
        self.has_end = report.view.state in OVER
        # Where something failed, engines may still report steps that they had applied by then.
        self.is_complete = self.has_end and report.view.fault is None

    def history(self) -> dict[str, NDArray[Any]]:
        """A column for each quantity, a row for each committed step."""
        columns: dict[str, NDArray[Any]] = {name: self.rows[name].copy() for name in _COLUMNS}
        seconds = columns["seconds"]
        pace = np.full(seconds.shape, np.nan)
        np.divide(columns["samples"], seconds, out=pace, where=seconds > 0)
        return columns | {"samples_per_second": pace}

    def num_committed(self) -> int | None:
        """Steps that the trainer has committed; None before the run's first one."""
        return int(self.rows[-1]["step"]) + 1 if self.rows.size else None

    def loss(self) -> float | None:
        """Of the last step."""
        return float(self.rows[-1]["loss"]) if self.rows.size else None

    def num_without_loss(self) -> int:
        """Steps whose loss is no finite number, as engines have reported it."""
        rows = self.rows[is_known(self.rows)]
        return int(np.count_nonzero(~np.isfinite(rows["loss"])))

    def num_unknown(self) -> int:
        """Steps that no engine has reported: their numbers alone are known."""
        return int(np.count_nonzero(~is_known(self.rows)))

    def usual_s(self) -> float | None:
        """Median duration of the last steps; None before the first one."""
        seconds = self.rows["seconds"][-NUM_RECENT:]
        known = seconds[np.isfinite(seconds)]
        return float(np.median(known)) if known.size else None

    def in_words(self, *, with_pace: bool) -> list[str]:
        """Losses, and `with_pace` how fast it is, as far as there is something to say."""
        words = []
        if (loss := self.loss()) is not None:
            words.append(f"loss {loss:.4g}")
        if num := self.num_without_loss():
            words.append(f"{num} {'step' if num == 1 else 'steps'} without a finite loss")
        if num := self.num_unknown():
            words.append(unknown_in_words(num))
        if with_pace and (pace := self.samples_per_second()) is not None:
            words.append(f"{pace:.4g} samples/s")
        return words

    def samples_per_second(self) -> float | None:
        """Over the last steps, stalls included; of all ranks together."""
        recent = self.rows[-NUM_RECENT:]
        recent = recent[is_known(recent)]
        seconds = float(recent["seconds"].sum())
        return float(recent["samples"].sum()) / seconds if seconds > 0 else None
