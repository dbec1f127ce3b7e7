"""Commits checkpoints once all engines have written their parts, or gives them up.

Each has a thread of its own, since a disk may be slow or stuck, and the supervisor must not be. The
supervisor's one thread gives orders and takes the answers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from nbdist import checkpoints
from nbdist.protocol import orders as od
from nbdist.protocol import saves as sv
from nbdist.supervisor.watchdog import observe

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_PERIOD_S = 0.05
CLOSE_LIMIT_S = 1.0
MAX_FAULTS = 64
"""Faults that are kept of checkpoints that nobody has asked for yet."""
_STANDS = "Earlier checkpoints are as they were, training goes on, and the next save is a new one"

log = logging.getLogger(__name__)


class Save(threading.Thread):
    """One checkpoint that is being written.

    Args:
        order: which.
        is_there: whether a process is.
    """

    def __init__(self, order: sv.CommitSave, is_there: Callable[[int], bool]) -> None:
        super().__init__(name="nbdist-checkpoint", daemon=True)
        self._order, self._is_there = order, is_there
        self._partial = Path(order.partial)
        self._fault: od.Refused | None = None
        self._news = threading.Event()
        self.answer: sv.SaveCommitted | od.Refused | None = None
        """Once it is over."""

    def fail(self, kind: str, message: str) -> None:
        """It comes to nothing. From the supervisor's thread."""
        self._fault = od.Refused(kind=kind, message=message)
        self._news.set()

    def run(self) -> None:
        """Wait for the writers, then commit."""
        try:
            answer = self._finish()
        except OSError as error:
            text = checkpoints.unwritable(self._partial.parent, error)
            answer = od.Refused(kind="FileUnwritable", message=text)
        except Exception as error:
            log.exception("%s", self._partial)
            text = f"step {self._order.step} is not saved: {type(error).__name__}: {error}"
            answer = od.Refused(kind="SaveAbandoned", message=text)
        if isinstance(answer, od.Refused):
            log.warning("%s: %s", self._partial, answer.message)
            checkpoints.discard(self._partial)
        self.answer = answer

    def _finish(self) -> sv.SaveCommitted | od.Refused:
        order = self._order
        parts = [checkpoints.part_name(rank) for rank in range(len(order.pids))]
        while self._partial.exists():
            is_there = [self._is_there(pid) for pid in order.pids]  # before the look at receipts
            missing = [
                rank
                for rank, part in enumerate(parts)
                if not checkpoints.is_acknowledged(self._partial, part)
            ]
            if not missing:
                break
            if self._fault is not None:
                return self._fault
            if lost := [rank for rank in missing if not is_there[rank]]:
                who = ("rank " if len(lost) == 1 else "ranks ") + ", ".join(map(str, lost))
                text = f"step {order.step} is not saved: {who} ended while writing. {_STANDS}"
                return od.Refused(kind="SaveAbandoned", message=text)
            self._news.wait(LOOK_PERIOD_S)
        found = checkpoints.commit(
            self._partial, parts, step=order.step, generation=order.generation, keep=order.keep
        )
        log.info("checkpoint %s of step %s is whole", found.path, order.step)
        return sv.SaveCommitted(folder=str(found.path), num_bytes=found.manifest.num_bytes)


Waiter = TypeVar("Waiter")


class Saves(Generic[Waiter]):
    """The checkpoints that are being written, and who waits for them.

    Args:
        is_there: whether a process is; for tests.
    """

    def __init__(
        self, is_there: Callable[[int], bool] = lambda pid: observe(pid) is not None
    ) -> None:
        self._is_there = is_there
        self._open: dict[str, tuple[Save, list[Waiter]]] = {}
        self._faults: OrderedDict[str, sv.PartFailed] = OrderedDict()

    def take(self, waiter: Waiter, order: sv.CommitSave) -> None:
        """A kernel asks for one; whom `answered` names later."""
        if order.partial not in self._open:
            save = Save(order, self._is_there)
            self._open[order.partial] = save, []
            if fault := self._faults.pop(order.partial, None):
                save.fail(fault.kind, fault.message)
            save.start()
        self._open[order.partial][1].append(waiter)

    def failed(self, event: sv.PartFailed) -> None:
        """An engine could not write its part; the kernel may not have asked yet."""
        if event.partial in self._open:
            self._open[event.partial][0].fail(event.kind, event.message)
            return
        self._faults[event.partial] = event
        while len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)

    def answered(self) -> list[tuple[Waiter, sv.SaveCommitted | od.Refused]]:
        """Whom to answer what, now."""
        over = [name for name, (save, _) in self._open.items() if save.answer is not None]
        pairs: list[tuple[Waiter, sv.SaveCommitted | od.Refused]] = []
        for name in over:
            save, waiters = self._open.pop(name)
            assert save.answer is not None
            pairs += [(waiter, save.answer) for waiter in waiters]
        return pairs

    def close(self) -> None:
        """The cluster ends: what is not written now comes to nothing."""
        for save, _ in self._open.values():
            save.fail("SaveAbandoned", "the cluster was shut down while a checkpoint was written")
        for save, _ in self._open.values():
            save.join(CLOSE_LIMIT_S)
