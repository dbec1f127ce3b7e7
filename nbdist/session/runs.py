"""The training runs of one cluster: begun here, or heard of from the supervisor.

A cell that is inside its own training loop is one too. Views of the world come in the link's
thread; everything else is for any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from nbdist.protocol import runs as rn
from nbdist.session.run import GLANCE_LIMIT_S, Run
from nbdist.session.status import whole_number

if TYPE_CHECKING:
    from nbdist.protocol import orders as od
    from nbdist.protocol.ids import RunId
    from nbdist.session.dashboards import Dashboards
    from nbdist.session.run import Ask

BEGIN_LIMIT_S = 60.0
"""Every engine has found its trainer by then, or is busy with something else."""
LAST_LOOK_S = 1.0
"""A shutdown waits so long for the last steps of the runs."""


class Runs:
    """The runs that this kernel knows of.

    Args:
        ask: asks the supervisor (order, timeout in seconds or None).
        dashboards: where their dashboards are opened.
    """

    def __init__(self, ask: Ask, dashboards: Dashboards | None = None) -> None:
        self._ask, self._dashboards = ask, dashboards
        self._runs: dict[RunId, Run] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """Oldest first."""
        with self._lock:
            return list(self._runs.values())

    def begin(self, name: object, steps: object) -> Run:
        """Train with the trainer that the variable `name` holds on the engines."""
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"name={name!r}: the engines' variable that holds the trainer")
        self._fetch_rest(time.monotonic() + LAST_LOOK_S)  # the supervisor forgets old runs
        order = rn.BeginRun(name=name, steps=whole_number("steps", steps))
        begun: rn.RunBegun = self._ask(order, BEGIN_LIMIT_S)
        run = self._run(rn.RunSpec(run=begun.run, name=name))
        run.first_step = begun.step
        run.target = begun.step + order.steps if run.target is None else run.target
        return run

    def pace(self) -> tuple[int | None, float | None]:
        """Of the run that goes on: steps committed, samples per second of all ranks together."""
        run = self._going()
        return (None, None) if run is None else (run.num_committed, run.samples_per_second)

    def usual_s(self) -> float | None:
        """Duration of its steps; None before there are any."""
        run = self._going()
        return None if run is None else run.usual_s

    def _going(self) -> Run | None:
        """The run that goes on, with its newest steps if they come soon."""
        going = [run for run in self.all() if not run.is_over]
        if not going:
            return None
        with contextlib.suppress(TimeoutError):
            going[-1].refresh(GLANCE_LIMIT_S)
        return going[-1]

    def hear(self, view: od.WorldView) -> None:
        """The world as it is now."""
        self._generation = view.membership.generation
        for told in view.runs:
            run = self._run(told.spec)
            was_over = run.is_over
            run.hear(told, view.incidents)
            if run.is_over and not was_over and self._dashboards is not None:
                self._dashboards.ended()
        if view.phase == "failed":
            self.cluster_gone("RecoveryFailed", view.reason)

    def cluster_gone(self, kind: str, message: str) -> None:
        """Runs that are not over end with this error."""
        for run in self.all():
            run.cluster_gone(kind, message)

    def shut_down(self) -> None:
        """Keep what there is to know: the supervisor is about to end."""
        self.cluster_gone("WrongState", "the cluster was shut down before the run was over")
        self._fetch_rest(time.monotonic() + LAST_LOOK_S)
        if self._dashboards is not None:
            self._dashboards.settle()

    def _fetch_rest(self, deadline: float) -> None:
        for run in self.all():
            left_s = deadline - time.monotonic()
            if left_s > 0:
                with contextlib.suppress(TimeoutError):
                    run.refresh(left_s)
                run.refresh_curves(max(0.1, deadline - time.monotonic()))

    def _run(self, spec: rn.RunSpec) -> Run:
        with self._lock:
            if (known := self._runs.get(spec.run)) is not None:
                return known
            run = self._runs[spec.run] = Run(spec, self._ask, self._generation, self._dashboards)
        if self._dashboards is not None:
            self._dashboards.begun()
        return run
