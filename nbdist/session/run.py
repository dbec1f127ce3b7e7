"""The handle of a training run, as `cluster.train` returns it.

Used in the kernel, by any thread. The supervisor drives the run, and says in the link's thread how
it stands; the rows of its steps are fetched when somebody asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist.errors import NbdistError
from nbdist.protocol import feed as fd
from nbdist.protocol import runs as rn
from nbdist.protocol.record import incident_key
from nbdist.protocol.story import OVER, RunStory
from nbdist.session.curves import SlotCurves
from nbdist.session.run_end import Detached, in_brackets, in_words, raise_if_failed
from nbdist.session.run_record import RunRecord
from nbdist.session.status import amount, check_limit, whole_number

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from nbdist.protocol import orders as od
    from nbdist.protocol.events import Incident
    from nbdist.protocol.ids import RunId
    from nbdist.protocol.story import Evaluation
    from nbdist.protocol.tables import View
    from nbdist.session.dashboards import Dashboards
    from nbdist.views.chart import Chart
    from nbdist.views.dashboard import Dashboard

    Ask = Callable[[od.KernelOrder, float | None], Any]

State = Literal["running", "paused", "recovering", "finished", "stopped", "failed"]

QUERY_LIMIT_S = 10.0
GLANCE_LIMIT_S = 1.0
"""A line of a magic about a run does not wait longer for its newest step."""
LOOK_LIMIT_S = 0.3
"""A mere look at a run waits no longer, and asks no sooner again."""


class Run:
    """A training run. Made by `cluster.train`; `await run` waits as `wait` does.

    Args:
        spec: which run.
        ask: asks the supervisor (order, timeout in seconds or None).
        generation: the group in which it begins.
        dashboards: where its dashboards are opened.
    """

    def __init__(
        self, spec: rn.RunSpec, ask: Ask, generation: int, dashboards: Dashboards | None = None
    ) -> None:
        self.spec, self._dashboards = spec, dashboards
        self.target: int | None = None
        """It ends when the trainer has committed so many steps."""
        self.first_step = 0
        """Steps that the trainer had committed before, where this kernel began the run."""
        self._ask, self._generation = ask, generation
        self._record = RunRecord()
        self._fetching = threading.Lock()
        """Reports are taken in the order in which they were asked for."""
        self._fresh_until = 0.0
        """Until then, by the monotonic clock, what is known counts as new."""
        self._curves = SlotCurves()
        self._is_stale = False
        """Nobody has answered the last look at it, as when a supervisor is being replaced."""
        self._unread = ""
        """Why the last steps could not be fetched; empty where they could."""
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []
        """Each wakes an event loop in which somebody awaits the run's end."""
        self._view: rn.RunView | None = None
        self._gone: tuple[str, str] | None = None
        """Kind and message of the error, where the cluster ended before the run."""
        self._world: tuple[Incident, ...] = ()
        self._last_incidents: frozenset[object] | None = None
        """Those that had begun when the run was over."""

    # ---- how it stands

    @property
    def id(self) -> RunId:
        """Its name in the supervisor's books."""
        return self.spec.run

    @property
    def name(self) -> str:
        """The engines' variable that holds the trainer; empty where a cell's own loop holds it."""
        return self.spec.name

    @property
    def state(self) -> State:
        """Running, paused, recovering, finished, stopped or failed."""
        state = "running" if self._view is None else self._view.state
        if self._gone is not None and state not in OVER:
            return "failed" if self._gone[0] == "RecoveryFailed" else "stopped"
        return "running" if state == "binding" else state

    @property
    def is_over(self) -> bool:
        """Whether it has finished, was stopped, or failed."""
        return self.state in OVER

    @property
    def num_committed(self) -> int:
        """Steps that the trainer has committed.

        As it stands now: asks the supervisor, a few times a second at most, and waits 0.3 s for an
        answer; where none comes, it is what was known before. So do `samples_per_second`, `str`.
        """
        self._look()
        return self._num_known

    @property
    def _num_known(self) -> int:
        if self.state == "finished" and self.target is not None:
            return self.target
        told = self.first_step if self._view is None else self._view.step
        return max(self._record.num_committed() or 0, told, self.first_step)

    @property
    def samples_per_second(self) -> float | None:
        """Of all ranks together, over the last steps; None before there are any."""
        self._look()
        return self._record.samples_per_second()

    @property
    def usual_s(self) -> float | None:
        """Median duration of the last steps that are known here; None before there are any."""
        return self._record.usual_s()

    @property
    def history(self) -> dict[str, NDArray[Any]]:
        """The committed steps: arrays with a row for each, by the name of the quantity.

        step, loss, samples (over all ranks), seconds (stalls included), generation, world_size, lr
        and samples_per_second.
        """
        self.refresh()
        return self._record.history()

    @property
    def evaluations(self) -> list[Evaluation]:
        """What was evaluated at step boundaries, oldest first."""
        self.refresh()
        return list(self._record.evaluations)

    @property
    def incidents(self) -> list[Incident]:
        """The cluster's incidents from the beginning of the run to its end."""
        last = self._last_incidents
        return [
            incident
            for incident in self._world
            if incident.generation_before >= self._generation
            and (last is None or incident_key(incident) in last)
        ]

    def summary(self) -> str:
        """One line on how it stands now."""
        self._glance(GLANCE_LIMIT_S)
        return self._line()

    def _look(self) -> None:
        """Fetch the newest steps if that is quick and the last look is not just over."""
        if time.monotonic() >= self._fresh_until:
            self._glance(LOOK_LIMIT_S)
            self._fresh_until = time.monotonic() + LOOK_LIMIT_S

    def _glance(self, limit_s: float) -> None:
        """Fetch the newest steps if they come in time; never raises."""
        try:
            self.refresh(limit_s)
            self._is_stale = False
        except TimeoutError:
            self._is_stale = True

    def refresh(self, limit_s: float = QUERY_LIMIT_S) -> None:
        """Fetch the steps that are not known here yet.

        Where the cluster is gone, what is known stays as it is.

        Raises:
            TimeoutError: the supervisor did not answer in time.
        """
        if not self._fetching.acquire(timeout=limit_s):
            raise TimeoutError(
                f"another thread has asked for the steps of {self._who} for {limit_s:g} s"
            )
        try:
            if self._record.is_complete:
                return
            order = rn.QueryRun(run=self.id, num_known=self._record.num_known)
            try:
                self._record.take(self._ask(order, limit_s))
                self._unread = ""
                self._fresh_until = time.monotonic() + LOOK_LIMIT_S
            except NbdistError as error:
                self._unread = str(error)
        finally:
            self._fetching.release()

    def refresh_curves(self, limit_s: float = QUERY_LIMIT_S) -> None:
        """Fetch what each slot did, as far as the supervisor keeps it."""
        self._curves.refresh(partial(self._ask, fd.QuerySnapshot(run=self.id), limit_s), self.state)

    # ---- its end

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until it is over, and return it; while it is paused, go on waiting.

        An interrupt ends the wait and not the run: it raises `Detached`, a KeyboardInterrupt.

        Raises:
            CellFailed: the user's code raised on an engine; `errors` has it by rank.
            RecoveryFailed: no world is left to train on.
            WrongState: the cluster was shut down before the run was over.
            TimeoutError: it is not over after `timeout` seconds; the message says how far it is.
        """
        check_limit(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self._changed:
                while not self._is_settled:
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        break
                    self._changed.wait(left_s)
        except KeyboardInterrupt:
            raise self.detached() from None
        if not self._is_settled:
            raise TimeoutError(f"after {timeout:g} s, {self.summary()}; the run goes on")
        if self._gone is None:
            self.summary()  # whoever looks at it next sees its last step
        if self._dashboards is not None:
            self._dashboards.settle(self)  # who runs notebooks unseen looks no later than now
        raise_if_failed(self._view, self._gone)
        return self

    def detached(self) -> Detached:
        """What an interrupt of a wait for this run raises."""
        how = "wait() waits for it again, stop() or %dist_stop ends it"
        return Detached(f"the run goes on ({self._line()}); {how}")

    def __await__(self) -> Generator[Any, None, Self]:
        return self._settled().__await__()

    async def _settled(self) -> Self:
        event = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, event.set)
        with self._changed:
            self._wakers.append(wake)
            if self._is_settled:
                event.set()
        try:
            await event.wait()
        finally:
            with self._changed:
                self._wakers.remove(wake)
        raise_if_failed(self._view, self._gone)
        return self

    @property
    def _is_settled(self) -> bool:
        return self._gone is not None or (self._view is not None and self._view.state in OVER)

    # ---- orders

    def step(self, n: int = 1) -> None:
        """Train `n` more steps, then pause; returns when that is done.

        Raises:
            WrongState: the run is over.
        """
        self._steer("step", steps=whole_number("n", n))

    def pause(self) -> None:
        """Stand at the next step boundary; returns when all ranks do."""
        self._steer("pause")

    def resume(self) -> None:
        """Go on after a pause."""
        self._steer("resume")

    def stop(self) -> None:
        """End the run at the next step boundary; returns when it is over."""
        self._steer("stop")

    def set(self, *, lr: float) -> None:
        """Change a setting at the next step boundary, on all ranks the same one.

        Args:
            lr: the base rate that the scheduler works on.
        """
        self._ask(rn.SetRun(run=self.id, lr=amount("lr", lr)), QUERY_LIMIT_S)

    def _steer(self, action: Literal["pause", "resume", "stop", "step"], steps: int = 0) -> None:
        self._ask(rn.SteerRun(run=self.id, action=action, steps=steps), None)
        self._fresh_until = 0.0

    # ---- to show and keep

    def story(self) -> RunStory:
        """The whole run, as a report needs it."""
        self.refresh()
        self.refresh_curves()
        return RunStory(
            title=f"Run of {self._who}",
            **self._record.told(self.first_step),
            incidents=self.incidents,
            target=self.target,
            series=self._curves.by_slot,
            state=self.state,
            fault=in_words(self._view.fault if self._view is not None else None),
            tables=dict(self._curves.tables),
            notes=self._record.notes(self._curves.notes, self._unread, self.state),
        )

    def dashboard(self, *views: View) -> Dashboard:
        """Live views with buttons, none named: all. At the run's end they become a picture."""
        assert self._dashboards is not None  # a run of a cluster has them
        return self._dashboards.open(*views, run=self)

    def figure(self, name: str) -> Chart:
        """A chart for a cell: "loss", "traffic" and others; a wrong name's error says which."""
        from nbdist.views.chart import Chart  # noqa: PLC0415 - loads a plotting library

        return Chart(self.story(), name)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the run as one HTML file, which opens offline; returns where it is."""
        from nbdist.views.report import write_report  # noqa: PLC0415 - as above

        return write_report(path, self.story())

    @property
    def _who(self) -> str:
        return self.name or "a cell's own loop"

    def __str__(self) -> str:
        self._look()
        return self._line()

    def _line(self) -> str:
        """How it stands, as far as that is known here."""
        of = "" if self.target is None else f" of {self.target}"
        why = in_brackets(self._view.fault if self._view is not None else None)
        parts = [f"{self._who}: {self.state}{why}", f"{self._num_known}{of} steps"]
        parts += self._record.in_words(with_pace=not self.is_over)
        if self._is_stale and not self.is_over:
            parts.append("as known before: the supervisor has not answered yet")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<run of {self}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """As the last value of a cell: the same line, with the newest step."""
        self.summary()
        return {"text/plain": repr(self)}

    # ---- from the link's thread

    def hear(self, view: rn.RunView, incidents: Iterable[Incident]) -> None:
        """The supervisor says how the run stands."""
        with self._changed:
            self._world = tuple(incidents)
            if self._view is not None and self._view.state in OVER:
                return
            self._view, self.target = view, view.target
            if view.state in OVER:
                self._fresh_until = 0.0
                self._last_incidents = frozenset(map(incident_key, self._world))
            self._wake()

    def cluster_gone(self, kind: str, message: str) -> None:
        """Nothing more will be heard; `kind`: a class of `nbdist.errors`. From any thread."""
        with self._changed:
            self._gone = self._gone or (kind, message)
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._is_settled:
            for wake in self._wakers:
                with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there
                    wake()
