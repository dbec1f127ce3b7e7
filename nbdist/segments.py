"""Large values on their way to engines of this host: written once, mapped by each of them.

The kernel writes a value's bytes into a segment: memory without a name, which goes when the last
process that holds or maps it has ended, however it ended. An engine maps it copy on write, so that
what it changes is its own and the rest is there once for all. In a pickle stands where the bytes
are. The kernel keeps what it has sent for engines that come later, within a bound. Never imports
numpy or torch: whose value it is has them loaded.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import sys
import threading
from typing import Any, NamedTuple

from nbdist.errors import SegmentGone

MIN_BYTES = 2**20
"""What is smaller stays in the message."""
MAX_KEPT_BYTES = 2**30
"""Of all segments, but the newest, that the kernel keeps for engines that come later."""
_PIECE_BYTES = 8 * 2**20
"""So much is written at a time: an interrupt comes in between."""


class Extent(NamedTuple):
    """Where the bytes of a value are. Names the segment, so that a reused number is noticed."""

    pid: int
    fd: int
    token: str
    host: str
    offset: int
    num_bytes: int


class Segment:
    """One segment, while it is written and kept. For one thread at a time."""

    def __init__(self) -> None:
        self._fd = -1
        self._token = secrets.token_hex(16)
        self._host = socket.gethostname()
        self.num_bytes = 0
        self.reason = ""
        """Why a value was left in the message; empty: none was."""

    def lend(self, value: Any) -> tuple[Any, ...] | None:
        """How a pickle is to say a value that is written here; None: as ever.

        For `protocol.values.pack`.
        """
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            if not _is_plain_tensor(value, torch):
                return None
            extent = self._append(value.detach().reshape(-1).view(torch.uint8).numpy())
            wants = bool(value.requires_grad)
            return extent and (open_tensor, (extent, value.dtype, tuple(value.shape), wants))
        if numpy is not None and type(value) is numpy.ndarray and _is_plain_array(value):
            extent = self._append(value.reshape(-1).view(numpy.uint8))
            return extent and (open_array, (extent, value.dtype, value.shape))
        return None

    def seal(self) -> None:
        """Nobody changes it from now on, not even who made it."""
        if self._fd >= 0:
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Keep it no longer; engines that have mapped it do. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: Any) -> Extent | None:
        """Write the bytes of an array at the end; None where they find no room."""
        start = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            if self._fd < 0:
                self._fd = _create(self._token)
            _write(self._fd, memoryview(data), start)
        except OSError as error:  # written, not mapped: too little memory is told, and no SIGBUS
            self.reason = (
                f"a value of {len(data) / 2**20:.0f} MiB was pushed in messages, not through "
                f"shared memory: {error}. Each engine has a copy of its own"
            )
            return None
        self.num_bytes = start + len(data)
        return Extent(os.getpid(), self._fd, self._token, self._host, start, len(data))


class Kept:
    """The segments that the kernel keeps, for any thread."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._lock = threading.Lock()

    def add(self, segment: Segment) -> None:
        """Keep this too; the oldest go where it is too much."""
        with self._lock:
            self._segments.append(segment)
            while len(self._segments) > 1 and self.num_bytes > MAX_KEPT_BYTES:
                self._segments.pop(0).close()

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(segment.num_bytes for segment in self._segments)

    def close(self) -> None:
        """Keep none of them."""
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments.clear()


def open_array(extent: Extent, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A numpy array on a segment; changes are this process's own."""
    numpy = sys.modules["numpy"]  # loaded with its dtype
    return numpy.frombuffer(_map(extent), dtype=dtype).reshape(shape)


def open_tensor(extent: Extent, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """A tensor on a segment; changes are this process's own."""
    torch = sys.modules["torch"]  # loaded with its dtype
    tensor = torch.frombuffer(_map(extent), dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _map(extent: Extent) -> mmap.mmap:
    try:
        ours = os.open(f"/proc/{extent.pid}/fd/{extent.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _gone(extent, error) from error
    try:
        if _name(extent.token) not in os.readlink(f"/proc/self/fd/{ours}"):  # noqa: PTH115 - no file's path
            raise _gone(extent, "another file is there now")
        return mmap.mmap(
            ours,
            extent.num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=extent.offset,
        )
    finally:
        os.close(ours)


def _gone(extent: Extent, why: object) -> SegmentGone:
    return SegmentGone(
        f"{extent.num_bytes / 2**20:.0f} MiB pushed through shared memory of process {extent.pid} "
        f"on {extent.host} cannot be reached ({why}). Push the name again"
    )


def _create(token: str) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(f"{sys.platform} has none without a name")
    fd = os.memfd_create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    return fd


def _name(token: str) -> str:
    return f"nbdist-{token}"


def _write(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _PIECE_BYTES], start + done)


def _is_plain_tensor(value: Any, torch: Any) -> bool:
    """One whose bytes, type and shape are all there is to it."""
    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= MIN_BYTES
        and value.is_contiguous()
        and (value.is_leaf or not value.requires_grad)
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and not (value._backward_hooks or vars(value))  # noqa: SLF001 - torch has no public name
    )


def _is_plain_array(value: Any) -> bool:
    is_large = value.nbytes >= MIN_BYTES and value.flags.c_contiguous
    return is_large and not value.dtype.hasobject
