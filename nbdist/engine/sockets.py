"""Which sockets belong to one gloo group, exactly; cuts them, and keeps them from child processes.

Gloo (torch 2.13) publishes each rank's listener address in the store while a group forms. A
connected TCP socket of this process is the group's if and only if its local end is this rank's
published address (we accepted it) or its remote end is another rank's (we opened it): the kernel
gives no outgoing connection a port on which somebody listens, and nobody but gloo listens there.
Shutting these sockets down is the one way to free a thread that waits in a gloo collective.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Address = tuple[str, int]

NOBODYS_PORT = 1
"""tcpmux, which no host of ours serves."""


Store: TypeAlias = Any
"""One of torch's stores; this module needs no torch to work on their values."""


class NotExact(RuntimeError):  # noqa: N818 - says what was found, as those of nbdist.errors do
    """The sockets found do not fit the group; it cannot be cut."""


@dataclass(frozen=True)
class SocketRef:
    """A socket of ours, named so that a reused descriptor is not taken for it."""

    fd: int
    inode: int


def parse_address(blob: bytes) -> Address:
    """IP and port from what gloo publishes.

    That is: u64 n, host name; u64 n, sockaddr_storage and more; pair ids.
    """
    try:
        return _parse(blob)
    except (struct.error, OverflowError, ValueError) as error:
        raise NotExact(f"not an address: {blob[:48]!r}") from error


def _parse(blob: bytes) -> Address:
    (name_length,) = struct.unpack_from("<Q", blob, 0)
    (length,) = struct.unpack_from("<Q", blob, 8 + name_length)
    address = blob[16 + name_length : 16 + name_length + length]
    if len(address) < 24:
        raise ValueError("too short")
    (family,) = struct.unpack_from("=H", address, 0)
    (port,) = struct.unpack_from(">H", address, 2)
    if family not in (socket.AF_INET, socket.AF_INET6) or port == 0:
        raise ValueError("no IP address")
    raw = address[4:8] if family == socket.AF_INET else address[8:24]
    return socket.inet_ntop(family, raw), port


def find(store: Store, rank: int, world_size: int) -> list[SocketRef]:
    """The connected sockets of a group that has just been formed.

    Args:
        store: the prefix store of the group's backend.
        rank: this process's rank in that group.
        world_size: number of ranks in it.

    Raises:
        NotExact: their number is not `world_size - 1`, or the published addresses cannot be read.
    """
    if world_size == 1:
        return []
    blobs = store.multi_get([f"0/{r}" for r in range(world_size)])
    addresses = [parse_address(blob) for blob in blobs]
    own = addresses[rank]
    peers = {a for r, a in enumerate(addresses) if r != rank}
    found = [ref for ref, local, remote in connected() if local == own or remote in peers]
    if len(found) != world_size - 1:
        raise NotExact(f"{len(found)} sockets for {world_size} ranks")
    return found


def connected() -> Iterable[tuple[SocketRef, Address, Address]]:
    """Every connected TCP socket of this process, with its two ends."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - descriptors, not paths
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        info = os.fstat(copy)
        if not stat.S_ISSOCK(info.st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as sock:
            if (
                sock.family not in (socket.AF_INET, socket.AF_INET6)
                or sock.type != socket.SOCK_STREAM
            ):
                continue
            try:
                ends = _plain(sock.getsockname()), _plain(sock.getpeername())
            except OSError:
                continue  # it listens, or is no longer connected
            yield SocketRef(int(name), info.st_ino), *ends


def unblock_forming(store: Store, rank: int, world_size: int) -> None:
    """Free a thread that waits, while a group forms, for ranks that will not come.

    Ranks that have not published an address are given one at which nobody listens, so that
    connecting to it fails at once; connections that stand already are cut; and at our own listener,
    which waits for ranks to call, each of them calls and hangs up. To be repeated until the thread
    is free. For another thread, with a store client of its own: a client serves one call at a time.
    """
    if not store.check([f"0/{rank}"]):
        return
    (own,) = store.multi_get([f"0/{rank}"])
    (name_length,) = struct.unpack_from("<Q", own, 0)
    port_at = 16 + name_length + 2
    nobody = own[:port_at] + struct.pack(">H", NOBODYS_PORT) + own[port_at + 2 :]
    peers = [r for r in range(world_size) if r != rank]
    for peer in peers:
        if not store.check([f"0/{peer}"]):
            store.set(f"0/{peer}", nobody)
    here = parse_address(own)
    there = {parse_address(blob) for blob in store.multi_get([f"0/{r}" for r in peers])}
    cut([ref for ref, local, remote in connected() if local == here or remote in there])
    for peer in peers:
        with contextlib.suppress(OSError), socket.create_connection(here, timeout=0.1) as call:
            call.sendall(struct.pack("<Q", peer))  # gloo's greeting: the number of the pair


def cut(refs: Iterable[SocketRef]) -> int:
    """Shut down each socket that is still the same one; returns how many.

    For any thread; needs no lock of gloo.

    A descriptor's number says nothing: gloo closes its sockets as soon as a peer cuts first, and
    other threads get those numbers. So: duplicate (from then on it cannot change), compare the
    inode, then shut down. Never a listener: gloo ends the process when its own is shut.
    """
    count = 0
    for ref in refs:
        try:
            copy = os.dup(ref.fd)
        except OSError:
            continue
        if os.fstat(copy).st_ino != ref.inode:
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
            except OSError:
                continue  # no longer connected
    return count


def is_open(ref: SocketRef) -> bool:
    """Whether a socket of ours is still that very one."""
    try:
        return os.fstat(ref.fd).st_ino == ref.inode
    except OSError:
        return False


def close_on_exec(refs: Iterable[SocketRef]) -> None:
    """Keep sockets from programs that this process starts.

    Peers would not notice its death while such a child lives.
    """
    for ref in refs:
        fcntl.fcntl(ref.fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def hide(refs: Iterable[SocketRef]) -> None:
    """In a forked child: put /dev/null in their place, for the same reason."""
    null = os.open(os.devnull, os.O_RDWR)
    for ref in refs:
        try:
            if os.fstat(ref.fd).st_ino == ref.inode:
                os.dup2(null, ref.fd)
        except OSError:
            continue
    os.close(null)


def _plain(address: tuple[object, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:"), int(str(address[1]))
