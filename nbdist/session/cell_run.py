"""One cell, from its sending to its end: what came back from each rank, and how the cell ends.

Replies and output come in the ipyparallel client's thread, losses in the link's; they note them
here under a lock. The caller's thread waits, reads, and decides when the cell is over.
"""

from __future__ import annotations

import base64
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, EngineDied, NbdistError, RankError
from nbdist.protocol import orders as od
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.session.outputs import CellResult, NotSent, Progress, RankOutput

if TYPE_CHECKING:
    from nbdist.protocol.ids import CellId
    from nbdist.protocol.topology import Membership

GRACE_AFTER_DEATH_S = 0.2
"""How long a cell in which an engine died waits for the ranks that its death frees."""


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
            self._idle.add(rank)  # what it has not published yet never comes
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
            for rank in self.ranks if ranks is None else ranks:
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
