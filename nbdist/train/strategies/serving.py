"""What the server does from one stand of all ranks to the next: deals steps, applies updates.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.attending import TAG, Attendants, Message
from nbdist.train.strategies.parcels import Answered, Asked, Kind

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from torch import Tensor

    from nbdist.train.strategies.base import Keeper
    from nbdist.train.strategies.dealing import Dealer, Dealt
    from nbdist.train.strategies.parcels import Parcels
    from nbdist.train.strategies.roles import Roles


class Rules(NamedTuple):
    """The strategy's settings, as far as the server asks for them."""

    is_sync: bool
    staleness: int | None
    scales: bool


class Serving:
    """One such time.

    Args:
        rules: the strategy's.
        roles: in the present group.
        parcels: what is sent.
        dealer: who trains what.
        keeper: the server's state.
        ages: how many updates were applied so many others after their parameters; is added to.
    """

    def __init__(
        self,
        rules: Rules,
        roles: Roles,
        parcels: Parcels,
        dealer: Dealer,
        keeper: Keeper,
        ages: Counter[int],
    ) -> None:
        self._rules, self._roles, self._parcels = rules, roles, parcels
        self._dealer, self._keeper, self._ages = dealer, keeper, ages
        self._waiting: set[int] = set()
        """Workers that have nothing to train."""
        self._pushed: dict[int, Message] = {}
        """What is not applied yet, in the order in which it came."""
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
        expected = self._dealer.has(self._key(message.worker))
        if message.parcel is not None and expected == message.asked.number:
            self._pushed[message.worker] = message
        else:  # it asks, or what it sends was applied before its group broke
            self._waiting.add(message.worker)

    def _key(self, worker: int) -> int:
        """Whose ticket it is: in a synchronous step all have one together."""
        return self._roles.workers[0] if self._rules.is_sync else worker

    # ---- updates

    def _apply_all(self) -> None:
        """Apply what may be applied."""
        if self._rules.is_sync:
            if len(self._pushed) == len(self._roles.workers):
                pushes = [self._opened(self._pushed.pop(w)) for w in self._roles.workers]
                counts = [asked for asked, _ in pushes if asked.weight]
                asked = pushes[0][0]._replace(
                    loss_sum=sum(its.loss_sum for its in counts),
                    weight=sum(its.weight for its in counts),
                    is_applied=float(all(its.is_applied for its in counts)),
                )
                self._apply(asked, self._parcels.mean(pushes), self._roles.workers)
            return
        while (worker := next(filter(self._dealer.may_apply, self._pushed), None)) is not None:
            asked, values = self._opened(self._pushed.pop(worker))
            self._apply(asked, values, [worker])

    def _opened(self, message: Message) -> tuple[Asked, list[Tensor | None]]:
        assert message.parcel is not None
        return self._parcels.unpack(message.numbers, message.parcel)

    def _apply(self, asked: Asked, values: Sequence[Tensor | None], workers: Sequence[int]) -> None:
        """Apply an update here and at the replica; only then is it told to anybody."""
        age = self._dealer.apply(self._key(workers[0]))
        factor = 1 / (1 + age) if self._rules.scales else 1.0
        asked = asked._replace(kind=Kind.PUSH, version=age, rate_factor=factor)
        works, num_bytes = self._forward(asked, values)
        row = self._keeper.apply(self._parcels.update(asked, values))
        self._ages[age] += 1
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
        wants_hold = self._wants_hold or self._keeper.wants_hold
        limit = 0 if wants_hold else self._keeper.limit(dealer.low)
        have_all_come = len(self._waiting) == len(workers)
        if self._rules.is_sync:
            dealt = dealer.deal(workers[0], limit) if have_all_come else None
            for at, worker in enumerate(workers if dealt is not None else ()):
                self._train(worker, dealt, at, len(workers))
        else:
            for worker in sorted(self._waiting):
                if (dealt := dealer.deal(worker, limit)) is None:
                    break
                self._train(worker, dealt, 0, 1)
        if len(self._waiting) < len(workers) or not dealer.is_even:
            return False
        self._stand(is_called=wants_hold)
        return True

    def _train(self, worker: int, dealt: Dealt | None, at: int, num_parts: int) -> None:
        assert dealt is not None
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
