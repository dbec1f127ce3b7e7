"""Real engines for the tests here: clusters that are always shut down, kernels of their own, and a look for leaks.

Fixtures:
    four: a cluster of four engines that the tests of a module share. Whatever a test does to it must heal.
    cluster: starts a cluster; shut down when the test ends.
    alone: no cluster runs in this process when the test begins.
    kernel: starts another process with nbdist in it, driven from here.
    until, background, lose, pids: wait for a condition, call in a thread, kill an engine inside a collective, engines.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import zmq

import nbdist
from nbdist.processes import end_processes, processes_by_rundir
from nbdist.rundir import RunDir, runtime_root

HEALTHY_S = 6.0
"""Four times the time in which a killed engine's seat is filled again."""
SPARE_DESCRIPTORS = 4
"""A test may leave this many open: something that Python or a library opened once and keeps."""


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
    executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="test-background")
    yield executor.submit
    executor.shutdown(cancel_futures=True)


# ---- clusters


@dataclass
class Shared:
    """The cluster of four engines that a module's tests share; started anew where one broke it."""

    cluster: nbdist.Cluster | None = None

    def take(self):
        if self.cluster is not None and not self._is_whole():
            self.close()
        if self.cluster is None:
            self.cluster = nbdist.start(4)
        return self.cluster

    def close(self):
        if self.cluster is not None:
            self.cluster.shutdown()
        self.cluster = None

    def _is_whole(self):
        try:
            self.cluster.wait_healthy(timeout=15)
        except (nbdist.NbdistError, TimeoutError):
            return False
        return self.cluster.world_size == 4


@pytest.fixture(scope="module")
def shared():
    """Holds the module's shared cluster; leaks nothing when the module ends."""
    before = Traces.now()
    holder = Shared()
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


@pytest.fixture
def cluster(alone, leaks):  # noqa: ARG001 - shuts down before the look for leaks
    """`cluster(n, **settings)`: a cluster of the test's own, shut down at its end."""
    with contextlib.ExitStack() as stack:

        def start(num_engines, **settings):
            started = nbdist.start(num_engines, **settings)
            stack.callback(started.shutdown)
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
            shared_memory=frozenset(os.listdir("/dev/shm")),
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
    """What ipyparallel and zmq open once per process and keep is there before anything is counted."""
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


ALL_REDUCE = "dist.all_reduce(torch.ones(1))"


@pytest.fixture
def lose(background):
    """`lose(cluster, rank)`: kill ranks while the others wait for them in a collective."""

    def kill_while_others_wait(
        engines, *victims, collective=ALL_REDUCE, waiting=None, number=signal.SIGKILL
    ):
        others = [r for r in range(engines.world_size) if r not in victims]
        waiting = others if waiting is None else waiting
        found = {s.rank: s.pid for s in engines.status()}
        generation = engines.generation
        stay = f"rank in {set(victims)}"
        cell = background(
            engines.run, f"import time\nwhile {stay}:\n    time.sleep(0.01)\n{collective}"
        )
        wait_until(
            lambda: (
                sum("waits in" in s.activity for s in engines.status() if s.rank in waiting)
                == len(waiting)
            ),
            10,
            lambda: f"ranks {waiting} wait in a collective: {engines.status()}",
        )
        killed_at = time.monotonic()
        for victim in victims:
            os.kill(found[victim], number)
        with pytest.raises(nbdist.EngineDied) as caught:
            cell.result(20)
        return Loss(caught.value, time.monotonic() - killed_at, killed_at, generation)

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
import json, os, sys
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
names = {}
while True:
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        continue
    if not line:
        break
    kind, code = json.loads(line)
    try:
        answer = {"value": exec(code, names) if kind == "do" else eval(code, names)}
    except BaseException as error:
        answer = {"error": type(error).__name__ + ": " + str(error)}
    answers.write(json.dumps(answer) + "\\n")
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

    def _ask(self, kind, code):
        self.process.stdin.write(json.dumps([kind, code]) + "\n")
        self.process.stdin.flush()
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
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def kernel(leaks):  # noqa: ARG001 - ends before the look for leaks
    """`kernel(**environment)`: starts a process that runs what it is told, with a session of its own."""
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
