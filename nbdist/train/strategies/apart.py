"""The working half of strategies whose ranks train apart, and make outer steps together.

A step's vote is summed as ever, and whoever has it applies its own gradient to its own parameters.
Outer steps are made between steps, where all ranks settle; what of them is under way when a group
breaks is sent again in the next one. Runs in the engine's main thread.
"""

from __future__ import annotations

import logging
import secrets
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
from nbdist.train.strategies import meeting
from nbdist.train.strategies.base import Place, Summed
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first
from nbdist.train.strategies.flight import Flight
from nbdist.train.strategies.meeting import Lack
from nbdist.train.strategies.outer import named
from nbdist.train.strategies.whole import OfWhole
from nbdist.train.vote import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Keeper
    from nbdist.train.strategies.flight import Wire
    from nbdist.train.strategies.meeting import Stand
    from nbdist.train.strategies.outer import Calendar, Fragment, Kept

log = logging.getLogger(__name__)

_NO_GROUP = 0, 1, -1


class Apart(OfWhole):
    """Trains this rank's replica on its own share, and makes outer steps with the others."""

    has_optimizer = True

    def __init__(
        self,
        module: nn.Module,
        calendar: Calendar,
        fragments: Sequence[Fragment],
        *,
        mixing: float = 0.0,
        wire: Wire = None,
    ) -> None:
        super().__init__(module)
        self.place = Place(0, 1)
        self.num_lost = 0
        self._calendar, self._fragments = calendar, fragments
        self._mixing, self._wire = mixing, wire
        self._id = secrets.randbits(62)
        """Of this rank, through all groups."""
        self._num_ended = 0
        """Outer steps that have ended; equal on all ranks that have settled."""
        self._flight: Flight | None = None
        self._pending = 0.0
        """What this rank's gradient counts in a step that is not committed yet."""
        self._since: dict[int, int] = {}
        """Each rank of the last group that has settled -> the step with which it began. Empty:
        nothing is shared yet."""
        self._group = _NO_GROUP
        """Own rank, size and generation of the present group."""
        self._is_new = True
        """The ranks have not settled in it yet."""

    # ---- the group

    def twins(self, rank: int, world_size: int) -> Place:  # noqa: ARG002 - in any group
        """No other has come to what this rank has."""
        return Place(0, 1)

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins; what was on its way in an earlier group is lost."""
        self.place, self._pending = Place(rank, world_size), 0.0
        group = rank, world_size, generation
        if group != self._group:
            self._group, self._is_new = group, True
            self._let_go()

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """See that all ranks stand at the same step; begin and end the outer steps that are due."""
        has_changed = self._is_new and self._meet(keeper)
        self._is_new = False
        calendar, number = self._calendar, self._num_ended
        if keeper.step < calendar.begins(number):
            return has_changed
        fragment = self._fragments[calendar.fragment(number)]
        if self._flight is None:
            self._flight = Flight(fragment.said(), fragment.count, fragment.unsent)
            fragment.count = 0.0
        if not self._flight.is_sent:
            ident = calendar.fragment(number)
            self._flight.send(self.sum_, self._wire, ident, self.place)
        if keeper.step < calendar.ends(number):
            return has_changed
        means = self._flight.received()
        if all(bool(mean.isfinite().all()) for mean in means):
            emit.scalar(Kind.DRIFT, self._flight.drift(means, fragment.anchors))
            fragment.go(means)
            fragment.take(self._mixing)
            fragment.unsent = self._flight.unsent()
        else:  # the same bits, and the same decision, on all ranks
            fragment.take()
            self.num_lost += self.place.num_places * calendar.period
            log.warning("an outer step was not finite: all are back at the one before")
        self._flight, self._num_ended = None, number + 1
        return True

    # ---- outer steps

    def agreed(self) -> list[tuple[str, Tensor]]:
        """What all ranks have alike since the last outer step, by its name; at first nothing."""
        anchors = {
            id(parameter): anchor
            for fragment in self._fragments
            for parameter, anchor in zip(fragment.parameters, fragment.anchors, strict=False)
        }
        named = self._module.named_parameters()
        return [(name, anchors[id(own)]) for name, own in named if id(own) in anchors]

    def _let_go(self) -> None:
        """Nothing is on its way any more."""
        if self._flight is not None:
            self._flight.let_go()

    # ---- a new group

    def _meet(self, keeper: Keeper) -> bool:
        """In a new group: all come to stand at the same step, and after the same outer step."""
        stand = meeting.Stand(self._id, keeper.step, self._num_ended, bool(self._since))
        stands = meeting.gather(stand, self.place)
        giver = meeting.giver(stands)
        if giver is None or stands[giver].step == 0:
            return self._start(stands, keeper.step)
        step, num_lost = stands[giver].step, self.num_lost + self._num_gone(stands, giver)
        lacks = [meeting.lack(stand, stands[giver]) for stand in stands]
        receivers = [at for at, lack in enumerate(lacks) if lack]
        if receivers:
            self._give(lacks[self.place.at], keeper, giver, receivers)
        # A group that breaks in here leaves some that have counted a loss, and some that have not.
        num_lost = max(meeting.gather_numbers(num_lost, self.place))
        if num_lost > self.num_lost and self.place.at == giver:
            log.warning("%d steps of single ranks are lost with them by now", num_lost)
        self.num_lost = num_lost
        self._since = {
            its.ident: step if Lack.ALL in lack else self._since.get(its.ident, step)
            for its, lack in zip(stands, lacks, strict=True)
        }
        return bool(receivers)

    def _start(self, stands: Sequence[Stand], step: int) -> bool:
        """Nobody has trained yet: rank 0's weights are all's."""
        if len(stands) > 1:
            for tensor in [*self._module.parameters(), *self._module.buffers()]:
                take_from_first(tensor)
        self._begin_at(step)
        self._since = {stand.ident: step for stand in stands}
        return True

    def _begin_at(self, step: int) -> None:
        """The parameters are the same on all ranks, with so many steps."""
        for fragment in self._fragments:
            fragment.start()
        self._flight, self._num_ended = None, self._calendar.num_ended(step)

    def _num_gone(self, stands: Sequence[Stand], giver: int) -> int:
        """Steps since the last outer step of ranks that are gone; 0 where this one joins."""
        if not self._since:
            return 0
        top = stands[giver]
        oldest = self._calendar.oldest(top.num_ended)
        lacks = {stand.ident: meeting.lack(stand, top) for stand in stands}
        num_lost = sum(Lack.STEP in lack for lack in lacks.values())
        for ident, since in self._since.items():
            if Lack.ALL in lacks.get(ident, Lack.ALL):
                num_lost += top.step - max(oldest, since)
        return num_lost

    def _give(self, lack: Lack, keeper: Keeper, giver: int, receivers: Sequence[int]) -> None:
        """Those that lack something are given it by one that has all."""
        rank = self.place.at
        mine = (keeper.copy(), meeting.packed(self._shared())) if rank == giver else (b"", b"")
        state, shared = (meeting.pass_on(data, giver, receivers, rank) for data in mine)
        if rank not in receivers:
            return
        number = self._num_ended
        if Lack.ALL in lack:
            keeper.take_back(state)
        elif Lack.STEP in lack:
            keeper.follow(state)
        self._load(meeting.unpacked(shared))
        if Lack.ALL in lack:
            self._flight = None
            for fragment in self._fragments:
                fragment.take()
                fragment.count, fragment.unsent = 0.0, []
        elif Lack.END in lack:
            fragment, flight = self._fragments[self._calendar.fragment(number)], self._flight
            fragment.take(self._mixing)
            fragment.unsent = [] if flight is None else flight.unsent()
            self._flight = None

    def _shared(self) -> dict[str, Any]:
        """What all ranks have alike."""
        return {
            "num_ended": self._num_ended,
            "since": self._since,
            "fragments": [fragment.shared() for fragment in self._fragments],
        }

    def _load(self, shared: dict[str, Any]) -> None:
        self._num_ended, self._since = shared["num_ended"], shared["since"]
        for fragment, its in zip(self._fragments, shared["fragments"], strict=True):
            fragment.load(its)

    # ---- a step

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add to this rank's own gradients, which stay its own; so does what is not finite."""
        loss.backward(torch.full_like(loss, weight))
        ready_ns = perf_counter_ns()
        if not is_last:
            return Summed(ready_ns, None)
        is_finite = bool(self.norm(self._gradients()).isfinite())
        result = None if vote is None else self._sum_vote(list(vote), meanwhile)
        return Summed(ready_ns, result, is_finite)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._module.parameters() if p.grad is not None]

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote over all ranks; the gradients become means over this rank's share."""
        return self._sum_vote(vote, None)

    def _sum_vote(self, vote: list[float], meanwhile: Callable[[], None] | None) -> list[float]:
        tensor = torch.tensor(vote, dtype=torch.float64)
        if meanwhile is not None and self.place.num_places > 1:
            meanwhile()
        self.sum_(tensor)
        result = tensor.tolist()
        self._pending = vote[COUNT]
        if vote[COUNT] > 0 and vote[COUNT] != result[COUNT]:
            torch._foreach_mul_(self._gradients(), result[COUNT] / vote[COUNT])
        return result

    def commit(self, *, is_applied: bool, factor: float) -> None:  # noqa: ARG002 - nothing was left out
        """What was trained on counts in the next outer step."""
        for fragment in self._fragments if is_applied else ():
            fragment.count += self._pending
        self._pending = 0.0

    def forget(self) -> None:
        """The parameters are others now; what to make of that is decided where ranks meet."""

    def restart(self) -> None:
        """What was loaded is told by `resume`."""
        self._since, self._is_new, self._flight = {}, True, None

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self.place.num_places > 1:
            sum_on_backend(tensor)

    def sum_places_(self, tensor: Tensor) -> None:
        """Buffers are averaged with each step, also where parameters are not."""
        self.sum_(tensor)

    def end(self) -> None:
        """A run is over; an outer step that was under way is sent anew with the next."""
        self._is_new = True
        self._let_go()

    # ---- checkpoints

    @property
    def kind(self) -> list[int]:
        """Where this is equal, a rank can go on from what another one has kept."""
        return [*self._calendar, int(self._fragments[0].rule is None)]

    def shared_tensors(self) -> dict[str, Tensor]:
        """What all ranks have alike, by kind and the parameters' names."""
        return named(self._module, self._fragments)

    def own_state(self) -> dict[str, Any]:
        """What this rank has beside its parameters, and of numbers what all have."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        next_one = self._fragments[self._calendar.fragment(self._num_ended)]
        flying = 0.0 if self._flight is None else self._flight.count
        return {
            "kind": self.kind,
            "num_ended": self._num_ended,
            "num_lost": self.num_lost,
            "flight": None if self._flight is None else self._flight.own(),
            "counts": {names[id(p)]: its.count for its in self._fragments for p in its.parameters},
            "unsent": [its.unsent for its in self._fragments],
            "weights": {
                names[id(p)]: its.count + (flying if its is next_one else 0.0)
                for its in self._fragments
                for p in its.parameters
            },
        }

    @torch.no_grad()
    def resume(self, step: int, kept: Kept | None) -> None:
        """All ranks have loaded a checkpoint, of so many steps; None: of another strategy."""
        self._begin_at(step)
        self._since = {self._id: step}
        if kept is None:
            return
        for key, tensor in self.shared_tensors().items():
            if key in kept.tensors:
                tensor.copy_(kept.tensors[key])
        self.num_lost = kept.num_lost
        if kept.own is None:
            return
        self._num_ended, flight = kept.own["num_ended"], kept.own["flight"]
        self._flight = None if flight is None else Flight(**flight)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for fragment, unsent in zip(self._fragments, kept.own["unsent"], strict=True):
            fragment.unsent = unsent
            fragment.count = kept.own["counts"][names[id(fragment.parameters[0])]]
