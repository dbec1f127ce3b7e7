"""The object behind `nbdist.start`: one cluster of engines, as the notebook holds it.

Runs in the kernel; never imports torch. The supervisor decides and heals; this asks, waits and
shows.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist.errors import NbdistError, NotStarted, RecoveryFailed, StartFailed
from nbdist.gpus import own_use
from nbdist.processes import end_processes
from nbdist.protocol import calls
from nbdist.protocol import orders as od
from nbdist.session.cells import Cells, Watch
from nbdist.session.client import EngineClient
from nbdist.session.dashboards import Dashboards
from nbdist.session.engine_calls import EngineCalls
from nbdist.session.feed import Feeds
from nbdist.session.link import Link
from nbdist.session.runs import Runs
from nbdist.session.saving import Checkpoint, Saving
from nbdist.session.slowing import risk_of, slow_factor
from nbdist.session.status import (
    RankStatus,
    check_cell,
    check_limit,
    chosen_ranks,
    crowding,
    is_healthy,
    log_ends,
    rank_status,
    trouble_of,
    whole_number,
    why_not_started,
    why_unhealthy,
)
from nbdist.session.variables import Variable, variables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from nbdist.config import ClusterConfig
    from nbdist.protocol.events import Incident
    from nbdist.protocol.ids import CellId
    from nbdist.rundir import RunDir
    from nbdist.session.outputs import CellResult
    from nbdist.session.run import Run

SHUTDOWN_LIMIT_S = 8.0


class Cluster:
    """A running cluster. Made by `nbdist.start`; a context manager that shuts down at its end."""

    def __init__(self, rundir: RunDir, config: ClusterConfig) -> None:
        self.config = config
        self.on_shutdown: Callable[[], None] = lambda: None
        """Called once, when its shutdown begins."""
        self._rundir = rundir
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._view: od.WorldView | None = None
        self._client = EngineClient(rundir.connection_file("client"))
        self._is_shut_down = False
        self._link = Link(
            rundir, notice=self._hear, open_cells=self._open_cells, lost=self._world_gone
        )
        self._cells = Cells(self._link, self._client)
        self._calls = EngineCalls(self._cells, self._client)
        self.feeds = Feeds(self._link)
        self.dashboards = Dashboards(self, self._link.ask)
        """Where live views subscribe; those that are open."""
        self._runs = Runs(self._link.ask, self.dashboards)
        self._saving = Saving(self._calls, self._link.ask, self._runs.all)
        self._risk: list[str] = []
        """What may come of how slow ranks were made last."""

    # ---- what it is

    @property
    def id(self) -> str:
        """The cluster's name, as `nbdist ps` shows it."""
        return self._rundir.cluster_id

    @property
    def world_size(self) -> int:
        """Ranks in the present group."""
        return self._seen.membership.world_size

    @property
    def generation(self) -> int:
        """Number of the present group."""
        return self._seen.membership.generation

    @property
    def incidents(self) -> list[Incident]:
        """Every membership change so far, oldest first."""
        return list(self._seen.incidents)

    @property
    def trouble(self) -> str:
        """Why cells cannot run on all seats now, in words; empty where they can."""
        return trouble_of(self._seen)

    @property
    def warnings(self) -> list[str]:
        """What the user should know about how this cluster runs."""
        is_any_slow = any(seat.slow_factor > 1 for seat in self._seen.seats)
        ours = [*(self._risk if is_any_slow else []), *self._calls.notes]
        return [*self._seen.notes, *crowding(self._seen.size), *ours, *own_use()]

    @property
    def logs(self) -> Path:
        """Folder of the logs: one file per slot, and one per process of ours."""
        return self._rundir.log("x").parent

    def status(self) -> list[RankStatus]:
        """The seats now, in slot order."""
        view = self._ask(od.QueryView(), 5.0)
        step, pace = self._runs.pace()
        share = pace / view.membership.world_size if pace is not None else None
        return [rank_status(seat, step, share) for seat in view.seats]

    # ---- cells and values

    def run(
        self,
        code: str,
        *,
        ranks: int | Iterable[int] | None = None,
        timeout: float | None = None,
        once: bool = False,
        watch: Watch | None = None,
    ) -> CellResult:
        """Run a cell on all ranks, or on some; returns when it has ended on all of them.

        Args:
            code: source; IPython syntax and `await` work.
            ranks: which ranks; None: all, those that join later included.
            timeout: seconds after which it is interrupted and fails; None: no limit.
            once: do not replay it to engines that join later.
            watch: called in this thread with what there is to show.

        Raises:
            CellFailed: it raised on a rank; `errors` holds the engine's errors by rank.
            EngineDied: an engine ended while it ran (a `CellFailed` too).
            TargetError: the present world has no such rank.
            RecoveryFailed: no world is left to run it on.
        """
        chosen = self._chosen(ranks)
        check_cell(code, timeout)
        return self._cells.run(code, ranks=chosen, timeout=timeout, once=once, watch=watch)

    def push(self, *, ranks: int | Iterable[int] | None = None, **named: Any) -> None:
        """Bind names on the engines; engines that join later get them too.

        Raises:
            TypeError: a value cannot be sent; the message says which, and why.
        """
        self._calls.push(self._chosen(ranks), named)

    def pull(
        self, name: str, *, ranks: int | Iterable[int] | None = None, as_numpy: bool = False
    ) -> dict[int, Any]:
        """Values of a name by rank; tensors arrive on the CPU, or with `as_numpy` as numpy arrays.

        Raises:
            CellFailed: the name is not bound on a rank, or its value cannot be sent.
        """
        return self._calls.pull(self._chosen(ranks), name, as_numpy=as_numpy)

    def parameter_digest(self, name: str) -> dict[int, str]:
        """Rank -> sha256 of all parameters of the trainer or Module that a variable holds.

        Equal strings mean that they are equal bit for bit.

        Raises:
            CellFailed: the name is not bound on a rank, or holds something else.
        """
        return self._calls.look(calls.PARAMETER_DIGEST, self._chosen(None), name)

    def variables(self, *names: str) -> list[Variable]:
        """The engines' variables, and which are equal on all ranks; no values travel.

        Large ones are compared where they are named.
        """
        self.check_alive()
        return variables_of(self._calls, names)

    def sync(self) -> None:
        """Wait until all ranks have come to the same point."""
        self.run("dist.barrier()", once=True)

    # ---- training

    def train(self, name: str, *, steps: int) -> Run:
        """Train with the trainer that a variable of the engines holds; returns at once.

        Args:
            name: the variable.
            steps: so many more committed steps.

        Raises:
            WrongState: a run goes on already.
            NbdistError: the variable holds no trainer on some rank; the message says which.
        """
        self._seen  # noqa: B018 - raises where the cluster is shut down
        return self._runs.begin(name, steps)

    @property
    def runs(self) -> list[Run]:
        """The training runs that this kernel knows of, oldest first; cells' own loops too."""
        return self._runs.all()

    def save(
        self, path: str | os.PathLike[str], name: str | None = None, *, keep: int | None = None
    ) -> Checkpoint:
        """Save a trainer's state, at the next step boundary; a run goes on while it is written.

        Args:
            path: the folder for checkpoints; each gets one of its own there.
            name: the trainer's variable; None: that of the run, or the only one.
            keep: so many of the newest stay, 2 or more; None: all.

        Raises:
            FileUnwritable, SaveAbandoned, WrongState: it cannot be written; an engine was lost
                meanwhile; nothing is trained yet. Earlier checkpoints are as they were.
        """
        self.check_alive()
        return self._saving.save(path, name, keep)

    def load(self, path: str | os.PathLike[str], name: str | None = None) -> Checkpoint:
        """Load the newest checkpoint that is whole, whatever ranks and strategy it is of.

        Args:
            path: the folder for checkpoints, or one of them.
            name: the trainer's variable; None: the only one there is.

        Raises:
            CheckpointUnreadable, WrongState: none fits; a run goes on. Nothing has changed.
        """
        self.check_alive()
        return self._saving.load(path, name)

    # ---- faults and size

    def kill(
        self, ranks: int | Iterable[int], *, signal: Literal["KILL", "TERM", "STOP"] = "KILL"
    ) -> None:
        """Take engines down, to watch the recovery.

        Returns when the exits are recorded (STOP: when it is delivered).
        """
        if signal not in ("KILL", "TERM", "STOP"):
            raise ValueError(f"signal={signal!r}: must be KILL, TERM or STOP")
        slots = tuple(self._seen.membership.slots[rank] for rank in self._chosen(ranks) or ())
        self._ask(od.SignalEngines(slots=slots, signal=signal), 30.0)

    def slow(self, ranks: int | Iterable[int], factor: float) -> None:
        """Make ranks slow, to watch a straggler; returns when they have taken it.

        Args:
            ranks: which.
            factor: in a trainer's steps their own compute takes so many times as long, by sleep;
                1 ends it. Who takes the seat of a slow engine is not slow. `warnings` say where
                a rank will be taken for hung.
        """
        factor, seats = slow_factor(factor), self._seen.seats
        risk = risk_of(factor, seats, self._runs.usual_s(), self.config.hang_timeout_s)
        slots = tuple(self._seen.membership.slots[rank] for rank in self._chosen(ranks) or ())
        self._ask(od.SlowEngines(slots=slots, factor=factor), 10.0)
        self._risk = risk

    def scale(self, size: int) -> None:
        """Grow or shrink to `size` engines; returns when the new world is formed.

        Raises:
            ValueError, RecoveryFailed: no such size; the new engines cannot be started.
        """
        self._ask(od.Scale(size=whole_number("size", size)), self.config.start_timeout_s + 30.0)

    def check_alive(self) -> None:
        """Raise RecoveryFailed where nothing is left to go on with; it says what works then."""
        if self._seen.phase == "failed":
            raise RecoveryFailed(self._seen.reason)

    def wait_healthy(self, timeout: float = 30.0, after: int | None = None) -> None:
        """Wait until all seats are filled and the group is formed.

        Args:
            timeout: seconds.
            after: a generation that must be passed.

        Raises:
            RecoveryFailed, WrongState: it cannot become healthy; the latter by policy shrink.
            TimeoutError: it did not in time; the message says what is missing.
        """
        check_limit(timeout, may_be_none=False)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if is_healthy(self._seen, after):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(why_unhealthy(self._seen, timeout, after))
                self._changed.wait(0.1)

    # ---- start and end

    def bring_up(self) -> None:
        """Start everything and wait for the first group; called once, by `start`."""
        self._link.start()
        deadline = time.monotonic() + self.config.start_timeout_s + 10.0
        while not self._rundir.is_controller_ready:
            self._check_start(deadline)
        self._client.connect()
        while self._view is None or self._view.phase != "running":
            self._check_start(deadline)

    def _check_start(self, deadline: float) -> None:
        with self._changed:
            self._changed.wait(0.02)
        is_late = time.monotonic() > deadline
        if why := why_not_started(self._view, self.config.start_timeout_s, is_late=is_late):
            raise StartFailed(f"{why}\n{log_ends(self.logs)}")

    def shutdown(self) -> None:
        """End all that this cluster started, and nothing else; bounded, whatever the engines do."""
        if self._is_shut_down or os.getpid() != self._pid:  # a forked child does not own it
            return
        self._is_shut_down = True
        self._cells.on_world_gone("the cluster was shut down while the cell ran")
        self._calls.close()
        self.on_shutdown()
        try:
            self._runs.shut_down()
            self.feeds.close_all("the cluster was shut down")
            with contextlib.suppress(NbdistError, TimeoutError):
                self._link.ask(od.Shutdown(), SHUTDOWN_LIMIT_S)
        finally:  # also after an interrupt, and where the supervisor is gone or stuck
            self._link.close()
            end_processes(self._rundir.path, timeout_s=5.0)
            self._client.close()
            self._rundir.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        if self._is_shut_down:
            return f"<nbdist cluster {self.id}, shut down>"
        return f"<nbdist cluster {self.id}: {self.world_size} ranks, generation {self.generation}>"

    # ---- inside

    @property
    def _seen(self) -> od.WorldView:
        if self._view is None or self._is_shut_down:
            raise NotStarted(
                "this cluster is shut down; start one with %dist_init or nbdist.start()"
            )
        return self._view

    def _world_gone(self, reason: str) -> None:
        self._cells.on_world_gone(reason)
        self._runs.cluster_gone("RecoveryFailed", reason)
        self.feeds.close_all(reason)

    def _open_cells(self) -> list[CellId]:
        return self._cells.open_cells()

    def _hear(self, notice: Any) -> None:
        """From the link's thread: store and return."""
        if isinstance(notice, od.WorldView):
            with self._changed:
                self._view = notice
                self._changed.notify_all()
            self._runs.hear(notice)
        self.feeds.hear(notice)
        self._cells.on_notice(notice)
        if isinstance(notice, od.WorldView) and notice.phase == "failed":
            self._cells.on_world_gone(notice.reason)

    def _ask(self, order: od.KernelOrder, timeout: float) -> Any:
        self._seen  # noqa: B018 - raises where the cluster is shut down
        return self._link.ask(order, timeout)

    def _chosen(self, ranks: int | Iterable[int] | None) -> tuple[int, ...] | None:
        self.check_alive()
        return None if ranks is None else chosen_ranks(ranks, self.world_size)
