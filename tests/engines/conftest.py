"""Real engines: clusters that are always shut down, kernels of their own, and a look for leaks.

Fixtures:
    four: four engines that the tests of a module share. Whatever a test does to them must heal.
    cluster: starts a cluster; shut down when the test ends.
    alone: no cluster runs in this process when the test begins.
    kernel: starts another process with nbdist in it, driven from here.
    until, background, lose, heal: wait for a condition, call in a thread, kill an engine inside a
        collective, wait until its seat is filled again.
    pids, running: processes of a cluster, by rank and by module.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq

import nbdist
from nbdist.processes import end_processes, processes_by_rundir
from nbdist.rundir import RunDir, runtime_root
from nbdist.session import start as of_kernel

HEALTHY_S = 6.0
"""Four times the time in which a killed engine's seat is filled again."""
SHUTDOWN_S = 6.0
"""A good deal more than the shutdown of a few engines takes."""
SPARE_DESCRIPTORS = 4
"""A test may leave this many open: something that Python or a library opened once and keeps."""


if TYPE_CHECKING:
    from collections.abc import Callable

# ---- waiting


def wait_until(condition, within, what):
    """Poll until the condition is true and return its value; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within:g} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return value


@pytest.fixture
def until():
    """`until(condition, within, what)`: poll, with a deadline."""
    return wait_until


@pytest.fixture
def background():
    """`background(function, *args)`: call it in a thread of its own; a future."""
    threads = []

    def begin(function, *args, **kwargs):
        future = Future()

        def run():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)

        threads.append(threading.Thread(target=run, name="test-background", daemon=True))
        threads[-1].start()
        return future

    yield begin
    deadline = time.monotonic() + 10
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))  # one that goes on is found as a leak


# ---- clusters


def shut_down(engines):
    """End a cluster, as fast as a user may expect it."""
    begun = time.monotonic()
    engines.shutdown()
    seconds = time.monotonic() - begun
    assert seconds < SHUTDOWN_S, f"shutting down took {seconds:.1f} s"


@dataclass
class Shared:
    """The cluster of four engines that a module's tests share; started anew where one broke it."""

    start: Callable[[], nbdist.Cluster]
    cluster: nbdist.Cluster | None = None

    def take(self):
        if self.cluster is not None and not self._is_whole():
            self.close()
        if self.cluster is None:
            self.cluster = self.start()
        return self.cluster

    def close(self):
        if self.cluster is not None:
            shut_down(self.cluster)
        self.cluster = None

    def _is_whole(self):
        try:
            self.cluster.wait_healthy(timeout=15)
            self.cluster.run("pass", once=True, timeout=5)
        except (nbdist.NbdistError, TimeoutError):
            return False
        return self.cluster.world_size == 4


@pytest.fixture(scope="module")
def start_shared():
    """Starts the cluster that a module's tests share; a module may do it in its own way."""
    return lambda: nbdist.start(4)


@pytest.fixture(scope="module")
def shared(start_shared):
    """Holds the module's shared cluster; leaks nothing when the module ends."""
    before = Traces.now()
    holder = Shared(start_shared)
    yield holder
    holder.close()
    before.compare("the module's shared cluster")


@pytest.fixture
def four(shared, leaks):  # noqa: ARG001 - the look at what was there before comes after the start
    """Four engines, healthy, shared by the tests of a module; healthy again when the test ends."""
    engines = shared.take()
    yield engines
    engines.wait_healthy(timeout=15)
    assert engines.world_size == 4


@pytest.fixture
def alone(shared):
    """No cluster runs in this process when the test begins: there is one in a kernel."""
    shared.close()
    if of_kernel._current is not None:  # of a test that failed
        of_kernel._current.shutdown()


@pytest.fixture
def cluster(alone, leaks):  # noqa: ARG001 - shuts down before the look for leaks
    """`cluster(n, **settings)`: a cluster of the test's own, shut down at its end."""
    with contextlib.ExitStack() as stack:

        def start(num_engines, **settings):
            started = nbdist.start(num_engines, **settings)
            stack.callback(shut_down, started)
            return started

        yield start


# ---- leaks


@dataclass(frozen=True)
class Traces:
    """What this process and its clusters have open at one moment."""

    clusters: frozenset[Path]
    """Run directories that are there or have processes."""
    children: frozenset[int]
    threads: frozenset[threading.Thread]
    sockets: int
    descriptors: int
    shared_memory: frozenset[str]

    @classmethod
    def now(cls):
        this = psutil.Process()
        return cls(
            clusters=frozenset({*processes_by_rundir(), *runtime_root().iterdir()}),
            children=frozenset(child.pid for child in this.children()),
            threads=frozenset(threading.enumerate()),
            sockets=len(this.net_connections("all")),
            descriptors=this.num_fds(),
            shared_memory=frozenset(path.name for path in Path("/dev/shm").iterdir()),
        )

    def left(self):
        """What is there now and was not there then, in words."""
        now, found = Traces.now(), []
        for path in sorted(now.clusters - self.clusters):
            processes = [_words(p) for p in processes_by_rundir().get(path, [])]
            found.append(f"cluster {path.name}, its processes: {processes}")
        if not found:  # the supervisor of a cluster is a child, and may have been replaced
            of_clusters = {p.pid for ps in processes_by_rundir().values() for p in ps}
            children = now.children - self.children - of_clusters
            found += [f"child {_words(psutil.Process(pid))}" for pid in children]
        found += [f"thread {t.name} ({type(t).__name__})" for t in now.threads - self.threads]
        for what in ("sockets", "descriptors"):
            before, after = getattr(self, what), getattr(now, what)
            if after > before + SPARE_DESCRIPTORS:
                found.append(f"{after} {what} open, {before} before")
        shared_memory = now.shared_memory - self.shared_memory
        found += [f"/dev/shm/{name}" for name in shared_memory if _is_orphan(name)]
        return found

    def compare(self, whose):
        """Fail if something of ours is left, and end it, so that it spoils no other test."""
        deadline = time.monotonic() + 5
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for path in Traces.now().clusters - self.clusters:
            end_processes(path, timeout_s=5)
            RunDir(path).remove()
        assert not left, f"left over by {whose}: " + "; ".join(left)


@pytest.fixture(autouse=True)
def leaks(request, shared):
    """No test leaves a process, thread, socket, descriptor, folder or shared memory behind."""
    if "four" in request.fixturenames:
        shared.take()
    elif {"alone", "kernel"} & {*request.fixturenames}:
        shared.close()
    before = Traces.now()
    yield
    before.compare(request.node.name)


@pytest.fixture(scope="session", autouse=True)
def opened_once():
    """What ipyparallel and zmq open once and keep is there before anything is counted."""
    import ipyparallel  # noqa: F401, PLC0415 - it is this late that it may be loaded

    zmq.Context.instance().socket(zmq.DEALER).close()


def _words(process):
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended just now)"


def _is_orphan(name):
    """Whether no process that lives maps a piece of shared memory, nor has it open."""
    path = f"/dev/shm/{name}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return False
            if any(file.path == path for file in process.open_files()):
                return False
    return Path(path).exists()


# ---- engines and their deaths


def module_of(process):
    """The module that one of a cluster's processes runs, forked children too: `python -m MODULE
    …`."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else ""


@pytest.fixture
def running():
    """`running(path, module)`: pids of a cluster's processes that run one module, parents before
    their children."""

    def find(path, module):
        found = [p for p in processes_by_rundir().get(path, []) if module_of(p) == module]
        by_age = {p.pid: p for p in sorted(found, key=lambda p: p.create_time())}
        return sorted(by_age, key=lambda pid: by_age[pid].ppid() in by_age)

    return find


@pytest.fixture
def pids():
    """`pids(cluster)`: rank -> pid."""
    return lambda engines: {s.rank: s.pid for s in engines.status() if s.rank is not None}


@dataclass(frozen=True)
class Loss:
    """A kill inside a collective, and what the cell made of it."""

    error: nbdist.EngineDied
    cell_ended_s: float
    """From the signal to the end of the cell."""
    killed_at: float
    generation: int
    """Before the kill."""
    world_size: int
    """Before the kill."""


ALL_REDUCE = "dist.all_reduce(torch.ones(1))"


@pytest.fixture
def lose(background):
    """`lose(cluster, rank)`: kill ranks while the others wait for them in a collective."""

    def kill_while_others_wait(
        engines,
        *victims,
        collective=ALL_REDUCE,
        waiting=None,
        number=signal.SIGKILL,
        is_settled=lambda seat: "waits in" in seat.activity,
    ):
        others = [r for r in range(engines.world_size) if r not in victims]
        waiting = others if waiting is None else waiting
        found = {s.rank: s.pid for s in engines.status()}
        generation, size = engines.generation, engines.world_size
        stay = f"rank in {set(victims)}"
        cell = background(
            engines.run,
            "import time\n_begun = time.monotonic()\n"
            f"while {stay} and time.monotonic() < _begun + 15:\n    time.sleep(0.01)\n{collective}",
        )
        wait_until(
            lambda: {s.rank for s in engines.status() if is_settled(s)} >= {*waiting},
            5,
            lambda: f"ranks {waiting} wait in a collective: {engines.status()}",
        )
        killed_at = time.monotonic()
        for victim in victims:
            os.kill(found[victim], number)
        with pytest.raises(nbdist.EngineDied) as caught:
            cell.result(60)
        return Loss(caught.value, time.monotonic() - killed_at, killed_at, generation, size)

    return kill_while_others_wait


@pytest.fixture
def heal():
    """`heal(cluster, loss)`: wait until the lost seats are filled again, as fast as is promised."""

    def wait(engines, loss):
        engines.wait_healthy(after=loss.generation, timeout=20)
        seconds = time.monotonic() - loss.killed_at
        assert seconds <= HEALTHY_S, f"healthy {seconds:.2f} s after the kill"

    return wait


# ---- other kernels

DRIVER = """
import json, os, signal, sys
answers = os.dup(1)
os.dup2(2, 1)
names, is_busy = {}, False
def say(**answer):
    os.write(answers, (json.dumps(answer) + "\\n").encode())
def interrupted(*_):
    if is_busy:
        raise KeyboardInterrupt
    say(value="interrupted")
signal.signal(signal.SIGINT, interrupted)
for line in sys.stdin:
    kind, code = json.loads(line)
    is_busy = True
    try:
        answer = {"value": exec(code, names) if kind == "do" else eval(code, names)}
    except BaseException as error:
        answer = {"error": type(error).__name__ + ": " + str(error)}
    is_busy = False
    say(**answer)
"""


@dataclass
class Kernel:
    """A process of its own, with a process group of its own, that does what it is told."""

    process: subprocess.Popen[str]
    folders: set[Path] = field(default_factory=set)
    """Of the clusters that it started."""

    @property
    def pid(self):
        return self.process.pid

    def do(self, code):
        """Execute statements."""
        return self._ask("do", code)

    def ask(self, expression):
        """The value of an expression, through JSON."""
        return self._ask("ask", expression)

    def start(self, num_engines, **settings):
        """Start a cluster named `c`; its run directory."""
        arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
        self.do(f"import nbdist; c = nbdist.start({num_engines}{arguments})")
        path = runtime_root() / self.ask("c.id")
        self.folders.add(path)
        return path

    def interrupt(self):
        """Interrupt its process group while it does nothing, as a notebook's Stop does."""
        os.killpg(self.pid, signal.SIGINT)
        assert self._answer("an interrupt") == "interrupted"

    def _ask(self, kind, code):
        self.begin(kind, code)
        return self._answer(code)

    def begin(self, kind, code):
        """Like `do` or `ask`, without waiting."""
        self.process.stdin.write(json.dumps([kind, code]) + "\n")
        self.process.stdin.flush()

    def _answer(self, code):
        line = self.process.stdout.readline()
        assert line, f"the kernel ended while it ran {code!r}"
        answer = json.loads(line)
        assert "error" not in answer, f"{code!r} in the kernel: {answer['error']}"
        return answer["value"]

    def end(self):
        """Let it end as a program ends, or kill it where it does not."""
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def kernel(leaks):  # noqa: ARG001 - ends before the look for leaks
    """`kernel(**environment)`: starts a process that runs what it is told, with a session of its
    own."""
    started = []

    def start(**environment):
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        started.append(Kernel(process))
        return started[-1]

    yield start
    for one in started:
        one.end()
