"""Which samples a step trains on, and who takes which of them.

Both follow from seed, step and world size alone: nobody keeps a cursor, so nothing is lost or
repeated where a run is interrupted, resumed, shrunk or grown. Runs in the engine's main thread.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from nbdist.train.checks import check_one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tail = Literal["drop", "short"]
"""What becomes of the samples at an epoch's end that do not fill a batch: left out, or a smaller
batch. They are never filled up with others."""


class Sampling:
    """The order in which a data set is trained on.

    Args:
        num_samples: in the data set.
        global_batch: samples a step, over all ranks.
        seed: with the epoch, decides the order.
        tail: what becomes of the samples that do not fill a batch.

    Raises:
        ValueError: there is no sample, or no step in an epoch; the message says what to change.
    """

    def __init__(
        self, num_samples: int, global_batch: int, *, seed: int, tail: Tail = "drop"
    ) -> None:
        check_one_of("tail", tail, get_args(Tail))
        if num_samples == 0:
            raise ValueError("data is empty: len(data) is 0, and there is nothing to train on")
        if tail == "drop" and num_samples < global_batch:
            raise ValueError(
                f'tail="drop" leaves nothing to train on: data has {num_samples} samples and '
                f"global_batch is {global_batch}. Use global_batch={num_samples} or less, or "
                'tail="short"'
            )
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.tail = seed, tail
        full, rest = divmod(num_samples, global_batch)
        self.steps_per_epoch = full + (tail == "short" and rest > 0)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> NDArray[np.int64]:
        """Indices of the samples of a step, over all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.num_samples, self.seed, epoch)
        return self._order[place * self.global_batch : (place + 1) * self.global_batch]


def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of all samples in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def share(num: int, place: int, num_places: int) -> slice:
    """The contiguous part of `num` things that falls to `place` of `num_places`.

    Parts are as equal as possible, larger ones first; with more places than things the last are
    empty.
    """
    size, rest = divmod(num, num_places)
    start = place * size + min(place, rest)
    return slice(start, start + size + (place < rest))
