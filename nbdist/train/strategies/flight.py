"""An outer step under way: what ranks that train apart have to say, and the mean of it.

Runs in the engine's main thread; a sum's end is stamped in whichever of torch's threads it comes.
"""

from __future__ import annotations

import contextlib
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Op
from nbdist.train.compression import quantise
from nbdist.train.compression.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from nbdist.train.strategies.base import Place

Wire = torch.dtype | Literal["int8"] | None
"""How numbers travel: rounded to a type, as 8 bits with error feedback, or as they are."""


class Flight:
    """An outer step that has begun.

    Args:
        said: what this rank had to say then.
        count: what that counts.
        unsent: of each tensor what earlier outer steps have left out; none: nothing.

    Attributes:
        count: likewise.
    """

    def __init__(self, said: Sequence[Tensor], count: float, unsent: Sequence[Tensor] = ()) -> None:
        self._said, self.count, self._unsent = list(said), count, list(unsent)
        self._sums: list[tuple[_Sum | _Coded, list[int]]] | None = None
        """What will be the sum of some, and which they are; None: nothing is on its way in this
        group."""
        self._left: list[Tensor] = []
        """What was left out in an earlier group."""

    @property
    def is_sent(self) -> bool:
        """It is on its way in this group."""
        return self._sums is not None

    def own(self) -> dict[str, Any]:
        """What it can be made of again."""
        return {"said": self._said, "count": self.count, "unsent": self._unsent}

    def let_go(self) -> None:
        """Nothing is on its way any more; what was said is kept, to be said again."""
        self._left, self._sums = self.unsent(), None

    def send(self, sum_: Callable[[Tensor], None], wire: Wire, ident: int, place: Place) -> None:
        """Say it, weighted by what it counts; ranks that have trained on nothing say nothing.

        Args:
            sum_: sums a tensor over all ranks.
            wire: how numbers travel.
            ident: of the sums, in telemetry.
            place: this rank's.
        """
        count = torch.tensor([self.count, 1.0], dtype=torch.float64)
        sum_(count)
        total, num_ranks = count.tolist()
        weight = self.count / total if total else 1 / num_ranks
        self._sums = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._said):
            places = [at for at, tensor in enumerate(self._said) if tensor.dtype == dtype]
            flat = torch.cat([self._said[at].flatten() for at in places])
            is_real, unsent = flat.is_floating_point(), torch.zeros_like(flat)
            if self._unsent:
                unsent = torch.cat([self._unsent[at].flatten() for at in places])
                flat += unsent
            flat *= weight
            if wire == "int8" and is_real and num_ranks > 1:
                self._sums.append((_Coded(flat, weight, unsent, ident, place), places))
                continue
            sent = flat.to(wire) if isinstance(wire, torch.dtype) and is_real else flat
            is_alone = num_ranks == 1
            self._sums.append((_Sum(sent) if is_alone else _summed(sent, ident), places))

    def received(self) -> list[Tensor]:
        """The means of what all have said, in the order of parameters."""
        return self._spread([summed.wait() for summed, _ in self._sums or ()])

    def drift(self, means: Sequence[Tensor], anchors: Sequence[Tensor]) -> float:
        """How far this rank was from the mean of all, as a share of the anchors' length."""
        apart = [said - mean for said, mean in zip(self._said, means, strict=True)]
        length = float(torch.nn.utils.get_total_norm(anchors))
        return float(torch.nn.utils.get_total_norm(apart)) / length if length else 0.0

    def unsent(self) -> list[Tensor]:
        """What this rank's codes have left out, once others have all; none: nothing."""
        if self._sums is None:
            return self._left
        sums = self._sums
        if not any(isinstance(summed, _Coded) for summed, _ in sums):
            return []
        return self._spread(
            [
                summed.unsent if isinstance(summed, _Coded) else torch.zeros_like(summed.tensor)
                for summed, _ in sums
            ]
        )

    def _spread(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each that was said."""
        tensors = list(self._said)
        for flat, (_, places) in zip(flats, self._sums or (), strict=True):
            start = 0
            for at in places:
                said = self._said[at]
                tensors[at] = flat[start : start + said.numel()].view(said.shape).to(said.dtype)
                start += said.numel()
        return tensors


class _Coded:
    """What will be a sum over all ranks, in 8 bits: a second round when the first has ended.

    Args:
        flat: what this rank adds.
        weight: times which it was taken.
        unsent: what stays so where that is nothing.
        ident: in telemetry.
        place: this rank's.
    """

    def __init__(
        self, flat: Tensor, weight: float, unsent: Tensor, ident: int, place: Place
    ) -> None:
        self._began_ns = perf_counter_ns()
        emit.span(Kind.BUCKET_READY, self._began_ns, self._began_ns, ident=ident)
        self._ident, self._weight = ident, weight
        self._unsent = self._left = unsent
        self._rounds = Rounds(place.at, place.num_places)
        self._way = self._walk(flat.float())
        self._total: Tensor | None = None
        self._pending = next(self._way, None)
        emit.span(Kind.BUCKET_LAUNCH, perf_counter_ns(), perf_counter_ns(), ident=ident)

    def _walk(self, flat: Tensor) -> Generator[Any, None, None]:
        total = yield from quantise.summed(self._rounds, flat, flat.new_empty(0), self._note)
        self._total = total.flat

    def _note(self, left: Tensor) -> None:
        self._left = left

    def wait(self) -> Tensor:
        """Have it, or the error in its place."""
        while self._pending is not None:
            self._pending.wait()
            self._pending = next(self._way, None)
        assert self._total is not None
        done_ns = max(self._rounds.done_ns, self._began_ns)
        emit.span(
            Kind.BUCKET_DONE,
            self._began_ns,
            done_ns,
            ident=self._ident,
            value=self._rounds.payload_bytes,
        )
        return self._total

    @property
    def unsent(self) -> Tensor:
        """What is left of what this rank had to say."""
        return self._left / self._weight if self._weight else self._unsent


class _Sum(NamedTuple):
    """What will be a sum over all ranks."""

    tensor: Tensor
    stamp: Any = None
    """Of its end; None: no others are needed."""
    end: Any = None

    def wait(self) -> Tensor:
        """Have it, or the error in its place."""
        if self.stamp is not None:
            self.stamp.wait()
            self.end.wait()
        return self.tensor


def _summed(tensor: Tensor, ident: int) -> _Sum:
    """Begin to sum a tensor in place."""
    began_ns = perf_counter_ns()
    emit.span(Kind.BUCKET_READY, began_ns, began_ns, ident=ident)
    work = dist.all_reduce(tensor, async_op=True)
    launched_ns, num_ranks = perf_counter_ns(), dist.get_world_size()
    emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=ident)

    def stamp(future: torch.futures.Future[list[Tensor]]) -> None:
        with contextlib.suppress(Exception):  # whatever it is, who waits is told
            future.value()
            emit.bucket_done(Op.ALL_REDUCE, num_ranks, launched_ns, ident, tensor.nbytes)

    end = WORKS.follow(work)
    return _Sum(tensor, end.then(stamp), end)
