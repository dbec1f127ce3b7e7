"""Collectives in flight: who waits for one is freed when its group is cut, whatever gloo does.

Gloo (torch 2.13) loses a send whose first write fails on its own thread: the operation was taken
off the list of what waits for its peer, and is on no other yet, so nobody is told, and the
collective waits for its timeout though every socket is closed. Seen in one of some forty kills in
mid-transfer. So a trainer waits for a promise of ours instead, which a cut breaks. Called in the
main thread, in torch's, and, to give up, in the agent's.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_Promise = Future[list[Tensor]]


class Works:
    """The collectives of this process that somebody waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[_Promise, Any]] = {}
        self._given_up: list[Any] = []

    def follow(self, work: Any) -> _Promise:
        """What a collective will give; an error as soon as its group is cut."""
        promise: _Promise = Future()
        with self._lock:
            self._open[id(promise)] = promise, work
        work.get_future().add_done_callback(lambda future: self._settle(promise, future))
        return promise

    def give_up(self) -> None:
        """The group is cut: nothing more is waited for."""
        with self._lock:
            given_up, self._open = list(self._open.values()), {}
            self._given_up += [work for _, work in given_up]
        for promise, _ in given_up:
            _break(promise, dist.DistNetworkError("the group was cut in a collective"))

    def take_stuck(self, within_s: float) -> list[Any]:
        """Those that have not ended though they were given up; asked for once."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
        deadline = time.monotonic() + within_s
        while not all(work.is_completed() for work in given_up):
            if time.monotonic() > deadline:
                return [work for work in given_up if not work.is_completed()]
            time.sleep(0.002)
        return []

    def _settle(self, promise: _Promise, future: Future[Any]) -> None:
        with self._lock:
            if self._open.pop(id(promise), None) is None:
                return
        try:
            value = future.value()
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits is told
            _break(promise, error)
        else:
            promise.set_result(value)


def _break(promise: _Promise, error: Exception) -> None:
    promise.set_exception(error)  # type: ignore[arg-type]


WORKS = Works()
"""Of this process."""
