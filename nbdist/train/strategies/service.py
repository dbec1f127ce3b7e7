"""The working half of a parameter server: what each rank does, as server, replica or worker.

A worker trains what it is dealt, sends what it has come to, and is told when that is applied. What
it has sent, or not yet, when a group breaks, it sends in the next one; the server applies it unless
it has. Runs in the engine's main thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.errors import RecoveryFailed
from nbdist.protocol.telemetry import Kind as Told
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies import meeting
from nbdist.train.strategies.attending import TAG
from nbdist.train.strategies.base import Place, Summed
from nbdist.train.strategies.data_parallel import sum_on_backend
from nbdist.train.strategies.dealing import Dealer, Dealt
from nbdist.train.strategies.parcels import Answered, Asked, Kind, Parcels
from nbdist.train.strategies.serving import Serving
from nbdist.train.strategies.whole import OfWhole
from nbdist.train.vote import COUNT, FIRST_BUFFER, HOLD, LOSS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Keeper
    from nbdist.train.strategies.roles import Roles
    from nbdist.train.strategies.serving import Rules

log = logging.getLogger(__name__)

_NOTHING, _FRESH, _HELD = range(3)
"""What a rank has of the server's state: nothing, what it was made with or has loaded, all."""


class Service(OfWhole):
    """Deals steps and applies updates, keeps a copy of that, or trains."""

    num_lost = 0

    def __init__(self, module: nn.Module, roles_of: Callable[[int], Roles], rules: Rules) -> None:
        super().__init__(module)
        self.place = Place(0, 1)
        self.ages: Counter[int] = Counter()
        """How many updates were applied so many others after their parameters."""
        self.late: Counter[str] = Counter()
        """Parts of synchronous steps that were applied without them: "applied" with a later one,
        "dropped", or "owed" still."""
        self._roles_of, self._rules = roles_of, rules
        self._parcels = Parcels(module)
        self._own = Place(0, 1)
        """In the present group."""
        self._roles = roles_of(1)
        self._group = 0, 1, -1
        self._is_new = True
        """The ranks have not met in the present group yet."""
        self._dealer: Dealer | None = None
        """Where this rank holds the server's state."""
        self._is_fresh = True
        """It has what it was made with, or has loaded."""
        self._known = -1
        """The version of the parameters that a worker has."""
        self._dealt: Dealt | None = None
        """What a worker trains."""
        self._push: tuple[Tensor, Tensor] | None = None
        """What it has come to, until it is told that it was applied."""
        self._answer: tuple[Answered, Tensor] | None = None
        self._vote: list[float] | None = None
        """Of the step that went backward last."""
        self._buffers: list[Tensor | None] = []
        """With a quorum: those that it has changed, as this rank has them."""
        self._wants_hold = False

    @property
    def has_optimizer(self) -> bool:
        """Where it is alone, a rank trains and applies."""
        return self._own.num_places == 1

    def server_of(self, num_ranks: int) -> int:
        """The server's rank, among so many."""
        return self._roles_of(num_ranks).server

    # ---- the group

    def twins(self, rank: int, world_size: int) -> Place:  # noqa: ARG002 - in any group
        """What a worker has, the server has too, and it alone has the rest."""
        return Place(0, 1)

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins."""
        self._own, self._vote = Place(rank, world_size), None
        group = rank, world_size, generation
        if group != self._group:
            self._group, self._is_new = group, True

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """Be the server until all stand, or its replica; or be dealt the next step."""
        has_changed = self._is_new and self._meet(keeper)
        self._is_new = False
        rank, roles = self._own.at, self._roles
        if not roles.workers:
            self._deal_alone(keeper)
            return has_changed
        if rank in roles.workers:
            return self._work(keeper) or has_changed
        assert self._dealer is not None
        self.place = self._own
        keeper.go_to(self._dealer.low)
        if rank == roles.server:
            counts = self.ages, self.late
            Serving(self._rules, roles, self._parcels, self._dealer, keeper, *counts).run()
        else:
            self._follow(keeper, self._dealer)
        return True

    def _meet(self, keeper: Keeper) -> bool:
        """In a new group: the server and its replica have all that was applied."""
        rank, roles = self._own.at, self._roles_of(self._own.num_places)
        self._roles, dealer = roles, self._dealer
        kind = _HELD if dealer is not None else _FRESH if self._is_fresh else _NOTHING
        version = dealer.version if dealer is not None else keeper.step
        rows = meeting.gather_rows(
            [kind, version, self._known, *(self._dealt or (-1, -1))], self._own
        )
        holders = [at for at, row in enumerate(rows) if row[0] != _NOTHING]
        giver = max(
            holders,
            key=lambda at: (rows[at][1], rows[at][0], at == roles.server, -at),
            default=None,
        )
        if giver is None or rows[giver][1] < max(row[2] for row in rows):
            raise RecoveryFailed(_LOST)
        receivers = [
            at
            for at in sorted(roles.holders - {giver})
            if rows[at][0] != _HELD or rows[at][1] != rows[giver][1]
        ]
        if rank == giver and dealer is None:
            self._dealer = Dealer(keeper.step, staleness=self._rules.staleness)
        if receivers:
            self._give(keeper, giver, receivers)
        self._take_part(keeper, rows)
        return rank in receivers

    def _give(self, keeper: Keeper, giver: int, receivers: Sequence[int]) -> None:
        rank, state, dealt = self._own.at, b"", b""
        if rank == giver:
            assert self._dealer is not None
            counts = {"ages": dict(self.ages), "late": dict(self.late)}
            state = keeper.copy()
            dealt = meeting.packed({"dealer": self._dealer.packed()} | counts)
        state = meeting.pass_on(state, giver, receivers, rank)
        dealt = meeting.pass_on(dealt, giver, receivers, rank)
        if rank in receivers:
            keeper.take_back(state)
            loaded = meeting.unpacked(dealt)
            self._dealer = Dealer(staleness=self._rules.staleness)
            self._dealer.load(loaded["dealer"])
            self.ages, self.late = Counter(loaded["ages"]), Counter(loaded["late"])

    def _take_part(self, keeper: Keeper, rows: Sequence[Sequence[int]]) -> None:
        """In the role that this rank has now."""
        self._is_fresh = False
        if self._own.at not in self._roles.holders:
            keeper.drop_moments()
            self._dealer, self._answer = None, None
            if self._rules.is_sync:  # the batch is cut anew
                self._dealt = self._push = None
            return
        self._dealt = self._push = self._answer = None
        self._known = -1
        if num_owed := self.late.pop("owed", 0):
            self.late["dropped"] += num_owed
            log.warning("%d late parts are dropped: their group has ended", num_owed)
        assert self._dealer is not None
        self._dealer.begin()
        for worker in self._roles.workers if not self._rules.is_sync else ():
            ticket, version = rows[worker][3:]
            if ticket >= 0:
                self._dealer.keep(worker, Dealt(ticket, version))

    # ---- alone

    def _deal_alone(self, keeper: Keeper) -> None:
        dealer, is_called = self._dealer, keeper.wants_hold or self._wants_hold
        assert dealer is not None
        ticket = dealer.has(0)
        if ticket is None:
            dealt = dealer.deal(0, 0 if is_called else keeper.limit(dealer.low))
            ticket = None if dealt is None else dealt.ticket
        self.place = self._own
        if ticket is not None:
            keeper.go_to(ticket)
            return
        self._wants_hold = False
        keeper.stand(dealer.low, is_called=is_called)

    # ---- replica

    def _follow(self, keeper: Keeper, dealer: Dealer) -> None:
        """Apply what the server applies, until all stand."""
        server, parcels = self._roles.server, self._parcels
        while True:
            numbers = torch.empty(parcels.num_asked, dtype=torch.float64)
            WORKS.wait([dist.irecv(numbers, server, tag=TAG)])
            asked = Asked(*numbers[: len(Asked._fields)].tolist())
            if asked.kind == Kind.STAND:
                keeper.stand(int(asked.number), is_called=bool(asked.is_called))
                return
            parcel = parcels.empty()
            WORKS.wait([dist.irecv(parcel, server, tag=TAG)])
            asked, values = parcels.unpack(numbers, parcel)
            dealer.note(int(asked.number))
            row = keeper.apply(parcels.update(asked, values))
            self.ages[int(asked.version)] += 1
            for name, num in asked.late.items():
                self.late[name] = num
            keeper.report(row)  # the server may be gone by now
            WORKS.wait([dist.isend(torch.ones(1), server, tag=TAG)])

    # ---- worker

    def _work(self, keeper: Keeper) -> bool:
        """Have the next step to train; whether parameters have changed."""
        if self._dealt is not None and self._push is None:
            keeper.go_to(self._dealt.ticket)  # of an earlier group, or broken by something else
            return False
        if self._answer is None:
            wants_hold = float(keeper.wants_hold)
            ask = self._parcels.numbers(Asked(Kind.ASK, wants_hold=wants_hold))
            self._answer = self._call(self._push or (ask,))
        (answered, parcel), self._answer, self._push = self._answer, None, None
        self._parcels.load_model(parcel)
        self._known = int(answered.version)
        if answered.kind == Kind.STAND:
            self._dealt, self.place = None, self._own
            keeper.num_skipped = int(answered.num_skipped)
            keeper.stand(int(answered.number), is_called=bool(answered.is_called))
        else:
            self._dealt = Dealt(int(answered.number), self._known)
            self.place = Place(int(answered.at), int(answered.num_parts))
            keeper.go_to(self._dealt.ticket)
        return True

    def _call(self, parts: Sequence[Tensor]) -> tuple[Answered, Tensor]:
        """Send to the server, and have its answer."""
        server, began_ns = self._roles.server, perf_counter_ns()
        numbers = torch.empty(len(Answered._fields), dtype=torch.float64)
        parcel = self._parcels.empty()
        with emit.exchange(Op.SEND, Axis.DATA, 2, sum(part.nbytes for part in parts)):
            works = [dist.isend(part, server, tag=TAG) for part in parts]
            works += [dist.irecv(part, server, tag=TAG) for part in (numbers, parcel)]
            WORKS.wait(works)
        num_bytes = sum(part.nbytes for part in parts[1:]) + parcel.nbytes
        emit.span(Told.BUCKET_DONE, began_ns, perf_counter_ns(), value=num_bytes)
        return Answered(*numbers.tolist()), parcel

    # ---- a step

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,
        meanwhile: Callable[[], None] | None = None,  # noqa: ARG002 - as for all strategies
    ) -> Summed:
        """Add to this rank's own gradients."""
        loss.backward(torch.full_like(loss, weight))
        ready_ns = perf_counter_ns()
        has_vote = is_last and vote is not None
        return Summed(ready_ns, self.sum_vote(list(vote or ())) if has_vote else None)

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Nobody else has this step; that all are to stand, the server is told."""
        self._vote, self._wants_hold = vote, bool(vote[HOLD])
        if self._rules.quorum is not None and self._dealer is None:
            changed = self._parcels.buffers(vote[FIRST_BUFFER:])
            self._buffers = [None if its is None else its.clone() for its in changed]
        return [0.0 if place == HOLD else value for place, value in enumerate(vote)]

    def commit(self, *, is_applied: bool, factor: float) -> None:  # noqa: ARG002 - nothing was left out
        """Send what this rank has come to, and wait until it is applied."""
        vote, self._vote = self._vote, None
        if vote is None:  # another rank's state was loaded
            return
        if self._dealer is not None:
            self._dealer.apply(0)
            self.ages[0] += 1
            return
        assert self._dealt is not None
        asked = Asked(
            Kind.PUSH,
            self._dealt.ticket,
            self._dealt.version,
            vote[LOSS],
            vote[COUNT],
            float(is_applied),
            float(self._wants_hold),
        )
        changed = vote[FIRST_BUFFER:] if is_applied else [0.0] * len(vote[FIRST_BUFFER:])
        buffers = self._parcels.buffers(changed)
        if self._rules.quorum is not None and is_applied:
            buffers, self._buffers = self._buffers, []
        self._push = self._parcels.pack(asked, self._parcels.push(buffers))
        self._answer = self._call(self._push)
        self._push = self._dealt = None

    def forget(self) -> None:
        """Parameters come with each step."""

    def restart(self) -> None:
        """What was loaded is what the server begins with."""
        self._dealer = self._dealt = self._push = self._answer = None
        self._is_fresh = self._is_new = True
        self._known = -1
        self.ages.clear()
        self.late.clear()

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self._own.num_places > 1:
            sum_on_backend(tensor)

    def sum_places_(self, tensor: Tensor) -> None:
        """Buffers are put together at the server."""

    def end(self) -> None:
        """A run is over; the next one meets again."""
        self._is_new = True


_LOST = (
    "the parameter server is lost, and its replica with it, or it had none: nobody else has the "
    "optimizer's state. Load a checkpoint: cluster.load(path). With three ranks or more "
    "ParameterServer(replica=True) keeps a copy"
)
