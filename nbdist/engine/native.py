"""The present group as torch's reducer is to have it: a cut frees who waits in it.

Where parameters may be unused, the reducer sums which of them were, and before the second step it
agrees on the order of its buckets. It waits for both in native code, where a promise of `works`
can be put in the place of gloo's own word only by a group that is ours. Runs in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nbdist.engine.works import WORKS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future


class _Followed(dist._Work):  # type: ignore[name-defined,misc] # noqa: SLF001 - torch's only name
    """One collective."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._promise = WORKS.follow(work)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Until it is done, or its group cut."""
        self._promise.wait()
        return True

    def get_future(self) -> Future[list[Tensor]]:
        """What it gives."""
        return self._promise

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._promise.done()


class PresentGroup(dist.ProcessGroup):
    """torch's default group, whichever that is at the moment; what the reducer asks of it."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # a store is one way, two numbers another

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many ranks."""
        return dist.get_world_size()

    def allreduce(self, *args: Any) -> Any:
        """Sum over all ranks."""
        return _Followed(_world().allreduce(*args))

    def broadcast(self, *args: Any) -> Any:
        """What one rank has, to all."""
        return _Followed(_world().broadcast(*args))


def _world() -> Any:
    return dist.group.WORLD


PRESENT = PresentGroup()
"""Of this process."""
