"""Memory that the ranks of one host share: each makes a part, and maps the parts of all others.

A part has no name in any folder and goes with the last process that has it open or mapped, however
that ended. A peer's part is looked for among the files that the process of that rank has open, by
its number in the generation: nothing is learnt from sockets that prove nothing. Runs in the main
thread; the wait for slow peers looks at the marks and at the processes from a thread of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import select
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MARKS_BYTES = 4096
"""At the beginning of a part: how far its rank is, each number on a cache line of its own."""
_LINE = 64 // 8


class Unshared(OSError):  # noqa: N818 - says what was found, as those of nbdist.errors do
    """Memory cannot be shared here; the message says why."""


class Arena:
    """The parts of all ranks."""

    def __init__(self, name: str, rank: int, num_bytes: int) -> None:
        """Make this rank's part.

        Args:
            name: the same on all ranks, and no other one's of their processes.
            rank: this one.
            num_bytes: of its part, beside the marks.

        Raises:
            OSError: it cannot be had; the message says why.
        """
        self.rank, self._name = rank, name
        self._num_bytes = MARKS_BYTES + num_bytes
        self._own = _create(_part_name(name, rank), self._num_bytes)
        self._num_cores = len(os.sched_getaffinity(0))
        self._parts: list[mmap.mmap] = []
        self._marks: list[Any] = []
        self._processes: dict[int, int] = {}
        """Descriptor of a peer's process -> its rank."""

    def meet(self, pids: Sequence[int]) -> None:
        """Map the parts of all ranks, which have made them.

        Raises:
            OSError: one cannot be reached.
        """
        for rank, pid in enumerate(pids):
            if rank == self.rank:
                part = mmap.mmap(self._own, self._num_bytes)
            else:
                self._processes[os.pidfd_open(pid)] = rank
                part = _map_peers(pid, _part_name(self._name, rank), self._num_bytes)
            self._parts.append(part)
            self._marks.append(memoryview(part).cast("q"))

    @property
    def is_crowded(self) -> bool:
        """Whether there are more ranks than cores for them."""
        return len(self._parts) > self._num_cores

    @property
    def num_ranks(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    def views(self, start: int, num_bytes: int, dtype: np.dtype[Any]) -> list[Any]:
        """The same piece of each part, as an array, by rank."""
        count = num_bytes // dtype.itemsize
        return [np.frombuffer(part, dtype, count, MARKS_BYTES + start) for part in self._parts]

    def mark(self, kind: int, number: int) -> None:
        """Say that this rank has come so far. What it wrote before is there for who sees it."""
        self._marks[self.rank][kind * _LINE] = number

    def have_come(self, kind: int, number: int) -> bool:
        """Whether all ranks have come so far."""
        place = kind * _LINE
        return all(marks[place] >= number for marks in self._marks)

    def ended(self) -> int | None:
        """A rank whose process has ended; None: all live."""
        poll = select.poll()
        for process in self._processes:
            poll.register(process, select.POLLIN)
        return next((self._processes[process] for process, _ in poll.poll(0)), None)

    def close(self) -> None:
        """Let go of all parts; who still has a view of one keeps it for so long."""
        for process in [*self._processes, self._own]:
            os.close(process)
        self._processes, self._own = {}, -1
        self._parts, self._marks = [], []


def _part_name(name: str, rank: int) -> str:
    """Of one rank's part; who has mapped it has it open too."""
    return f"{name}-{rank}"


def _create(name: str, num_bytes: int) -> int:
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        # Marks are plain stores: elsewhere a rank may see one before what was written before it.
        raise Unshared(f"{platform.system()} on {platform.machine()} is not provided for")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, num_bytes)  # too little memory is told here, not by a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map_peers(pid: int, name: str, num_bytes: int) -> mmap.mmap:
    """Map the part that another process has open under a name."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()) != f"/memfd:{name} (deleted)":
                continue
            fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # closed since it was listed
            continue
        try:
            return mmap.mmap(fd, num_bytes)
        except ValueError as error:
            raise Unshared(f"process {pid} shares less than {num_bytes} bytes") from error
        finally:
            os.close(fd)
    raise Unshared(f"process {pid} shares nothing named {name}")
