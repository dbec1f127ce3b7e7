"""Has each training run written down, from its beginning to its end, where the user wants it.

Called by the supervisor's one thread, between events; looks at what there is, and changes nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.supervisor.record import Recorder

if TYPE_CHECKING:
    from nbdist.protocol.orders import WorldView
    from nbdist.supervisor.collector import Collector
    from nbdist.supervisor.run import Run
    from nbdist.supervisor.runs import Runs

NUM_AGAIN = 1_000
"""One that takes over writes the last steps again; the one before may not have come to it."""
LINGER_S = 0.5
"""After a run's end, for the last telemetry of it."""

log = logging.getLogger(__name__)


class Scribe:
    """Of one cluster.

    Args:
        folder: where the records are; empty: none are written.
        cluster: its name, with which its files begin.
        collector: is given the recorder of the present run.
    """

    def __init__(self, folder: str, cluster: str, collector: Collector) -> None:
        self._folder, self._cluster, self._collector = folder, cluster, collector
        self._run: Run | None = None
        self._recorder: Recorder | None = None
        self._over_since: float | None = None
        self._next_step = self._num_replaced = self._num_evaluations = self._num_remarks = 0

    def look(self, runs: Runs, view: WorldView, now: float) -> None:
        """Write down what is new; `view`: the world as it was last shown."""
        run = runs.present
        if self._run is not None and self._run is not run:
            self._over_since = self._over_since or now
            if run is None and now - self._over_since < LINGER_S:
                return
            self.close()
        if not self._folder or run is None or run.state == "binding":
            return
        if self._run is None:
            self._begin(run)
        if self._recorder is not None:
            self._recorder.world(view, now)
            self._write_news(run, self._recorder)

    def close(self) -> None:
        """The run is over, or the supervisor ends."""
        run, recorder = self._run, self._recorder
        if run is not None and recorder is not None:
            self._write_news(run, recorder)
            fault = f": {run.fault.kind}: {run.fault.message}" if run.fault is not None else ""
            recorder.close(f"{run.state}{fault}" if run.is_over else "with the cluster")
        self._run = self._recorder = self._collector.recorder = self._over_since = None

    def _begin(self, run: Run) -> None:
        self._run, progress = run, run.progress
        path = Path(self._folder) / f"{self._cluster}-{run.spec.run}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("the run %s is not recorded: %s", run.spec.run, error)
            return
        title = f"{run.spec.name or 'own loop'}, run {run.spec.run}"
        resumes = path.exists()
        self._recorder = Recorder(
            path, title=title, first=progress.first, target=run.target, resumes=resumes
        )
        self._collector.recorder = self._recorder
        self._next_step = progress.step - NUM_AGAIN if resumes else progress.first
        self._num_replaced = progress.num_replaced
        self._num_evaluations = self._num_remarks = 0

    def _write_news(self, run: Run, recorder: Recorder) -> None:
        progress = run.progress
        # So many rows at the end at most are not those that were written.
        self._next_step -= progress.num_replaced - self._num_replaced
        self._num_replaced = progress.num_replaced
        place = max(0, self._next_step - progress.first)
        recorder.steps(progress.rows[place:])
        self._next_step = progress.step
        for evaluation in run.evaluations[self._num_evaluations :]:
            recorder.evaluation(evaluation)
        self._num_evaluations = len(run.evaluations)
        for text in run.remarks[self._num_remarks :]:
            recorder.remark(text)
        self._num_remarks = len(run.remarks)
