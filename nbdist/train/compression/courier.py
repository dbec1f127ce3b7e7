"""Has a codec sum the buckets of a backward pass, each begun as soon as its gradients are there.

Further rounds are begun when the pass is over, bucket by bucket: gloo matches collectives by their
order, which must be the same on all ranks, and first rounds end in any. The reducer is told that
each bucket is done at once; the sums are written over its gradients later. Runs in the engine's
main thread.
"""

# No `from __future__ import annotations`: DistributedDataParallel reads the hook's annotations.

from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
from nbdist.train.compression.codec import Codec
from nbdist.train.compression.parcel import Parcel


@dataclass
class _Trip:
    """A parcel under way."""

    parcel: Parcel
    rounds: Generator[Any, None, None]
    wait: Any
    """For the collective that it has begun."""
    launched_ns: int


class Courier:
    """How far the sums of one backward pass are."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._end: Callable[[int], None] | None = None
        self._vote: Tensor | None = None
        self._place = (0, 1)
        self._trips: list[_Trip] = []

    def begin(self, vote: Tensor, place: tuple[int, int], end: Callable[[int], None]) -> None:
        """A backward pass begins.

        Args:
            vote: the parameter whose gradient is the vote.
            place: this rank, and how many there are.
            end: called when the last bucket is on its way, with the time when it was there.
        """
        self._vote, self._place, self._end, self._trips = vote, place, end, []

    def pick_up(self, bucket: Any) -> None:
        """Begin the sum of a bucket."""
        assert self._vote is not None
        assert self._end is not None
        ready_ns, index = perf_counter_ns(), bucket.index()
        parcel = Parcel(bucket, self._vote, *self._place)
        rounds = self.codec.rounds(parcel) if len(parcel.flat) else _alone(parcel)
        wait = next(rounds)
        launched_ns = perf_counter_ns()
        self._trips.append(_Trip(parcel, rounds, wait, launched_ns))
        emit.span(Kind.BUCKET_READY, ready_ns, ready_ns, ident=index)
        emit.span(Kind.BUCKET_LAUNCH, launched_ns, launched_ns, ident=index)
        if bucket.is_last():
            self._end(ready_ns)

    def deliver(self) -> bool:
        """Wait for all sums, and put them in place; whether they are finite."""
        trips, self._trips = self._trips, []
        parcels = [trip.parcel for trip in trips]
        while trips:
            for trip in trips:
                trip.wait.wait()
                with torch.no_grad():
                    trip.wait = next(trip.rounds, None)
                if trip.wait is None:
                    _tell(trip)
            trips = [trip for trip in trips if trip.wait is not None]
        return all(parcel.is_finite for parcel in parcels)

    def let_go(self) -> None:
        """Forget what is under way: its pass has failed."""
        self._vote, self._end, self._trips = None, None, []


def take(
    courier: Courier,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook."""
    courier.pick_up(bucket)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _alone(parcel: Parcel) -> Generator[Any, None, None]:
    """A bucket that has the vote and nothing else."""
    yield from parcel.all_reduce(parcel.vote)
    parcel.put(parcel.flat, parcel.vote, is_finite=True)


def _tell(trip: _Trip) -> None:
    parcel = trip.parcel
    emit.span(
        Kind.BUCKET_DONE,
        trip.launched_ns,
        max(parcel.done_ns, trip.launched_ns),  # it may end before who began it goes on
        ident=parcel.index,
        value=parcel.payload_bytes,
    )
