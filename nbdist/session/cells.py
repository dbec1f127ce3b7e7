"""Run a cell on ranks: ask the supervisor, send it through ipyparallel, gather outcomes.

A cell ends when an engine that runs it dies. Replies and output come in the ipyparallel client's
thread, losses in the link's; both only note them under a lock. The caller's thread waits, shows,
and decides when the cell is over.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, EngineDied, NbdistError, RankError, WrongState
from nbdist.protocol import orders as od
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.protocol.ids import CellId
from nbdist.session.outputs import CellResult, NotSent, Progress, RankOutput

if TYPE_CHECKING:
    from nbdist.protocol.topology import Membership
    from nbdist.session.client import EngineClient
    from nbdist.session.link import Link

Watch = Callable[[Progress], None]

SHOW_PERIOD_S = 0.1
GRACE_AFTER_DEATH_S = 0.2
"""How long a cell in which an engine died waits for the ranks that its death frees."""
ADMISSION_LIMIT_S = 60.0
KILL_NOTICE_S = 2.0
KILL_AFTER_S = 5.0
ANNOUNCEMENT = (
    "this rank does not react to the interrupt; it is killed "
    f"{KILL_AFTER_S - KILL_NOTICE_S:g} s from now, and its variables are lost\n"
)
"""After an interrupt: when a kill of the ranks that go on is announced, and when it is done."""


class CellRun:
    """One cell, from its sending to its end."""

    def __init__(self, cell: CellId, admitted: od.CellAdmitted) -> None:
        self.cell = cell
        self.membership: Membership = admitted.membership
        self.ranks = admitted.ranks
        self.outputs = {rank: RankOutput() for rank in self.ranks}
        self._values: dict[int, dict[str, str]] = {}
        self.errors: dict[int, NbdistError] = {}
        self.waiting: dict[int, str] = {}
        self.break_reason = ""
        self.began = time.monotonic()
        self.died_at: float | None = None
        self.changed = threading.Condition()
        self._replied: set[int] = set()
        self._idle: set[int] = set()
        self.is_dirty = True
        """There is something that was not shown."""

    # ---- called in other threads

    def on_iopub(self, rank: int, message: dict[str, Any]) -> None:
        """A message that the engine published while it ran the cell."""
        kind, content, output = (
            message["header"]["msg_type"],
            message["content"],
            self.outputs[rank],
        )
        with self.changed:
            self.is_dirty = True
            if kind == "stream":
                output.add_text(content["name"], content["text"])
            elif kind in ("display_data", "execute_result"):
                is_result = kind == "execute_result"
                output.add_rich(content["data"], content.get("metadata", {}), is_result=is_result)

    def on_idle(self, rank: int, _future: Any) -> None:
        """All that the engine published for the cell has come."""
        with self.changed:
            self._idle.add(rank)
            self._wake_if_over()

    def on_reply(self, rank: int, future: Any) -> None:
        """The engine's reply, or what ipyparallel made up where it found the engine gone."""
        result = future.result()
        with self.changed:
            self.is_dirty = True
            self._replied.add(rank)
            if self.outputs[rank].state == "running":
                self._take(rank, result)
            self._wake_if_over()

    def on_lost(self, notice: od.EngineLost) -> None:
        """An engine is gone."""
        if notice.slot not in self.membership:
            return
        rank = int(self.membership.rank_of(notice.slot))
        if rank not in self.outputs or self.membership.members[rank].pid != notice.pid:
            return
        with self.changed:
            if self.outputs[rank].state == "running":
                self.is_dirty = True
                self.outputs[rank].state = "died"
                self.died_at = self.died_at or time.monotonic()
                self.errors[rank] = EngineDied(
                    slot=notice.slot,
                    rank=rank,
                    pid=notice.pid,
                    signal=notice.signal,
                    exit_code=notice.exit_code,
                    guess=notice.guess,
                    last_lines=notice.last_lines,
                )
                self.changed.notify_all()

    def on_unreachable(self, rank: int) -> None:
        """ipyparallel's client does not know the engine."""
        text = "ipyparallel's controller does not know its engine, so nothing can be sent to it"
        self.on_world_gone(f"{text}; %dist_kill {rank} gets a new one", ranks=(rank,))

    def on_world_gone(self, reason: str, ranks: tuple[int, ...] | None = None) -> None:
        """No reply will come from ranks (None: all) that have not ended."""
        with self.changed:
            for rank in self.running if ranks is None else ranks:
                if self.outputs[rank].state == "running":
                    self.outputs[rank].state = "error"
                    self.errors[rank] = RankError(rank, "RecoveryFailed", reason, [reason])
                self._replied.add(rank)
                self._idle.add(rank)
            self.is_dirty = True
            self.changed.notify_all()

    def on_released(self, notice: od.RanksReleased) -> None:
        """The group was broken under the cell."""
        if notice.generation == self.membership.generation:
            with self.changed:
                self.waiting, self.break_reason = dict(notice.waiting), notice.reason

    def _wake_if_over(self) -> None:
        """The caller sleeps until then; what is to be shown meanwhile it looks for now and then."""
        if self.is_over(time.monotonic()):
            self.changed.notify_all()

    def _take(self, rank: int, result: Any) -> None:
        output = self.outputs[rank]
        if isinstance(result, Exception):
            info = (getattr(result, "engine_info", None) or {}).get(METADATA)
            if info is None and getattr(result, "ename", None) == "EngineError":
                self._replied.discard(
                    rank
                )  # ipyparallel saw it gone; the supervisor's notice says how
                return
            if info is not None and info["released"]:
                output.state = "released"
                return
            output.state = "error"
            ename = getattr(result, "ename", None) or type(result).__name__
            evalue = getattr(result, "evalue", None) or ""
            traceback = getattr(result, "traceback", None) or []
            lines = traceback.splitlines() if isinstance(traceback, str) else traceback
            self.errors[rank] = RankError(rank, ename, evalue, lines)
            return
        output.state = "ok"
        ours = getattr(result, "_content", {}).get(METADATA, {})
        self._values[rank] = ours

    # ---- called in the caller's thread

    def raise_if_ended(self) -> None:
        """Raise where an engine died or the world is gone."""
        if self.errors:
            self.result()

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to be waited for."""
        if self.died_at is not None and now - self.died_at > GRACE_AFTER_DEATH_S:
            return True
        return all(
            output.state == "died" or (rank in self._replied and rank in self._idle)
            for rank, output in self.outputs.items()
        )

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank, output in self.outputs.items() if output.state == "running")

    def progress(self, *, done: bool) -> Progress:
        """A copy that nobody changes."""
        ranks = {r: replace(o, items=[_copy(i) for i in o.items]) for r, o in self.outputs.items()}
        seconds = time.monotonic() - self.began
        return Progress(self.cell, ranks, done, self.membership.generation, seconds)

    def wait_for_change(self) -> None:
        """Sleep until something comes in, or a moment."""
        with self.changed:
            if not self.is_over(time.monotonic()):
                self.changed.wait(0.05)

    def result(self) -> CellResult:
        """What a cell that succeeded gave; raises `CellFailed` or `EngineDied` where it failed."""
        died = [e for e in self.errors.values() if isinstance(e, EngineDied)]
        notes = self._notes()
        if died:
            error: CellFailed = died[0]
            error.errors = {e.rank: e for e in died} | {
                r: e for r, e in self.errors.items() if e not in died
            }
            error.notes = notes
            raise error
        if self.errors or notes:
            raise CellFailed(self._headline(), self.errors, notes)
        texts = {rank: output.text for rank, output in self.outputs.items()}
        found = {rank: _value(self._values.get(rank, {})) for rank in self.ranks}
        return CellResult(texts, found, self.membership.generation, time.monotonic() - self.began)

    def _headline(self) -> str:
        if not self.errors:
            return self.break_reason or "the group was broken"
        first = next(iter(self.errors.values()))
        ranks = ", ".join(map(str, sorted(self.errors)))
        return (
            f"{first.args[0]} (rank {ranks})"
            if len(self.errors) == 1
            else f"{first.args[0]} (ranks {ranks})"
        )

    def _notes(self) -> list[str]:
        released = [r for r, o in self.outputs.items() if o.state == "released"]
        notes = [
            f"rank {r} was released from {self.waiting.get(r, 'a collective')}" for r in released
        ]
        if self.died_at is not None:
            notes += [f"rank {r} still runs the cell" for r in self.running]
        return notes


class Cells:
    """Runs cells, and passes on what the link hears to those that run."""

    def __init__(self, link: Link, client: EngineClient) -> None:
        self._link, self._client = link, client
        self._runs: dict[CellId, CellRun] = {}
        self._sending = threading.Lock()
        """Cells of several threads reach all ranks in one order, so that their collectives meet."""

    def open_cells(self) -> list[CellId]:
        """Cells that run now."""
        return list(self._runs)

    def on_notice(self, notice: od.EngineLost | od.RanksReleased) -> None:
        """From the link's thread."""
        for run in list(self._runs.values()):
            if isinstance(notice, od.EngineLost):
                run.on_lost(notice)
            else:
                run.on_released(notice)

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
            KeyboardInterrupt: the user interrupted it; the ranks were interrupted too.
        """
        run = self.begin(code, ranks=ranks, once=once)
        succeeded = False
        try:
            self._send(run, code)
            self._wait(run, timeout, watch)
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
                self._send_one(run, rank, code)

    def _send_one(self, run: CellRun, rank: int, code: str) -> None:
        engine_id = run.membership.members[rank].engine_id
        self._client.wait_known(engine_id, lambda: run.outputs[rank].state != "running")
        metadata = {METADATA: {"cell": run.cell}}
        future = self._client.execute(engine_id, code, metadata, partial(self._hook, run, rank))
        if future is None:
            run.on_unreachable(rank)
        else:
            future.add_done_callback(partial(run.on_reply, rank))

    @staticmethod
    def _hook(run: CellRun, rank: int, future: Any) -> None:
        future.iopub_callbacks.append(partial(run.on_iopub, rank))
        future.output.add_done_callback(partial(run.on_idle, rank))

    def _wait(self, run: CellRun, timeout: float | None, watch: Watch | None) -> None:
        show = _Throttle(run, watch)
        try:
            while not run.is_over(now := time.monotonic()):
                if timeout is not None and now - run.began > timeout:
                    self._expire(run, timeout, show)
                show(now)
                run.wait_for_change()
        except KeyboardInterrupt:
            self._interrupt(run, show)
            raise

    def _expire(self, run: CellRun, timeout: float, show: _Throttle) -> None:
        who = ("rank " if len(run.running) == 1 else "ranks ") + ", ".join(map(str, run.running))
        self._interrupt(run, show)
        text = f"the cell ran longer than its limit of {timeout:g} s; still running then: {who}"
        raise CellFailed(text, run.errors)

    def _interrupt(self, run: CellRun, show: _Throttle) -> None:
        """KeyboardInterrupt where Python runs, a broken group where a collective waits.

        Ranks that go on all the same are ended after a while, and their seats filled again.
        """
        self._link.say(od.InterruptCell(cell=run.cell))
        began, announced = time.monotonic(), False
        while not run.is_over(now := time.monotonic()):
            if now - began > KILL_NOTICE_S and not announced:
                announced = True
                for rank in run.running:
                    run.outputs[rank].add_text("stderr", ANNOUNCEMENT)
                run.is_dirty = True
            if now - began > KILL_AFTER_S:
                slots = tuple(run.membership.slots[r] for r in run.running)
                with contextlib.suppress(TimeoutError, NbdistError):  # the next cell is not theirs
                    self._link.ask(od.SignalEngines(slots=slots, signal="KILL"), KILL_AFTER_S)
                return
            show(now)
            run.wait_for_change()


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


def _copy(item: Any) -> Any:
    return replace(item)


def _value(ours: dict[str, str]) -> Any:
    """The value of the last expression.

    Unpacked here and not where it arrives: unpacking a tensor imports torch.
    """
    if "value" in ours:
        try:
            return values.unpack(base64.b64decode(ours["value"]))
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything
            return NotSent(f"it cannot be unpacked here: {type(error).__name__}: {error}")
    return NotSent(ours["not_sent"]) if "not_sent" in ours else None
