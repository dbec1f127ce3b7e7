"""Which sockets belong to a group, with real ones on the loopback interface; cutting them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

import pytest

from nbdist.engine import sockets
from nbdist.engine.sockets import (
    NOBODYS_PORT,
    NotExact,
    SocketRef,
    close_on_exec,
    connected,
    cut,
    find,
    hide,
    is_open,
    parse_address,
    unblock_forming,
)

HOST = "127.0.0.1"


def published(host, port, *, name=b"a-host", family=socket.AF_INET, size=128):
    """What gloo publishes of a rank: its host's name, its address, and the numbers of its pairs."""
    packed = socket.inet_pton(family, host)
    flow = b"" if family == socket.AF_INET else b"\0\0\0\0"
    address = (struct.pack("=H", family) + struct.pack(">H", port) + flow + packed)[:size]
    address = address.ljust(size, b"\0")
    parts = [struct.pack("<Q", len(name)), name, struct.pack("<Q", size), address, b"\7" * 16]
    return b"".join(parts)


class Store:
    """A store of torch's, as far as it is used."""

    def __init__(self, *blobs):
        self.values = {f"0/{rank}": blob for rank, blob in enumerate(blobs) if blob is not None}

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def set(self, key, value):
        self.values[key] = value


@pytest.fixture
def sock():
    """Makes sockets that are closed at the end: a listener, or a pair of connected ones."""
    with contextlib.ExitStack() as stack:

        def listener():
            return stack.enter_context(socket.create_server((HOST, 0)))

        def pair(server):
            caller = stack.enter_context(socket.create_connection(server.getsockname()))
            accepted, _ = server.accept()
            stack.enter_context(accepted)
            for end in (caller, accepted):
                end.settimeout(5)
            return caller, accepted

        yield type("Sockets", (), {"listener": staticmethod(listener), "pair": staticmethod(pair)})


def ref_of(sock):
    return SocketRef(sock.fileno(), os.fstat(sock.fileno()).st_ino)


@pytest.fixture
def group(sock):
    """Rank 1 of three: rank 0 was called by it, rank 2 has called it; store, our ends, theirs."""
    listeners = [sock.listener() for _ in range(3)]
    to_first, first = sock.pair(listeners[0])
    second, from_second = sock.pair(listeners[1])
    store = Store(*(published(*server.getsockname()) for server in listeners))
    return store, (to_first, from_second), (first, second), listeners


# ---- addresses


@pytest.mark.parametrize("name", [b"", b"h", b"a-long-host.example.org"])
def test_an_address_is_read_behind_the_name(name):
    """The name's length moves it."""
    assert parse_address(published(HOST, 4711, name=name)) == (HOST, 4711)


def test_an_address_may_be_one_of_ip_6():
    """In the form in which a socket names it."""
    blob = published("::1", 4711, family=socket.AF_INET6)
    assert parse_address(blob) == ("::1", 4711)


@pytest.mark.parametrize(
    "blob",
    [
        published(HOST, 0),
        published(HOST, 4711, size=8),
        published(HOST, 4711)[:40],
        published(HOST, 4711).replace(struct.pack("=H", socket.AF_INET), b"\x63\0", 1),
    ],
    ids=["no port", "short", "cut short", "another family"],
)
def test_what_is_no_address_is_told(blob):
    """Another release of torch may publish something else: nothing is guessed."""
    with pytest.raises(NotExact, match="not an address"):
        parse_address(blob)


@pytest.mark.parametrize(
    "blob",
    [b"", b"\1\0", struct.pack("<Q", 1 << 40), b"\xff" * 64],
    ids=["empty", "cut short", "too long a name", "too large a number"],
)
def test_what_is_not_even_of_gloos_form_is_told_alike(blob):
    """A group whose addresses cannot be read is one that cannot be cut, and no error."""
    with pytest.raises(NotExact):
        find(Store(published(HOST, 4711), blob), 0, 2)


# ---- finding


def test_the_sockets_of_a_group_are_those_that_it_called_or_was_called_on(group, sock):
    """Not the peers' ends, not the listeners, not another connection of this process."""
    store, ours, _, _ = group
    sock.pair(sock.listener())
    assert sorted(find(store, 1, 3), key=lambda ref: ref.fd) == sorted(
        map(ref_of, ours), key=lambda ref: ref.fd
    )


def test_a_group_of_one_has_no_sockets():
    """Nothing is asked of the store."""
    assert find(Store(), 0, 1) == []


def test_too_few_sockets_are_not_exact(group):
    """One is closed already: it is not known which they are."""
    store, ours, _, _ = group
    ours[0].close()
    with pytest.raises(NotExact, match="1 sockets for 3 ranks"):
        find(store, 1, 3)


def test_too_many_sockets_are_not_exact(group, sock):
    """Somebody else has called the group's listener."""
    store, _, _, listeners = group
    sock.pair(listeners[1])
    with pytest.raises(NotExact, match="3 sockets for 3 ranks"):
        find(store, 1, 3)


def test_only_connected_tcp_sockets_are_looked_at(sock):
    """Listeners, datagrams, pairs of another kind and files are passed over; nothing leaks."""
    server = sock.listener()
    caller, accepted = sock.pair(server)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as in the module
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket() as unconnected,
        open(os.devnull) as file,  # noqa: PTH123 - a descriptor
    ):
        one, other = socket.socketpair()
        datagrams.connect(server.getsockname())
        found = {ref.fd: (local, remote) for ref, local, remote in connected()}
        others = (server, datagrams, unconnected, one, other, file)
        assert found.keys().isdisjoint(other.fileno() for other in others)
        one.close()
        other.close()
    assert found[caller.fileno()] == (caller.getsockname(), server.getsockname())
    assert found[accepted.fileno()] == (server.getsockname(), caller.getsockname())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


def test_an_ip_4_address_on_an_ip_6_socket_is_the_same():
    """A listener for both kinds names its callers in the longer form."""
    assert sockets._plain(("::ffff:127.0.0.1", 5, 0, 0)) == (HOST, 5)
    assert sockets._plain(("::1", 5, 0, 0)) == ("::1", 5)


# ---- cutting


def test_a_cut_frees_both_sides(group):
    """Who waits for a byte gets the end of the connection; the listeners go on."""
    store, ours, theirs, listeners = group
    assert cut(find(store, 1, 3)) == 2
    assert [end.recv(1) for end in (*ours, *theirs)] == [b""] * 4
    with socket.create_connection(listeners[1].getsockname(), timeout=5):
        listeners[1].accept()[0].close()


def test_a_second_cut_finds_nothing_to_do(group):
    """Neither what was cut nor what was closed since is touched."""
    store, ours, theirs, _ = group
    refs = find(store, 1, 3)
    cut(refs)
    for end in theirs:
        end.close()
    ours[0].close()
    assert cut(refs) <= 1
    ours[1].close()
    assert cut(refs) == 0


def test_a_descriptor_in_new_hands_is_not_cut(group, sock):
    """The number is the same, the socket another one."""
    store, ours, theirs, _ = group
    refs = find(store, 1, 3)
    caller, accepted = sock.pair(sock.listener())
    os.dup2(caller.fileno(), ours[0].fileno())
    assert [is_open(ref) for ref in refs].count(True) == 1
    assert cut(refs) == 1
    accepted.sendall(b"x")
    assert caller.recv(1) == b"x"
    assert theirs[1].recv(1) == b""


def test_a_socket_is_open_while_it_is_the_same(sock):
    """Closed, or another one under its number: not open."""
    caller, _ = sock.pair(sock.listener())
    ref = ref_of(caller)
    assert is_open(ref)
    assert not is_open(SocketRef(ref.fd, ref.inode + 1))
    caller.close()
    assert not is_open(ref)


# ---- children


def test_programs_that_are_started_do_not_get_the_sockets(sock):
    """The peers must notice our death while such a child lives."""
    caller, _ = sock.pair(sock.listener())
    caller.set_inheritable(True)
    close_on_exec([ref_of(caller)])
    assert fcntl.fcntl(caller.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_forked_child_hides_the_sockets(sock):
    """In their place is nothing; what is not the same socket any more is left alone."""
    server = sock.listener()
    caller, accepted = sock.pair(server)
    other, _ = sock.pair(server)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as above
    hide([ref_of(caller), SocketRef(other.fileno(), 1), SocketRef(10**6, 1)])
    assert os.path.samestat(os.fstat(caller.fileno()), os.stat(os.devnull))  # noqa: PTH116
    assert accepted.recv(1) == b""
    assert is_open(ref_of(other))
    assert other.getpeername() == server.getsockname()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


# ---- while a group forms


def test_nothing_is_done_before_our_own_address_is_published():
    """Gloo has not begun to wait for others."""
    store = Store(None, published(HOST, 4711))
    unblock_forming(store, 0, 2)
    assert list(store.values) == ["0/1"]


def test_ranks_that_will_not_come_are_given_an_address_of_nobody(sock):
    """Connecting to it fails at once; what others have published stays."""
    server, peer = sock.listener(), sock.listener()
    own, theirs = published(*server.getsockname()), published(*peer.getsockname())
    store = Store(own, theirs, None)
    unblock_forming(store, 0, 3)
    assert store.values["0/0"] == own
    assert store.values["0/1"] == theirs
    assert parse_address(store.values["0/2"]) == (HOST, NOBODYS_PORT)
    assert len(store.values["0/2"]) == len(own)


def test_who_waits_for_calls_is_called_by_each_peer(sock):
    """With gloo's greeting, the number of the pair, and then the end."""
    server = sock.listener()
    server.settimeout(5)
    unblock_forming(Store(published(*server.getsockname()), None, None), 0, 3)
    greetings = []
    for _ in range(2):
        call, _ = server.accept()
        with call:
            call.settimeout(5)
            greetings.append(struct.unpack("<Q", call.recv(8))[0])
            assert call.recv(1) == b""
    assert greetings == [1, 2]


def test_connections_that_stand_already_are_cut(group):
    """Who reads from a rank that will never write is free."""
    store, ours, theirs, _ = group
    unblock_forming(store, 1, 3)
    assert [end.recv(1) for end in (*ours, *theirs)] == [b""] * 4


def test_a_listener_that_is_gone_is_no_error(sock):
    """The group may have ended meanwhile."""
    server = sock.listener()
    address = server.getsockname()
    server.close()
    unblock_forming(Store(published(*address), None), 0, 2)
