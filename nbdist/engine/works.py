"""Collectives in flight: who waits for one is freed when its group is cut, whatever gloo does.

Gloo (torch 2.13) loses a send whose first write fails on its own thread: the operation was taken
off the list of what waits for its peer, and is on no other yet, so nobody is told, and the
collective waits for its timeout though every socket is closed. Seen in one of some forty kills in
mid-transfer; a receiver whose sender dies in mid-transfer was seen to wait likewise. So a trainer
and a hand-over wait for a promise of ours instead, which a cut breaks. Called in the main thread,
in torch's, in one of its own for each `Works.call`, and, to give up, in the agent's.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Promise = Future[list[Tensor]]


_CUT = "the group was cut in a collective"


class _Waited:
    """Sends and receives that a thread of ours waits for."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._has_ended = False

    def run(self) -> None:
        """Wait for all of them."""
        try:
            for work in self._works:
                work.wait()
        finally:
            self._has_ended = True
            self._works = ()

    def is_completed(self) -> bool:
        """As works say it."""
        return self._has_ended


_NOTHING = _Waited(())
_NOTHING.run()
"""Where no work of torch's is waited for."""

_Errand = tuple[_Promise, _Waited] | None


class Works:
    """The collectives of this process that somebody waits for."""

    def __init__(self) -> None:
        self.num_begun = 0
        """Waits, of the main thread and of torch's, that there ever were: who looks at a thread now
        and then does not take several on end for one."""
        self._lock = threading.Lock()
        self._is_cut = False
        self._open: dict[int, tuple[_Promise, Any]] = {}
        self._given_up: list[Any] = []
        self._errands: queue.SimpleQueue[_Errand] | None = None
        """Of the thread that waits in place of the main thread."""
        self._calls: dict[int, concurrent.futures.Future[None]] = {}

    def begin(self) -> None:
        """A group is about to be formed: what follows is in that one."""
        with self._lock:
            self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Whether the present group was cut."""
        return self._is_cut

    def follow(self, work: Any) -> _Promise:
        """What a collective will give; an error as soon as its group is cut.

        It may have been cut since the collective began, a moment ago.
        """
        promise: _Promise = Future()
        with self._lock:
            self.num_begun += 1
            is_cut = self._is_cut
            if is_cut:
                self._given_up.append(work)
            else:
                self._open[id(promise)] = promise, work
        if is_cut:
            _break(promise, dist.DistNetworkError(_CUT))
        else:
            work.get_future().add_done_callback(lambda future: self._settle(promise, future))
        return promise

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for sends and receives, of whose end torch tells nobody but who waits for it.

        Raises:
            DistNetworkError: the group was cut, before perhaps. Or what a wait raises.
        """
        promise, waited = _Promise(), _Waited(works)
        with self._lock:
            self.num_begun += 1
            is_cut = self._is_cut
            errands = self._errands or _begin_waiting(self._settle_wait)
            errands.put((promise, waited))
            if is_cut:
                errands.put(None)
                self._given_up.append(waited)
            else:
                self._open[id(promise)], self._errands = (promise, waited), errands
        if is_cut:
            _break(promise, dist.DistNetworkError(_CUT))
        promise.wait()

    def wait_here(self, works: Sequence[Any]) -> None:
        """Wait for sends and receives in a thread of one's own, which may never come back.

        Raises:
            DistNetworkError: the group was cut before. Or what a wait raises.
        """
        promise, waited = _Promise(), _Waited(works)
        with self._lock:
            is_cut = self._is_cut
            if not is_cut:
                self._open[id(promise)] = promise, waited
        if is_cut:
            raise dist.DistNetworkError(_CUT)
        try:
            waited.run()
        finally:
            with self._lock:
                self._open.pop(id(promise), None)

    def expect(self) -> _Promise:
        """What another thread of ours will `keep`; an error as soon as the group is cut."""
        promise = _Promise()
        with self._lock:
            self.num_begun += 1
            is_cut = self._is_cut
            if not is_cut:
                self._open[id(promise)] = promise, _NOTHING
        if is_cut:
            _break(promise, dist.DistNetworkError(_CUT))
        return promise

    def keep(self, promise: _Promise) -> None:
        """What was expected is there."""
        self._settle_wait(promise, None)

    def fail(self, promise: _Promise, error: Exception) -> None:
        """What was expected will not come."""
        self._settle_wait(promise, error)

    def _settle_wait(self, promise: _Promise, error: Exception | None) -> None:
        with self._lock:
            if self._open.pop(id(promise), None) is None:
                return
        if error is None:
            promise.set_result([])
        else:
            _break(promise, error)

    def call(self, function: Callable[[], object]) -> None:
        """Wait for a call that waits natively: torch tells of no send or receive when it is done.

        The thread that it runs in is left behind where the call never ends.

        Raises:
            DistNetworkError: the group was cut, before perhaps. Or what the call raises.
        """
        promise: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits is told
                self._end_call(promise, error)
            else:
                self._end_call(promise, None)

        with self._lock:
            self.num_begun += 1
            if self._is_cut:
                raise dist.DistNetworkError(_CUT)
            self._calls[id(promise)] = promise
        threading.Thread(target=run, name="nbdist-transfer", daemon=True).start()
        promise.result()

    def _end_call(self, promise: concurrent.futures.Future[None], error: Exception | None) -> None:
        with self._lock:
            if self._calls.pop(id(promise), None) is None:
                return
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(error)

    def give_up(self) -> None:
        """The group is cut: nothing more is waited for."""
        with self._lock:
            self._is_cut = True
            calls = list(self._calls.values())
            given_up, self._open = list(self._open.values()), {}
            if self._errands is not None:  # it may never come back from where it waits
                self._errands.put(None)
                self._errands = None
            self._given_up += [work for _, work in given_up]
        for call in calls:
            self._end_call(call, dist.DistNetworkError(_CUT))
        for promise, _ in given_up:
            _break(promise, dist.DistNetworkError(_CUT))

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


def _begin_waiting(
    settle: Callable[[_Promise, Exception | None], None],
) -> queue.SimpleQueue[_Errand]:
    """A thread that waits for one thing after the other."""
    errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()

    def run() -> None:
        while (errand := errands.get()) is not None:
            promise, waited = errand
            try:
                waited.run()
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits is told
                settle(promise, error)
            else:
                settle(promise, None)

    threading.Thread(target=run, name="nbdist-waiting", daemon=True).start()
    return errands


def _break(promise: _Promise, error: Exception) -> None:
    promise.set_exception(error)  # type: ignore[arg-type]


WORKS = Works()
"""Of this process."""
