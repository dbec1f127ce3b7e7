"""Run a cell on ranks: ask the supervisor, send it through ipyparallel, gather outcomes.

A cell ends when an engine that runs it dies, unless it is inside its own training loop: then it is
sent to the engine that comes in its place. Replies and output come in the ipyparallel client's
thread, losses in the link's; both only note them under a lock. The caller's thread waits, shows,
and decides when the cell is over.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, NbdistError, WrongState
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.calls import METADATA
from nbdist.protocol.ids import CellId
from nbdist.session.cell_run import CellRun
from nbdist.session.outputs import CellResult, Progress
from nbdist.session.status import lack_of

if TYPE_CHECKING:
    from nbdist.session.client import EngineClient
    from nbdist.session.link import Link

Watch = Callable[[Progress], None]
Notice = od.EngineLost | od.RanksReleased | od.WorldView | rn.CellTrains | rn.SendCellTo

SHOW_PERIOD_S = 0.1
ADMISSION_LIMIT_S = 60.0
KILL_NOTICE_S = 2.0
KILL_AFTER_S = 5.0
ANNOUNCEMENT = (
    "this rank does not react to the interrupt; it is killed "
    f"{KILL_AFTER_S - KILL_NOTICE_S:g} s from now, and its variables are lost\n"
)
"""After an interrupt: when a kill of the ranks that go on is announced, and when it is done."""


class Cells:
    """Runs cells, and passes on what the link hears to those that run."""

    def __init__(self, link: Link, client: EngineClient) -> None:
        self._link, self._client = link, client
        self._runs: dict[CellId, CellRun] = {}
        self._view: od.WorldView | None = None
        """As the supervisor told it last."""
        self._sending = threading.Lock()
        """Cells of several threads reach all ranks in one order, so that their collectives meet."""

    def open_cells(self) -> list[CellId]:
        """Cells that run now."""
        return list(self._runs)

    def on_notice(self, notice: Notice) -> None:
        """From the link's thread."""
        if isinstance(notice, od.WorldView):
            self._view = notice
        for run in list(self._runs.values()):
            match notice:
                case od.EngineLost():
                    run.on_lost(notice)
                case od.RanksReleased():
                    run.on_released(notice)
                case od.WorldView(membership=membership):
                    run.on_world(membership)
                case rn.CellTrains() if notice.cell == run.cell:
                    run.on_trains(notice)
                case rn.SendCellTo() if notice.cell == run.cell:
                    run.on_send_to(notice)

    def on_world_gone(self, reason: str) -> None:
        """From any thread: the cluster is of no use any more."""
        for run in list(self._runs.values()):
            run.on_world_gone(reason)

    def begin(
        self,
        code: str,
        *,
        ranks: tuple[int, ...] | None,
        once: bool,
        pushed: dict[str, bytes] | None = None,
    ) -> CellRun:
        """Enter a cell or push in the journal and learn on whom it runs.

        Waits while the world changes.
        """
        cell = CellId(secrets.token_hex(6))
        order = od.BeginCell(cell=cell, code=code, ranks=ranks, once=once, values=pushed or {})
        try:
            run = CellRun(cell, self._link.ask(order, ADMISSION_LIMIT_S))
        except TimeoutError:
            self._link.say(od.EndCell(cell=cell, succeeded=False, seconds=0.0))
            view = self._link.ask(od.QueryView(), 5.0)
            raise WrongState(
                f"the world is {view.phase} for {ADMISSION_LIMIT_S:g} s: {view.reason}. "
                "Look at %dist_status"
            ) from None
        except BaseException:
            self._link.say(od.EndCell(cell=cell, succeeded=False, seconds=0.0))
            raise
        self._runs[cell] = run
        return run

    def end(self, run: CellRun, *, succeeded: bool) -> None:
        """A cell or push is over."""
        self._runs.pop(run.cell, None)
        seconds = time.monotonic() - run.began
        self._link.say(od.EndCell(cell=run.cell, succeeded=succeeded, seconds=seconds))

    def run(
        self,
        code: str,
        *,
        ranks: tuple[int, ...] | None = None,
        timeout: float | None = None,
        once: bool = False,
        watch: Watch | None = None,
    ) -> CellResult:
        """Run a cell to its end.

        Args:
            code: source; IPython syntax works.
            ranks: where; None: everywhere, and on engines that join later.
            timeout: seconds after which the cell is interrupted and fails; None: never.
            once: not replayed to engines that join later.
            watch: called now and then with what there is to show, and once at the end.

        Raises:
            CellFailed, EngineDied: it failed on a rank.
            CellInterrupted: the user interrupted it; a KeyboardInterrupt.
        """
        run = self.begin(code, ranks=ranks, once=once)
        if ranks is None and self._view is not None:
            run.lack = lack_of(run.membership, self._view)
        succeeded = False
        try:
            self._send(run, code)
            self._wait(run, code, timeout, watch)
            result = run.result()
            succeeded = True
            return result
        finally:
            self.end(run, succeeded=succeeded)
            if watch is not None:
                watch(run.progress(done=True))

    def _send(self, run: CellRun, code: str) -> None:
        with self._sending:
            for rank in run.ranks:
                self._send_one(run, rank, code, generation=run.membership.generation)

    def _send_to_newcomers(self, run: CellRun, code: str) -> None:
        if not run.has_newcomers:
            return
        with self._sending:
            for rank in run.take_newcomers():
                self._send_one(run, rank, code)

    def _send_one(
        self, run: CellRun, rank: int, code: str, *, generation: int | None = None
    ) -> None:
        """Send it, to be begun in this generation only; None: in any, since it trains."""
        engine_id, pid = run.engines[rank].engine_id, run.engines[rank].pid
        self._client.wait_known(engine_id, lambda: run.outputs[rank].state != "running")
        over = run.admitted.over
        metadata = {METADATA: {"cell": run.cell, "generation": generation, "over": over}}
        future = self._client.execute(
            engine_id, code, metadata, partial(self._hook, run, rank, pid)
        )
        if future is None:
            run.on_unreachable(rank)
        else:
            future.add_done_callback(partial(run.on_reply, rank, pid=pid))

    @staticmethod
    def _hook(run: CellRun, rank: int, pid: int, future: Any) -> None:
        future.iopub_callbacks.append(partial(run.on_iopub, rank, pid=pid))
        future.output.add_done_callback(partial(run.on_idle, rank, pid=pid))

    def _wait(self, run: CellRun, code: str, timeout: float | None, watch: Watch | None) -> None:
        show = _Throttle(run, watch)
        try:
            while not run.is_over(now := time.monotonic()):
                if timeout is not None and now - run.began > timeout:
                    self._expire(run, timeout, show)
                self._send_to_newcomers(run, code)
                show(now)
                run.wait_for_change()
        except KeyboardInterrupt:
            raise run.interrupted(self._interrupt(run, show)) from None

    def _expire(self, run: CellRun, timeout: float, show: _Throttle) -> None:
        who = ("rank " if len(run.running) == 1 else "ranks ") + ", ".join(map(str, run.running))
        self._interrupt(run, show)
        text = f"the cell ran longer than its limit of {timeout:g} s; still running then: {who}"
        raise CellFailed(text, run.errors)

    def _interrupt(self, run: CellRun, show: _Throttle) -> tuple[int, ...]:
        """KeyboardInterrupt where Python runs, a broken group where a collective waits.

        Ranks that go on all the same are ended after a while, and their seats filled again; these
        are returned.
        """
        run.refuse_newcomers()
        began, is_told, is_announced = time.monotonic(), False, False
        while not run.is_over(now := time.monotonic()) and now - began < KILL_AFTER_S:
            try:
                if not is_told:
                    self._link.say(od.InterruptCell(cell=run.cell))
                    is_told = True
                if now - began > KILL_NOTICE_S and not is_announced:
                    is_announced = True
                    run.announce(ANNOUNCEMENT)
                show(now)
                run.wait_for_change()
            except KeyboardInterrupt:  # once more: the ranks are told again, the limit stays
                is_told = False
        stubborn = () if run.is_over(time.monotonic()) else run.running
        if stubborn:
            slots = run.slots_of(stubborn)
            with contextlib.suppress(TimeoutError, NbdistError):  # the next cell is not theirs
                self._link.ask(od.SignalEngines(slots=slots, signal="KILL"), KILL_AFTER_S)
        return stubborn


class _Throttle:
    """Shows a cell that has changed, but not too often."""

    def __init__(self, run: CellRun, watch: Watch | None) -> None:
        self._run, self._watch = run, watch
        self._next = time.monotonic() + SHOW_PERIOD_S

    def __call__(self, now: float) -> None:
        if self._watch is not None and now >= self._next and self._run.is_dirty:
            self._run.is_dirty = False
            self._watch(self._run.progress(done=False))
            self._next = time.monotonic() + SHOW_PERIOD_S
