"""The seats of a cluster and the engines on them: filling, replaying, leaving. Pure.

Knows nothing of groups; `state` decides when its newcomers are admitted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbdist.protocol.ids import Slot
from nbdist.supervisor import instructions as do
from nbdist.supervisor import policy
from nbdist.supervisor.seats import BY_USER, THE_SEAT, Seat, SeatState

if TYPE_CHECKING:
    from nbdist.config import ClusterConfig
    from nbdist.protocol import events as ev
    from nbdist.protocol import orders as od
    from nbdist.protocol.ids import CellId


REPLAY_LIMIT_S = 120.0
"""A newcomer that replays for longer is ended."""


class Roster:
    """Seats 0 … size-1, and those beyond that are being given back.

    Args:
        config: settings.
        out: where instructions go.
    """

    def __init__(self, config: ClusterConfig, out: list[do.Instruction]) -> None:
        self._config = config
        self._out = out
        self.size = config.num_engines
        self.seats: dict[Slot, Seat] = {Slot(i): Seat(Slot(i)) for i in range(self.size)}
        self.journal_length = 0
        self.unreplayable: dict[str, str] = {}
        """Cells that ended engines in their replay, in words, and how: no newcomer has them."""
        self._suspects: dict[Slot, CellId] = {}
        """The cell in whose replay the last engine on a slot ended."""
        self._ended: deque[int] = deque(maxlen=256)
        """Engines whose end was reported."""

    def in_state(self, *states: SeatState) -> list[Seat]:
        """Seats in one of these states, in slot order."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.state in states]

    def seat(self, slot: Slot, pid: int) -> Seat | None:
        """The seat, if this very engine sits on it."""
        seat = self.seats.get(slot)
        return seat if seat is not None and seat.pid == pid else None

    @property
    def is_catching_up(self) -> bool:
        """A newcomer replays what was run while it came up; cells wait for it."""
        return any(seat.is_late for seat in self.in_state(SeatState.REPLAYING))

    # ---- seats come and go

    def fill(self, now: float) -> None:
        """Start an engine for every empty seat."""
        for seat in self.in_state(SeatState.EMPTY):
            self._start(seat, now)

    def resize(self, size: int, now: float) -> None:
        """Add seats, or have those beyond `size` given back; given-up seats get another try."""
        self.size = size
        for slot in map(Slot, range(size)):
            seat = self.seats.setdefault(slot, Seat(slot, is_added=True))
            if seat.state in (SeatState.EMPTY, SeatState.GIVEN_UP):
                seat.restarts, seat.not_restored = 0, {}
                self._start(seat, now)
            elif seat.state is SeatState.LEAVING and not seat.is_told_to_end:
                seat.state = SeatState.MEMBER
        for seat in [seat for slot, seat in self.seats.items() if slot >= size]:
            if seat.state not in (SeatState.MEMBER, SeatState.LEAVING):
                self._give_back(seat)

    @property
    def surplus(self) -> list[Seat]:
        """Members beyond the size that nobody has asked to leave yet."""
        return [seat for seat in self.in_state(SeatState.MEMBER) if seat.slot >= self.size]

    def drop_leavers(self) -> None:
        """End engines that leave before there was a group that could let them go."""
        for seat in [*self.in_state(SeatState.LEAVING), *self.surplus]:
            self._give_back(seat)

    def _give_back(self, seat: Seat) -> None:
        if seat.pid is not None:
            self._out.append(do.KillEngine(seat.slot, seat.pid, "scaled down"))
        del self.seats[seat.slot]

    def _start(self, seat: Seat, now: float) -> None:
        seat.state, seat.started_at = SeatState.STARTING, now
        self._out.append(do.StartEngine(seat.slot))

    # ---- engines come and go

    def forked(self, event: ev.EngineForked) -> None:
        """The zygote made a process."""
        seat = self.seats.get(event.slot)
        if seat is not None and seat.takes(event.pid):
            seat.pid = event.pid
        else:
            self._out.append(do.KillEngine(event.slot, event.pid, "its seat is taken or gone"))

    def hello(self, event: ev.EngineHello, now: float) -> Seat | None:
        """An engine is up; its seat, or None for a stranger, which is ended."""
        if event.pid in self._ended:
            return None  # its exit was reported on a faster road
        seat = self.seats.get(event.slot)
        if seat is None or not seat.takes(event.pid):
            self._out.append(do.KillEngine(event.slot, event.pid, "it sits on no seat of ours"))
            return None
        seat.pid, seat.engine_id = event.pid, event.engine_id
        seat.host, seat.device = event.host, event.device
        if seat.state is SeatState.STARTING:
            seat.replayed = event.replayed
            self.replay(seat, now)
        return seat

    def replay(self, seat: Seat, now: float) -> None:
        """Have a newcomer run the journal from where it stands."""
        seat.is_late = seat.state is SeatState.READY
        seat.state, seat.started_at = SeatState.REPLAYING, now
        # The rank that it has once every seat that is being filled is filled: its old one.
        empty = (SeatState.EMPTY, SeatState.GIVEN_UP, SeatState.LEAVING)
        seats = [s for s in self.seats.values() if s.state not in empty and s.slot < self.size]
        seated = sorted(s.slot for s in seats)
        since, until = seat.replayed, self.journal_length
        rank = seated.index(seat.slot)
        self._out.append(do.Replay(seat.slot, since, until, rank, len(seated)))
        seat.replayed = until

    def replay_begins(self, event: ev.ReplayBegins) -> None:
        """A newcomer comes to a cell of the journal."""
        if (seat := self.seat(event.slot, event.pid)) is not None:
            seat.replays = event

    def replayed(self, event: ev.JournalReplayed) -> None:
        """A newcomer ran the journal and can be admitted."""
        seat = self.seat(event.slot, event.pid)
        if seat is not None and seat.state is SeatState.REPLAYING:
            seat.state = SeatState.READY
            seat.not_restored |= dict.fromkeys(event.failed, "its cell failed in the replay")
            seat.not_restored |= self.unreplayable
            self._suspects.pop(seat.slot, None)

    def has_ended(self, pid: int) -> None:
        """An engine's end was reported: what it still says on a slower road counts no more."""
        self._ended.append(pid)

    def vacate(self, seat: Seat, how: str, now: float, *, was_started: bool) -> str:
        """A seat's engine is gone: fill it again, leave it empty or give it up, as the policy says.

        Args:
            seat: whose.
            how: how it ended, in words.
            now: the time.
            was_started: whether a group has been formed at least once.

        Returns:
            The decision's reason.
        """
        was_leaving = seat.state is SeatState.LEAVING
        seat.last_end = how
        self._suspect(seat, how)
        seat.clear()
        if seat.slot >= self.size:
            del self.seats[seat.slot]
            return "the seat was given back"
        if was_leaving:
            self._start(seat, now)
            return "the seat is wanted again"
        seat.state = SeatState.EMPTY
        seat.restarts += 1
        decision = policy.decide_seat(
            self._config, restarts=seat.restarts, was_started=was_started, last=how
        )
        if decision.action == "give up":
            seat.state, seat.not_restored = SeatState.GIVEN_UP, {THE_SEAT: decision.reason}
        elif decision.action == "start":
            self._start(seat, now)
        return decision.reason

    def _suspect(self, seat: Seat, how: str) -> None:
        """Forget a cell in whose replay two engines in a row have ended.

        One that ends alone may have been killed by anybody.
        """
        begun = seat.replays if seat.state is SeatState.REPLAYING else None
        if begun is None or seat.killed_why == BY_USER:
            return
        if self._suspects.get(seat.slot) != begun.cell:
            self._suspects[seat.slot] = begun.cell
            return
        self._out.append(do.ForgetCell(begun.cell))
        reason = f"ended the engines that replayed it ({how}): it is replayed no more"
        self.unreplayable[f"cell {begun.first_line!r}"] = reason
        seat.restarts = 0

    def kill(self, seat: Seat, why: str) -> None:
        """SIGKILL to a seat's engine, once; its exit will be reported."""
        if seat.pid is not None and not seat.killed_why:
            seat.killed_why = why
            self._out.append(do.KillEngine(seat.slot, seat.pid, why))

    def tick(self, now: float) -> list[Seat]:
        """End engines that do not come up in time; returns seats that never got a process."""
        limit_s = self._config.start_timeout_s
        late = [s for s in self.in_state(SeatState.STARTING) if now - s.started_at > limit_s]
        for seat in late:
            seat.started_at = now
            self.kill(seat, f"was not ready within {limit_s:g} s")
        for seat in self.in_state(SeatState.REPLAYING):
            if now - seat.started_at > REPLAY_LIMIT_S:
                self.kill(seat, f"did not end its replay within {REPLAY_LIMIT_S:g} s")
        return [seat for seat in late if seat.pid is None]

    # ---- taking up what another supervisor left

    def take_up(self, view: od.WorldView, now: float) -> None:
        """The seats as the ledger ends. Newcomers say with their hello how far they had come."""
        self.size, self.seats = view.size, {}
        for seen in view.seats:
            seat = Seat(
                seen.slot, SeatState(seen.state), seen.pid, seen.engine_id, seen.host, seen.device
            )
            seat.not_restored, seat.is_holder = dict(seen.not_restored), seen.is_holder
            self.seats[seen.slot] = seat
            is_leaving = seat.state is SeatState.LEAVING
            seat.is_told_to_end = is_leaving and seen.slot not in view.membership
            if seat.state in (SeatState.STARTING, SeatState.REPLAYING, SeatState.READY):
                seat.state, seat.started_at = SeatState.STARTING, now
                if seat.pid is None:
                    self._start(seat, now)

    def adopt(self, children: dict[int, Slot]) -> None:
        """A zygote says who lives, also engines whose start nobody had written down."""
        for pid, slot in children.items():
            seat = self.seats.get(slot)
            if seat is not None and seat.pid is None and seat.state is SeatState.STARTING:
                seat.pid = pid
