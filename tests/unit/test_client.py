"""The ipyparallel client, as far as we use it, with ipyparallel's part made up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import ipyparallel as ipp
import pytest

from nbdist.errors import CellFailed, RecoveryFailed, WrongState
from nbdist.protocol.calls import PULL
from nbdist.session import client as module
from nbdist.session.client import EngineClient

ENGINES = {0: 10, 2: 12}
"""Rank -> engine."""


class Answers:
    """What a call on several engines gives, after so many looks."""

    def __init__(self, outcome, looks=0):
        self.outcome, self.looks = outcome, looks

    def wait(self, seconds):
        assert 0 < seconds < 1
        self.looks -= 1
        return self.looks < 0

    def get(self, timeout):
        assert timeout == 0
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def ipyparallel():
    """Its client: what it knows, what was sent, and what is answered."""
    fake = SimpleNamespace(
        _engines={10: "uuid-10", 12: "uuid-12"}, _mux_stream="the stream", sent=[], answers=None
    )

    def direct_view(engines):
        def apply_async(function, *args, **kwargs):
            fake.sent.append((engines, view._socket, function.name, args, kwargs))
            return fake.answers

        view = SimpleNamespace(apply_async=apply_async, _socket="a bare socket")
        return view

    def send_execute_request(socket, code, **options):
        fake.sent.append((socket, code, options))
        return "a future"

    fake.direct_view, fake.send_execute_request = direct_view, send_execute_request
    fake.close = lambda **options: fake.sent.append(options)
    return fake


@pytest.fixture
def client(ipyparallel):
    client = EngineClient(Path("/nowhere"))
    client._client = ipyparallel
    return client


def unchecked():
    """Nothing is wrong."""


# ---- execute


def test_code_is_sent_on_the_stream(client, ipyparallel):
    """To the engine's own identity, with our metadata; the hook comes before the sending."""
    assert client.execute(12, "f()", {"nbdist": {"cell": "c1"}}, print) == "a future"
    ((socket, code, options),) = ipyparallel.sent
    assert (socket, code) == ("the stream", "f()")
    assert options == {
        "silent": False,
        "metadata": {"nbdist": {"cell": "c1"}},
        "ident": b"uuid-12",
        "message_future_hook": print,
    }


def test_nothing_is_sent_to_an_engine_that_is_gone(client, ipyparallel):
    """The caller is told by None."""
    assert client.execute(99, "f()", {}, print) is None
    assert ipyparallel.sent == []


# ---- waiting for ipyparallel's notice


def never():
    return False


def test_an_engine_that_is_known_is_not_waited_for(client):
    """Nothing is asked."""
    assert client.wait_known(10, lambda: pytest.fail("asked"))


def test_an_engine_is_waited_for_until_ipyparallel_knows_it(client, ipyparallel):
    """The supervisor's notice may be the faster one."""
    timer = threading.Timer(0.05, lambda: ipyparallel._engines.update({99: "uuid-99"}))
    timer.start()
    assert client.wait_known(99, never)
    timer.join()


def test_nobody_waits_for_an_engine_that_is_gone(client):
    """As soon as it is known to be."""
    answers = iter([False, False, True])
    assert not client.wait_known(99, lambda: next(answers))


def test_the_wait_for_a_notice_is_bounded(client, monkeypatch):
    """ipyparallel may have lost it."""
    monkeypatch.setattr(module, "REGISTERED_LIMIT_S", 0.05)
    began = time.monotonic()
    assert not client.wait_known(99, never)
    assert 0.05 <= time.monotonic() - began < 2


# ---- calls


def test_a_call_gives_what_each_engine_did(client, ipyparallel):
    """By rank; on the stream, by the function's name."""
    ipyparallel.answers = Answers(["a", "b"], looks=2)
    assert client.call(ENGINES, PULL, "x", check=unchecked, as_numpy=True) == {0: "a", 2: "b"}
    assert ipyparallel.sent == [([10, 12], "the stream", PULL, ("x",), {"as_numpy": True})]


def test_the_caller_is_asked_whether_waiting_is_of_use(client, ipyparallel):
    """An engine that died meanwhile ends the wait with what the caller raises."""
    ipyparallel.answers = Answers(["a", "b"], looks=10**9)
    looks = iter([None, None, RecoveryFailed("all is gone")])

    def check():
        if error := next(looks):
            raise error

    with pytest.raises(RecoveryFailed, match="all is gone"):
        client.call(ENGINES, PULL, "x", check=check)


def test_a_call_on_an_engine_that_ipyparallel_does_not_know_is_refused(
    client, ipyparallel, monkeypatch
):
    """Nothing is sent to anybody."""
    monkeypatch.setattr(module, "REGISTERED_LIMIT_S", 0.0)
    with pytest.raises(WrongState, match=r"engine of rank 5 is gone.*%dist_status"):
        client.call(ENGINES | {5: 99}, PULL, "x", check=unchecked)
    assert ipyparallel.sent == []


def test_errors_of_a_call_name_their_ranks(client, ipyparallel):
    """In rank order, whoever answered first; the first one's text is the headline."""
    errors = [
        ("NameError", "name 'x' is not defined", "", {"engine_id": 12}),
        ("KeyError", "'x'", "", {"engine_id": 10}),
    ]
    ipyparallel.answers = Answers(ipp.error.CompositeError("one or more", errors))
    with pytest.raises(CellFailed, match="name 'x' is not defined") as caught:
        client.call(ENGINES, PULL, "x", check=unchecked)
    found = caught.value.errors
    assert [(rank, error.ename) for rank, error in found.items()] == [
        (0, "KeyError"),
        (2, "NameError"),
    ]
    assert caught.value.__cause__ is None


# ---- the end


def test_a_client_is_closed_once(client, ipyparallel):
    """And one that was never connected has nothing to close."""
    client.close()
    client.close()
    assert ipyparallel.sent == [{"linger": 0}]
    EngineClient(Path("/nowhere")).close()
