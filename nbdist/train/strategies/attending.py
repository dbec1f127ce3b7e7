"""The server's side of its links to workers: a thread for each, since no backend tells who is next.

A worker that is slow keeps nobody but itself. Threads end with their group, with the last answer,
or when they are told to.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.engine import emit
from nbdist.engine.works import WORKS
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.parcels import Answered, Asked, Kind, asked_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.train.strategies.parcels import Parcels

TAG = 7717
"""Of these messages: a user's own may go between the same ranks."""


class Message(NamedTuple):
    """From a worker."""

    worker: int
    asked: Asked
    numbers: Tensor
    parcel: Tensor | None
    """None: it has not sent gradients."""


class Attendants:
    """One for each worker.

    Args:
        workers: their ranks.
        parcels: what is sent.
    """

    def __init__(self, workers: Iterable[int], parcels: Parcels) -> None:
        self._lock = threading.Lock()
        self._news: deque[Message | Exception | None] = deque()
        """None: a worker has its last answer."""
        self._promise: Any = None
        self._sizes = parcels.num_asked, parcels.num_bytes
        self._answers = {
            worker: queue.SimpleQueue[tuple[Tensor, Tensor] | None]() for worker in workers
        }
        for worker in self._answers:
            threading.Thread(
                target=self._attend, args=(worker,), name=f"nbdist-worker-{worker}", daemon=True
            ).start()

    def next(self) -> Message:
        """What has come, or comes next.

        Raises what a link has raised: a worker is gone, or the group was cut.
        """
        news = self._next()
        assert news is not None  # only all of them together are given a last answer
        return news

    def finish(self) -> None:
        """All were given their last answers: wait until they have them."""
        for _ in self._answers:
            self._next()

    def _next(self) -> Message | None:
        while True:
            with self._lock:
                if self._news:
                    return _or_raise(self._news.popleft())
                promise = self._promise = WORKS.expect()
            promise.wait()

    def answer(self, worker: int, answered: Answered, parcel: Tensor) -> None:
        """Answer a worker that has asked."""
        self._answers[worker].put((torch.tensor(answered, dtype=torch.float64), parcel))

    def close(self) -> None:
        """Nobody is answered any more."""
        for answers in self._answers.values():
            answers.put(None)

    def _attend(self, worker: int) -> None:
        try:
            while self._serve(worker):
                pass
            self._post(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the main thread is told
            self._post(error)

    def _serve(self, worker: int) -> bool:
        """One message and its answer; whether more come."""
        num_numbers, num_bytes = self._sizes
        numbers, parcel = torch.empty(num_numbers, dtype=torch.float64), None
        WORKS.wait_here([dist.irecv(numbers, worker, tag=TAG)])
        asked = asked_of(numbers)
        if asked.kind == Kind.PUSH:
            parcel = torch.empty(num_bytes, dtype=torch.uint8)
            WORKS.wait_here([dist.irecv(parcel, worker, tag=TAG)])
        self._post(Message(worker, asked, numbers, parcel))
        answer = self._answers[worker].get()
        if answer is None:
            return False
        with emit.exchange(Op.SEND, Axis.DATA, 2, sum(part.nbytes for part in answer)):
            WORKS.wait_here([dist.isend(part, worker, tag=TAG) for part in answer])
        return bool(answer[0][0] != Kind.STAND)

    def _post(self, news: Message | Exception | None) -> None:
        with self._lock:
            self._news.append(news)
            promise, self._promise = self._promise, None
        if promise is not None:
            WORKS.keep(promise)


def _or_raise(news: Message | Exception | None) -> Message | None:
    if isinstance(news, Exception):
        raise news
    return news
