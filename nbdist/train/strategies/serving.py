"""What the server does from one stand of all ranks to the next: deals steps, applies updates.

Runs in the engine's main thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.telemetry import Kind as Told
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.attending import TAG, Attendants, Message
from nbdist.train.strategies.parcels import Answered, Asked, Kind, Push

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper
    from nbdist.train.strategies.dealing import Dealer, Dealt
    from nbdist.train.strategies.parcels import Parcels
    from nbdist.train.strategies.roles import Roles

log = logging.getLogger(__name__)

_TOGETHER = -1
"""Whose a synchronous step's ticket is: all workers have it together."""


class Rules(NamedTuple):
    """The strategy's settings, as far as the server asks for them."""

    is_sync: bool
    staleness: int | None
    scales: bool
    quorum: int | None = None


class Trained(NamedTuple):
    """What a worker has of a synchronous step."""

    ticket: int
    version: int


class Serving:
    """One such time.

    Args:
        rules: the strategy's.
        roles: in the present group.
        parcels: what is sent.
        dealer: who trains what.
        keeper: the server's state.
        ages: how many updates were applied so many others after their parameters; is added to.
        late: what has become of parts that a step was applied without; likewise.
    """

    def __init__(
        self,
        rules: Rules,
        roles: Roles,
        parcels: Parcels,
        dealer: Dealer,
        keeper: Keeper,
        ages: Counter[int],
        late: Counter[str],
    ) -> None:
        self._rules, self._roles, self._parcels = rules, roles, parcels
        self._dealer, self._keeper, self._ages, self._late = dealer, keeper, ages, late
        self._waiting: set[int] = set()
        """Workers that have nothing to train."""
        self._pushed: dict[int, Message] = {}
        """What is not applied yet, in the order in which it came."""
        self._out: dict[int, Trained] = {}
        """In synchronous mode: what is not applied yet, or dropped."""
        self._wants_hold = False
        self._attendants = Attendants(roles.workers, parcels)

    def run(self) -> None:
        """Until all stand."""
        try:
            while True:
                self._apply_all()
                if self._answer_all():
                    return
                self._take(self._attendants.next())
        finally:
            self._attendants.close()

    def _take(self, message: Message) -> None:
        self._wants_hold = self._wants_hold or bool(message.asked.wants_hold)
        expected = self._ticket_of(message.worker)
        if message.parcel is not None and expected == message.asked.number:
            self._pushed[message.worker] = message
        else:  # it asks, or what it sends was applied before its group broke
            self._waiting.add(message.worker)

    def _ticket_of(self, worker: int) -> int | None:
        """What a worker trains."""
        if not self._rules.is_sync:
            return self._dealer.has(worker)
        return self._out[worker].ticket if worker in self._out else None

    # ---- updates

    def _apply_all(self) -> None:
        """Apply what may be applied."""
        if self._rules.is_sync:
            ticket = self._dealer.has(_TOGETHER)
            if ticket is not None and self._are_enough(ticket):
                self._apply_parts(ticket)
            return
        while (worker := next(filter(self._dealer.may_apply, self._pushed), None)) is not None:
            asked, values, _ = self._opened(self._pushed.pop(worker))
            self._apply(asked, values, worker, [worker])

    def _opened(self, message: Message, factor: float = 1.0) -> Push:
        assert message.parcel is not None
        return Push(*self._parcels.unpack(message.numbers, message.parcel), factor)

    # ---- synchronous steps

    def _are_enough(self, ticket: int) -> bool:
        """Whether a step may be applied with the parts that are there.

        Before all are to stand none is left out, be it of this step or of an earlier one.
        """
        parts = [worker for worker, its in self._out.items() if its.ticket == ticket]
        num_there = sum(worker in self._pushed for worker in parts)
        quorum, after = self._rules.quorum, ticket + 1
        if quorum is None or self._is_held or self._keeper.limit(after) <= after:
            return len(self._pushed) == len(self._out)
        return num_there >= min(quorum, len(parts))

    def _apply_parts(self, ticket: int) -> None:
        """Apply a step with its parts that are there, and late ones of earlier steps."""
        workers = [worker for worker in self._roles.workers if worker in self._pushed]
        late = [worker for worker in workers if self._out[worker].ticket != ticket]
        pushes = {
            worker: self._opened(self._pushed[worker], self._factor(self._out[worker].version))
            for worker in workers
        }
        counts = [push.asked for push in pushes.values() if push.asked.weight]
        asked = Asked(
            number=ticket,
            loss_sum=sum(its.loss_sum for its in counts),
            weight=sum(its.weight for its in counts),
            is_applied=float(all(its.is_applied for its in counts)),
        )
        values = self._parcels.mean([*pushes.values()])
        if self._rules.quorum is not None:
            its_own = [push for worker, push in pushes.items() if worker not in late]
            values = self._parcels.with_buffers(values, its_own)
        ages = [self._dealer.version - self._out[worker].version for worker in workers]
        for worker in workers:
            del self._pushed[worker], self._out[worker]
        self._late["applied"] += len(late)
        self._late["owed"] = len(self._out)
        self._apply(asked, values, _TOGETHER, workers, ages)

    def _factor(self, version: int) -> float:
        """What gradients count that were computed with parameters of this version."""
        return 1 / (1 + self._dealer.version - version) if self._rules.scales else 1.0

    def _drop_late(self) -> None:
        """No step comes with which late parts could be applied."""
        for worker in [*self._pushed]:
            del self._pushed[worker], self._out[worker]
            self._waiting.add(worker)
            self._late["dropped"] += 1
            log.warning(
                "a late part of worker %d is dropped: no step comes before all stand", worker
            )
        self._late["owed"] = len(self._out)

    # ---- any update

    def _apply(
        self,
        asked: Asked,
        values: Sequence[Tensor | None],
        key: int,
        workers: Sequence[int],
        ages: Sequence[int] = (),
    ) -> None:
        """Apply an update here and at the replica; only then is it told to anybody.

        Args:
            asked: what it says.
            values: gradients and buffers.
            key: whose ticket it is.
            workers: those that wait for it.
            ages: of its parts, where it has any: what each had not seen.
        """
        age = self._dealer.apply(key)
        factor = 1 / (1 + age) if self._rules.scales else 1.0
        asked = asked._replace(
            kind=Kind.PUSH,
            version=age,
            rate_factor=factor,
            num_late=self._late["applied"],
            num_dropped=self._late["dropped"],
            num_owed=self._late["owed"],
        )
        works, num_bytes = self._forward(asked, values)
        row = self._keeper.apply(self._parcels.update(asked, values))
        self._ages[age] += 1
        for its in ages or [age]:
            emit.scalar(Told.STALENESS, its)
        try:
            if works:
                with emit.exchange(Op.SEND, Axis.COPIES, 2, num_bytes):
                    WORKS.wait(works)
        finally:
            self._keeper.report(row)  # not before the replica has it too, or is gone
        self._waiting.update(workers)

    def _forward(self, asked: Asked, values: Sequence[Tensor | None]) -> tuple[list[Any], int]:
        """To the replica; what ends when it has it applied, and how many bytes it is sent."""
        replica = self._roles.replica
        if replica is None:
            return [], 0
        parts = self._parcels.pack(asked, values)
        works = [dist.isend(part, replica, tag=TAG) for part in parts]
        works.append(dist.irecv(torch.empty(1), replica, tag=TAG))
        return works, sum(part.nbytes for part in parts)

    # ---- answers

    def _answer_all(self) -> bool:
        """Give workers that wait something to train; True: there is nothing, and all stand."""
        dealer, workers = self._dealer, self._roles.workers
        wants_hold = self._is_held
        # A late part takes one more step: in that all have a part, and none is left out.
        limit = 0 if wants_hold and not self._out else self._keeper.limit(dealer.low)
        if self._rules.is_sync:
            self._deal_parts(limit)
        else:
            for worker in sorted(self._waiting):
                if (dealt := dealer.deal(worker, limit)) is None:
                    break
                self._train(worker, dealt, 0, 1)
        if len(self._waiting) < len(workers) or not dealer.is_even:
            return False
        self._stand(is_called=wants_hold)
        return True

    @property
    def _is_held(self) -> bool:
        """All are to stand as soon as they can."""
        return self._wants_hold or self._keeper.wants_hold

    def _deal_parts(self, limit: int) -> None:
        """A synchronous step's, to those who owe none of an earlier one."""
        dealer, workers = self._dealer, self._roles.workers
        if dealer.has(_TOGETHER) is not None or len(self._waiting) + len(self._out) < len(workers):
            return
        dealt = dealer.deal(_TOGETHER, limit) if self._waiting else None
        if dealt is None:
            self._drop_late()
            return
        its = sorted(self._waiting)
        for at, worker in enumerate(its):
            self._out[worker] = Trained(*dealt)
            self._train(worker, dealt, at, len(its))

    def _train(self, worker: int, dealt: Dealt, at: int, num_parts: int) -> None:
        self._waiting.remove(worker)
        answered = Answered(Kind.TRAIN, *dealt, at, num_parts)
        self._attendants.answer(worker, answered, self._parcels.model())

    def _stand(self, *, is_called: bool) -> None:
        """All steps that were dealt are committed."""
        keeper, step = self._keeper, self._dealer.low
        answered = Answered(
            Kind.STAND, step, step, is_called=float(is_called), num_skipped=keeper.num_skipped
        )
        model = self._parcels.model()
        for worker in self._roles.workers:
            self._attendants.answer(worker, answered, model)
        asked = Asked(Kind.STAND, step, is_called=float(is_called))
        if self._roles.replica is not None:
            numbers = self._parcels.numbers(asked)
            WORKS.wait([dist.isend(numbers, self._roles.replica, tag=TAG)])
        self._attendants.finish()
        keeper.stand(step, is_called=is_called)
