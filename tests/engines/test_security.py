"""Who can reach a cluster: nobody beyond this host, and on it nobody without the key."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import time

import psutil
import pytest
import zmq

from nbdist.processes import processes_by_rundir
from nbdist.protocol import orders as od
from nbdist.protocol import wire

SUM = "t = torch.ones(1); dist.all_reduce(t); int(t)"
SILENCE_S = 1.0
"""So long an outsider waits for an answer that must not come."""


@pytest.fixture
def outsider(four):
    """`outsider(identity, key_pair)`: a socket connected to the supervisor; without keys it speaks
    plain ZMQ."""
    context = zmq.Context()

    def connect(identity, key_pair=None):
        dealer = context.socket(zmq.DEALER)
        dealer.identity, dealer.linger = identity, 0
        dealer.rcvtimeo = dealer.sndtimeo = int(SILENCE_S * 1000)
        if key_pair is not None:
            dealer.curve_publickey, dealer.curve_secretkey = key_pair
            dealer.curve_serverkey = keys(four)["server_public"].encode()
        dealer.connect(f"ipc://{four._rundir.path / 'orders'}")
        return dealer

    yield connect
    context.destroy(linger=0)


def keys(engines):
    return json.loads((engines._rundir.path / "cluster.json").read_text())["keys"]


def right_keys(engines):
    found = keys(engines)
    return found["client_public"].encode(), found["client_secret"].encode()


def request(order):
    return wire.encode(od.Request(number=1, order=order))


def check_unharmed(engines, supervisor, generation):
    """The same supervisor, the same group, and cells run."""
    assert engines._link._supervisor.pid == supervisor
    assert engines._link._supervisor.poll() is None
    assert engines.run(SUM, once=True).values == dict.fromkeys(range(4), 4)
    assert engines.generation == generation
    assert len(engines.status()) == 4


def test_listening_sockets(four):
    """Every socket on which a process of the cluster listens is bound to loopback."""
    four.run("sub = dist.new_group([0, 1, 2, 3]); dist.barrier(sub)", once=True)
    listening = [
        (process.pid, c.laddr)
        for process in processes_by_rundir()[four._rundir.path]
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)
    ]
    assert len(listening) > 8
    assert [found for found in listening if found[1].ip != "127.0.0.1"] == []


def test_files_are_private(four):
    """Nobody else may enter the run directory, and every file in it, keys and logs above all, is
    its owner's alone."""
    path = four._rundir.path
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for name in ("cluster.json", "surroundings.json"):
        assert stat.S_IMODE((path / name).stat().st_mode) == 0o600
    connection_files = sorted((path / "ipp" / "security").glob("*.json"))
    assert len(connection_files) == 2
    for file in connection_files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((path / "logs").stat().st_mode) == 0o700


def test_keys_are_not_on_command_lines(four):
    """No key is where other users could read it: on a command line."""
    secret = {v for k, v in keys(four).items() if "secret" in k}
    for process in processes_by_rundir()[four._rundir.path]:
        assert not [word for word in process.cmdline() if word in secret]


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "wrong-key"])
@pytest.mark.parametrize("order", [od.Shutdown(), od.QueryView()], ids=["shutdown", "query"])
def test_outsider(four, outsider, keyed, order):
    """Without the client's key an order gets no answer and changes nothing, whatever name the
    outsider takes."""
    supervisor, generation = four._link._supervisor.pid, four.generation
    for identity in (b"kernel-1", f"kernel-{os.getpid()}".encode()):
        dealer = outsider(identity, zmq.curve_keypair() if keyed else None)
        with contextlib.suppress(zmq.Again):  # it is turned away before it can send
            dealer.send(request(order))
        with pytest.raises(zmq.Again):
            dealer.recv()
    check_unharmed(four, supervisor, generation)


def test_insider(four, outsider):
    """The control of the test above: with the right key the same order is answered."""
    dealer = outsider(b"kernel-insider", right_keys(four))
    dealer.send(request(od.QueryView()))
    answer = wire.decode(dealer.recv(), od.Notice)
    assert len(answer.body.seats) == 4


def test_garbage(four, outsider, until):
    """Bytes that are no message do no harm, even from one who has the key: they are logged, the
    supervisor lives."""
    supervisor, generation = four._link._supervisor.pid, four.generation
    good = request(od.BeginCell(cell="c", code="1 / 0"))
    garbage = [
        b"", b"\x00", b"\x01", bytes([wire.VERSION]), secrets.token_bytes(4096), b"\xff" * 100_000,
        good[:-1], good[:7], b"\x09" + good[1:], good.replace(b"BeginCell", b"EndOfTime"),
        good.replace(b"BeginCell", b"Shutdown\x00"), json.dumps({"order": "Shutdown"}).encode(),
        bytes([wire.VERSION]) + b"\x81\xa4type\xa4Beat",
    ]  # fmt: skip
    names = ["kernel-2", "slot-0-1", "slot-77-1", "nobody"]
    senders = [outsider(name.encode(), right_keys(four)) for name in names]
    for sender in senders:
        sender.send_multipart([b"", good, b"more"])
        sender.send_multipart([b"a", b"b"])
        for message in garbage:
            sender.send(message)
    log = four.logs / "supervisor.log"
    until(lambda: all(name in log.read_text() for name in names), 60, log.read_text)
    check_unharmed(four, supervisor, generation)
    assert "ZeroDivisionError" not in log.read_text()


def test_plain_bytes_on_tcp(four):
    """Plain bytes on any of the cluster's TCP sockets do no harm: not to the hub, the store, or a
    group's listener."""
    supervisor, generation = four._link._supervisor.pid, four.generation
    ports = {
        c.laddr.port
        for process in processes_by_rundir()[four._rundir.path]
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    for port in ports:
        for data in (b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(1000), b""):
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(data)
    time.sleep(0.2)  # for what must not happen
    check_unharmed(four, supervisor, generation)
    four.kill(1)
    four.wait_healthy(after=generation)


def test_outsider_at_the_hub(four):
    """ipyparallel's own sockets are closed to who has not their key: no registration, no answer."""
    info = json.loads(
        (four._rundir.path / "ipp" / "security" / "ipcontroller-engine.json").read_text()
    )
    context = zmq.Context()
    try:
        for port in {v for k, v in info.items() if isinstance(v, int)}:
            dealer = context.socket(zmq.DEALER)
            dealer.rcvtimeo, dealer.linger = 300, 0
            dealer.connect(f"{info['interface']}:{port}")
            dealer.send_multipart([b"registration_request"] * 5)
            with pytest.raises(zmq.Again):
                dealer.recv_multipart()
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", secrets.token_bytes(500)],
    ids=["nothing", "http", "frame", "random"],
)
def test_bytes_to_the_zygote(four, running, data):
    """What a stray connection says to the zygote does no harm to it or its cluster."""
    supervisor, generation = four._link._supervisor.pid, four.generation
    zygote = running(four._rundir.path, "nbdist.supervisor.zygote")[0]
    with socket.socket(socket.AF_UNIX) as stray:
        stray.connect(str(four._rundir.path / "zygote"))
        stray.sendall(data)
        time.sleep(0.2)  # for what must not happen
    check_unharmed(four, supervisor, generation)
    four.kill(2)
    four.wait_healthy(after=generation)
    assert running(four._rundir.path, "nbdist.supervisor.zygote")[0] == zygote
    assert len(running(four._rundir.path, "nbdist.supervisor.zygote")) == 6
