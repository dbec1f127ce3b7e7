"""The kernel's road to the supervisor, with a supervisor made up: real sockets, no processes."""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import zmq

from nbdist.config import ClusterConfig
from nbdist.errors import NbdistError, RecoveryFailed, TargetError, WrongState
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import wire
from nbdist.rundir import Owner, RunDir
from nbdist.session import link as module
from nbdist.session.link import MAX_REPLACEMENTS, Link

SOON_S = 3.0


class Process:
    """What the link thinks is the supervisor's."""

    pid = 7

    def __init__(self):
        self.code, self.was_killed = None, False

    def poll(self):
        return self.code

    def kill(self):
        self.code, self.was_killed = -9, True

    def wait(self, _timeout):
        return self.code


class Supervisor:
    """Its end of the road: what it heard, and what it says."""

    def __init__(self, rundir):
        _, _, keys = rundir.read()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey = keys.server_public.encode()
        self.socket.curve_secretkey = keys.server_secret.encode()
        self.socket.bind(rundir.endpoint)
        self.identity = b""

    def hear(self):
        """The next request that is no ping."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            if self.socket.poll(50):
                self.identity, data = self.socket.recv_multipart()
                request = wire.decode(data, od.Request)
                if not isinstance(request.order, od.Ping):
                    return request
        pytest.fail("the link says nothing")

    def say(self, message):
        data = message if isinstance(message, bytes) else wire.encode(message)
        self.socket.send_multipart([self.identity, data])

    def answer(self, request, body):
        self.say(od.Answer(number=request.number, body=body))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def rundir(monkeypatch):
    folder = tempfile.mkdtemp(prefix="nb-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield RunDir.create(ClusterConfig(num_engines=1), Owner.this())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started(monkeypatch):
    """The supervisors that the link started."""
    started = []

    def spawn(*_):
        started.append(Process())
        return started[-1]

    monkeypatch.setattr(module, "spawn", spawn)
    return started


@pytest.fixture
def heard():
    """Notices, and reasons for which all is lost."""
    return []


@pytest.fixture
def link(rundir, started, heard):
    link = Link(rundir, notice=heard.append, open_cells=lambda: ["open"], lost=heard.append)
    link.start()
    yield link
    for process in started:
        process.code = 0
    link.close()


@pytest.fixture
def supervisor(rundir, link):  # noqa: ARG001
    """A supervisor to which the link has said hello."""
    supervisor = Supervisor(rundir)
    assert supervisor.hear().order.open_cells == ("open",)
    yield supervisor
    supervisor.close()


@pytest.fixture
def background():
    """Calls in threads of their own."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def wait_for(condition):
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def order(code="f()", **more):
    return od.BeginCell(cell="c1", code=code, **more)


# ---- orders and answers


def test_an_order_is_answered(link, supervisor, background):
    """The answer is what comes back, whoever asked meanwhile."""
    asked = background(link.ask, order(), SOON_S)
    first = supervisor.hear()
    other = background(link.ask, od.Scale(size=2), SOON_S)
    second = supervisor.hear()
    assert (first.order, second.order) == (order(), od.Scale(size=2))
    supervisor.answer(second, od.Done(text="scaled"))
    supervisor.answer(first, od.Done(text="begun"))
    assert asked.result(SOON_S) == od.Done(text="begun")
    assert other.result(SOON_S) == od.Done(text="scaled")


def test_a_refusal_is_raised_as_the_error_that_it_names(link, supervisor, background):
    """With its message."""
    asked = background(link.ask, order(), SOON_S)
    supervisor.answer(supervisor.hear(), od.Refused(kind="TargetError", message="no rank 7"))
    with pytest.raises(TargetError, match="no rank 7"):
        asked.result(SOON_S)


def test_an_order_that_is_not_answered_in_time_says_which(link, supervisor):
    """And what comes later disturbs nobody."""
    with pytest.raises(TimeoutError, match=r"has not answered BeginCell within 0\.05 s"):
        link.ask(order(), 0.05)
    supervisor.answer(supervisor.hear(), od.Done())


@pytest.mark.parametrize(
    "impossible", [order("\ud800"), order(values={"x": object()})], ids=["no text", "no bytes"]
)
def test_an_order_that_cannot_be_encoded_is_refused(link, supervisor, background, impossible):
    """At once, with the reason; the next one goes its way."""
    with pytest.raises(NbdistError, match="BeginCell cannot be sent: "):
        link.ask(impossible, SOON_S)
    asked = background(link.ask, order("g()"), SOON_S)
    request = supervisor.hear()
    assert request.order.code == "g()"
    supervisor.answer(request, od.Done())
    asked.result(SOON_S)


@pytest.mark.parametrize(
    "impossible",
    [
        order("\ud800"),
        order(values={"x": object()}),
        od.Scale(size=2**70),
        order(ranks=(2**70,)),
    ],
    ids=["no text", "no bytes", "too large", "too large a rank"],
)
def test_nothing_that_cannot_be_encoded_ends_the_thread(rundir, heard, impossible):
    """Without it nobody is answered any more."""
    link = Link(rundir, notice=heard.append, open_cells=list, lost=heard.append)
    request, future = od.Request(number=5, order=impossible), Future()
    link._pending[5] = request, future
    try:
        link._send(None, request)  # in the thread
        refused = future.result(0)
    finally:
        link.close()
    assert refused.kind == "NbdistError"
    assert "cannot be sent: " in refused.message
    assert link._pending == {}


@pytest.mark.parametrize("text", ["\ud800", "f()"])
def test_what_awaits_no_answer_may_be_impossible_too(link, supervisor, text):
    """Nobody is told, and nothing is held up."""
    link.say(order(text))
    link.say(od.InterruptCell(cell="c1"))
    heard = [supervisor.hear().order for _ in range(1 if text == "\ud800" else 2)]
    assert heard[-1] == od.InterruptCell(cell="c1")


# ---- notices


def test_what_the_supervisor_says_by_itself_is_passed_on(link, supervisor, heard):  # noqa: ARG001
    """In order."""
    notices = [od.RanksReleased(generation=g, waiting={0: "barrier"}, reason="r") for g in (1, 2)]
    for notice in notices:
        supervisor.say(notice)
    wait_for(lambda: heard == notices)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\xff" * 20, bytes([wire.VERSION]), wire.encode(od.Ping())],
    ids=["nothing", "another version", "noise", "cut short", "not for kernels"],
)
def test_what_does_not_decode_is_passed_over(link, supervisor, background, heard, garbage):
    """The log names it, and the link goes on."""
    asked = background(link.ask, order(), SOON_S)
    request = supervisor.hear()
    supervisor.say(garbage)
    supervisor.answer(request, od.Done(text="well"))
    assert asked.result(SOON_S).text == "well"
    assert heard == []


# ---- supervisors come and go


def test_a_supervisor_that_takes_over_is_asked_again(link, rundir, supervisor, started, background):
    """What was not answered; but a signal is not sent twice."""
    asked = background(link.ask, order(), 2 * SOON_S)
    supervisor.hear()
    killing = background(link.ask, od.SignalEngines(slots=(0,), signal="KILL"), SOON_S)
    supervisor.hear()
    started[0].code = 1
    supervisor.close()
    successor = Supervisor(rundir)
    assert isinstance(successor.hear().order, od.Attach)
    again = successor.hear()
    assert again.order == order()
    successor.answer(again, od.Done(text="by another"))
    assert asked.result(SOON_S).text == "by another"
    with pytest.raises(WrongState, match="replaced during this order"):
        killing.result(SOON_S)
    assert len(started) == 2
    successor.close()


@pytest.mark.parametrize(
    ("given", "is_asked_again"),
    [
        (rn.BeginRun(name="t", steps=3), False),
        (rn.SteerRun(run="r1", action="step", steps=3), False),
        (rn.SteerRun(run="r1", action="pause"), True),
        (rn.SetRun(run="r1", lr=0.1), True),
        (rn.QueryRun(run="r1"), True),
    ],
)
def test_what_a_second_supervisor_would_do_twice_is_not_asked_again(
    link, rundir, supervisor, started, background, given, is_asked_again
):
    """A run would begin twice, and more steps be taken than were asked for."""
    asked = background(link.ask, given, 2 * SOON_S)
    supervisor.hear()
    started[0].code = 1
    supervisor.close()
    successor = Supervisor(rundir)
    assert isinstance(successor.hear().order, od.Attach)
    if is_asked_again:
        again = successor.hear()
        assert again.order == given
        successor.answer(again, od.Done(text="by another"))
        assert asked.result(SOON_S).text == "by another"
    else:
        with pytest.raises(WrongState, match="replaced during this order"):
            asked.result(SOON_S)
    successor.close()


def test_a_supervisor_that_answers_nothing_is_replaced(link, started, monkeypatch):  # noqa: ARG001
    """It is killed first."""
    monkeypatch.setattr(module, "SILENCE_LIMIT_S", 0.05)
    wait_for(lambda: len(started) > 1)
    assert started[0].was_killed


def test_supervisors_that_end_again_and_again_are_given_up(link, started, heard):
    """Whoever waits is told, and so is the cluster, with what to do."""
    for number in range(MAX_REPLACEMENTS + 1):
        wait_for(lambda number=number: len(started) == number + 1)
        started[-1].code = 1
    wait_for(lambda: heard == [module.LOST])
    with pytest.raises(RecoveryFailed, match="%dist_reset"):
        link.ask(order(), SOON_S)
    assert len(started) == MAX_REPLACEMENTS + 1


def test_a_supervisor_is_not_replaced_when_the_directory_is_gone(link, rundir, started, heard):
    """The cluster was ended by somebody else: who waits for an answer is told."""
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(link.ask, order(), SOON_S)
        rundir.remove()
        started[0].code = 1
        with pytest.raises(RecoveryFailed, match="%dist_reset"):
            asked.result(SOON_S)
    wait_for(lambda: heard == [module.LOST])
    assert len(started) == 1


# ---- the end


def test_a_closed_link_says_so(link, started):
    """To those who wait, and to those who ask later; closing twice is harmless."""
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(link.ask, order(), SOON_S)
        wait_for(lambda: link._pending)
        started[0].code = 0
        link.close()
        with pytest.raises(WrongState, match="shut down"):
            asked.result(SOON_S)
    link.close()
    with pytest.raises(WrongState, match="shut down"):
        link.ask(order(), SOON_S)
    link.say(order())
