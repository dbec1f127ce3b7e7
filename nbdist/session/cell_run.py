"""One cell, from its sending to its end: what came back from each rank, and how the cell ends.

Replies and output come in the ipyparallel client's thread, losses in the link's; they note them
here under a lock. The caller's thread waits, reads, and decides when the cell is over.

A cell that is inside its own training loop goes on when an engine ends. Its ranks keep the numbers
under which they began, or were added: a rank's part goes on with the next engine on its slot.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    CellFailed,
    CellInterrupted,
    EngineDied,
    NbdistError,
    RankError,
    RunEnded,
    headline,
)
from nbdist.protocol.calls import METADATA
from nbdist.session.outputs import CellResult, Progress, RankOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.protocol import orders as od
    from nbdist.protocol import runs as rn
    from nbdist.protocol.ids import CellId, Slot
    from nbdist.protocol.topology import Member, Membership

GRACE_AFTER_DEATH_S = 0.2
"""How long a cell in which an engine died waits for the ranks that its death frees."""


class CellRun:
    """One cell, from its sending to its end."""

    def __init__(self, cell: CellId, admitted: od.CellAdmitted) -> None:
        self.cell = cell
        self.membership: Membership = admitted.membership
        """As the cell began."""
        self.world: Membership = admitted.membership
        """As it is now; differs only once the cell has trained."""
        self.ranks = admitted.ranks
        self.lack = ""
        """Which ranks it began on and why not on all; empty where it began on all."""
        self.is_training = False
        self.outputs = {rank: RankOutput() for rank in self.ranks}
        self.engines: dict[int, Member | rn.SendCellTo] = {
            rank: admitted.membership.members[rank] for rank in self.ranks
        }
        """Rank -> the engine that runs its part now, or ran it last."""
        self._to_send: dict[Slot, rn.SendCellTo] = {}
        """Newcomers that are to run the cell too."""
        self._takes_newcomers = True
        self.admitted = admitted
        self._values: dict[int, dict[str, str]] = {}
        self.errors: dict[int, NbdistError] = {}
        self.waiting: dict[int, str] = {}
        self.break_reason = ""
        self.began = time.monotonic()
        self.died_at: float | None = None
        self.changed = threading.Condition()
        self._replied: set[int] = set()
        self._idle: set[int] = set()
        self._unbegun: set[int] = set()
        """Ranks to which it came when the group was gone."""
        self.is_dirty = True
        """There is something that was not shown."""

    # ---- called in other threads

    def on_iopub(self, rank: int, message: dict[str, Any], *, pid: int | None = None) -> None:
        """A message that the engine (None: the present one) published while it ran the cell."""
        kind, content, output = (
            message["header"]["msg_type"],
            message["content"],
            self.outputs[rank],
        )
        with self.changed:
            if self._is_replaced(rank, pid):
                return
            self.is_dirty = True
            if kind == "stream":
                output.add_text(content["name"], content["text"])
            elif kind in ("display_data", "execute_result"):
                is_result = kind == "execute_result"
                output.add_rich(content["data"], content.get("metadata", {}), is_result=is_result)

    def on_idle(self, rank: int, _future: Any, *, pid: int | None = None) -> None:
        """All that the engine published for the cell has come."""
        with self.changed:
            if not self._is_replaced(rank, pid):
                self._idle.add(rank)
                self._wake_if_over()

    def on_reply(self, rank: int, future: Any, *, pid: int | None = None) -> None:
        """The engine's reply, or what ipyparallel made up where it found the engine gone."""
        result = future.result()
        with self.changed:
            if self._is_replaced(rank, pid):
                return
            self.is_dirty = True
            self._replied.add(rank)
            if self.outputs[rank].state == "running":
                self._take(rank, result)
            self._wake_if_over()

    def _is_replaced(self, rank: int, pid: int | None) -> bool:
        return pid is not None and self.engines[rank].pid != pid

    def on_lost(self, notice: od.EngineLost) -> None:
        """An engine is gone."""
        with self.changed:
            waiting = self._to_send.get(notice.slot)
            if waiting is not None and waiting.pid == notice.pid:
                del self._to_send[notice.slot]
            for rank, engine in self.engines.items():
                if (engine.slot, engine.pid) == (notice.slot, notice.pid):
                    self._lose(rank, notice)
            self.changed.notify_all()

    def _lose(self, rank: int, notice: od.EngineLost) -> None:
        self._idle.add(rank)  # what it has not published yet never comes
        if self.outputs[rank].state != "running":
            return
        self.is_dirty = True
        if self.is_training:
            self.outputs[rank].state = "lost"
            return
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
            at=time.strftime("%H:%M:%S"),
        )

    def on_trains(self, notice: rn.CellTrains) -> None:
        """The cell has come to its own training loop, or left it."""
        with self.changed:
            self.is_training = notice.is_training
            self.changed.notify_all()

    def on_send_to(self, notice: rn.SendCellTo) -> None:
        """A newcomer is to run the cell too; a supervisor that takes over may say it again."""
        with self.changed:
            is_new = all(engine.pid != notice.pid for engine in self.engines.values())
            if is_new and self._takes_newcomers:
                self._to_send[notice.slot] = notice
                self.changed.notify_all()

    def on_world(self, membership: Membership) -> None:
        """A group was formed while the cell trains; who left it has no outcome any more."""
        with self.changed:
            if not self.is_training or membership.generation <= self.world.generation:
                return
            inside = [rank for rank in self.engines if not self._is_outside(rank)]
            self.world = membership
            for rank in inside:
                if self._is_outside(rank) and self.outputs[rank].state == "running":
                    self.outputs[rank].state, self.is_dirty = "lost", True
            self.changed.notify_all()

    def on_unreachable(self, rank: int) -> None:
        """ipyparallel's client does not know the engine."""
        if self._is_outside(rank):  # a newcomer that has ended already
            with self.changed:
                self.outputs[rank].state = "lost"
            return
        text = "ipyparallel's controller does not know its engine, so nothing can be sent to it"
        self.on_world_gone(f"{text}; %dist_kill {rank} gets a new one", ranks=(rank,))

    def on_world_gone(self, reason: str, ranks: tuple[int, ...] | None = None) -> None:
        """No reply will come from ranks (None: all) that have not ended."""
        with self.changed:
            over = ("running", "lost") if ranks is None else ("running",)
            for rank in self.outputs if ranks is None else ranks:
                if self.outputs[rank].state in over:
                    self.outputs[rank].state = "error"
                    self.errors[rank] = RankError(rank, "RecoveryFailed", reason, [reason])
                self._replied.add(rank)
                self._idle.add(rank)
            self.is_dirty = True
            self.changed.notify_all()

    def on_released(self, notice: od.RanksReleased) -> None:
        """The group was broken under the cell."""
        if notice.generation == self.world.generation:
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
                # ipyparallel saw it gone. The supervisor's notice says how; of one that was not in
                # the world yet there is none.
                self._replied.discard(rank)
                if self._is_outside(rank):
                    output.state = "lost"
                return
            ename = getattr(result, "ename", None) or type(result).__name__
            evalue = getattr(result, "evalue", None) or ""
            if ename == RunEnded.__name__:  # what another rank raised, or why it cannot train
                output.state = "released"
                self.waiting[rank], self.break_reason = "its training loop", evalue
                return
            if info is not None and info["released"]:
                output.state = "released"
                if not info.get("is_begun", True):
                    self._unbegun.add(rank)
                return
            traceback = getattr(result, "traceback", None) or []
            lines = traceback.splitlines() if isinstance(traceback, str) else traceback
            output.state = "error"
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
        present = [rank for rank in self.outputs if self._counts(rank)]
        if not all(
            self.outputs[rank].state == "died" or (rank in self._replied and rank in self._idle)
            for rank in present
        ):
            return False
        # Another may take a lost one's place as long as others train; when they are done, it is
        # late, and so is one that was sent the cell and has not come into the world.
        return bool(present) or not self.is_training

    def _counts(self, rank: int) -> bool:
        """Whether a rank's part is waited for, and has an outcome."""
        return self.outputs[rank].state != "lost" and not self._is_outside(rank)

    def _is_outside(self, rank: int) -> bool:
        """Whether the engine that has a rank's part is not in the world, or not in it yet."""
        engine = self.engines[rank]
        if engine.slot not in self.world:
            return True
        return self.world.members[self.world.rank_of(engine.slot)].pid != engine.pid

    @property
    def has_newcomers(self) -> bool:
        """Whether the cell has to be sent to somebody."""
        return bool(self._to_send)

    def refuse_newcomers(self) -> None:
        """The cell is to end: it is sent to nobody any more."""
        with self.changed:
            self._takes_newcomers = False
            self._to_send.clear()

    def take_newcomers(self) -> tuple[int, ...]:
        """Ranks whose engine is new, and to which the cell has to be sent."""
        with self.changed:
            notices, self._to_send = list(self._to_send.values()), {}
            return tuple(map(self._seat, notices))

    def _seat(self, notice: rn.SendCellTo) -> int:
        """Make a newcomer the engine of its slot's rank."""
        ranks = {engine.slot: rank for rank, engine in self.engines.items()}
        rank = ranks.get(notice.slot)
        if rank is None:
            is_free = int(notice.slot) not in self.engines
            rank = int(notice.slot) if is_free else max(self.engines) + 1
            self.outputs[rank] = RankOutput()
            line = f"[slot {notice.slot} has joined: from here on the cell runs on it too]"
        else:
            line = f"[the engine on slot {notice.slot} was replaced: the cell goes on with the new]"
        self.engines[rank] = notice
        self.outputs[rank].state = "running"
        self.outputs[rank].add_line(line)
        self.is_dirty = True
        self._values.pop(rank, None)
        self.errors.pop(rank, None)
        self._replied.discard(rank)
        self._idle.discard(rank)
        return rank

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank, output in self.outputs.items() if output.state == "running")

    def announce(self, text: str) -> None:
        """Say something to those who look at the ranks that have not ended."""
        for rank in self.running:
            self.outputs[rank].add_text("stderr", text)
        self.is_dirty = True

    def slots_of(self, ranks: tuple[int, ...]) -> tuple[Slot, ...]:
        """Where their parts run."""
        return tuple(self.engines[rank].slot for rank in ranks)

    def progress(self, *, done: bool) -> Progress:
        """A copy that nobody changes."""
        with self.changed:
            ranks = {
                rank: replace(output, items=[replace(item) for item in output.items])
                for rank, output in self.outputs.items()
            }
            seconds = time.monotonic() - self.began
            notes = tuple(self._remarks()) if done else (self.lack,) if self.lack else ()
        return Progress(self.cell, ranks, done, self.world.generation, seconds, notes)

    def wait_for_change(self) -> None:
        """Sleep until something comes in, or a moment."""
        with self.changed:
            if not self._to_send and not self.is_over(time.monotonic()):
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
        ranks = dict(self._final_ranks())
        if not ranks:
            raise CellFailed("every engine that ran the cell is gone", {}, list(self._remarks()))
        texts = {final: self.outputs[rank].text for rank, final in ranks.items()}
        found = {final: self._values.get(rank, {}) for rank, final in ranks.items()}
        seconds = time.monotonic() - self.began
        return CellResult(texts, found, self.world.generation, seconds, tuple(self._remarks()))

    def interrupted(self, killed: tuple[int, ...]) -> CellInterrupted:
        """How a cell ends that the user interrupted; some ranks had to be killed for it."""
        stopped = {rank: error for rank, error in self.errors.items() if rank not in killed}
        notes = [f"rank {rank} did not react and was killed" for rank in killed]
        return CellInterrupted(stopped, [*self._notes(), *notes])

    def _final_ranks(self) -> Iterator[tuple[int, int]]:
        """Ranks that have an outcome, each with its rank in the world as it is now."""
        for rank, engine in sorted(self.engines.items(), key=lambda item: item[1].slot):
            if self._counts(rank):
                yield rank, int(self.world.rank_of(engine.slot))

    def _remarks(self) -> Iterator[str]:
        if self.lack:
            yield self.lack
        if self.admitted.between is not None:
            yield "ran between steps {} and {}".format(*self.admitted.between)
        have_outcome = dict(self._final_ranks())
        for rank, engine in self.engines.items():
            if rank not in have_outcome:
                yield f"rank {rank} (slot {engine.slot}) has no outcome: it was lost on the way"

    def _headline(self) -> str:
        if not self.errors:
            return self.break_reason or "the group was broken"
        return headline(self.errors)

    def _notes(self) -> list[str]:
        released = [r for r, o in self.outputs.items() if o.state == "released"]
        notes = [
            f"rank {r} had not begun the cell when its group broke"
            if r in self._unbegun
            else f"rank {r} was released from {self.waiting.get(r, 'a collective')}"
            for r in released
        ]
        if self.died_at is not None:
            notes += [f"rank {r} still runs the cell" for r in self.running]
        return notes
