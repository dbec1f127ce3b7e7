"""Training runs as the kernel drives them, on real engines, with the smallest trainer there can be:
each of its steps is one collective."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import nbdist

TRAINER = """
import asyncio, pickle, time
from nbdist.engine import runs as engine_runs

class Counter:
    is_replicated = has_twin = True
    leaves_by = 0

    def __init__(self):
        self.step, self.weight, self.lr, self.at = 0, torch.zeros(3), 0.1, time.monotonic()

    def attempt(self, port):
        for setting in port.settings:
            self.lr = setting["lr"]
        port.settings.clear()
        port.begin_step(self.step, patient=False)
        vote = torch.tensor([float(port.wants_hold)])
        try:
            dist.all_reduce(vote)
        except RuntimeError as error:
            if not port.broken(self.step, error):
                raise
            return
        now = time.monotonic()
        self.weight += self.lr
        port.committed((self.step, 1 / (1 + self.step), 12, now - self.at, port.generation,
                        port.world_size, self.lr, now))
        self.step, self.at = self.step + 1, now
        if vote.item() or self.step >= port.go_until:
            port.hold(self.step)

    async def drive(self, port):
        while not port.is_over:
            if port.go_until is None:
                await port.wait_async()
                continue
            if self.step == globals().get("fails_at"):
                raise ValueError(f"step {self.step} fails")
            self.attempt(port)
            await asyncio.sleep(0.005)
            port.poll()

    def steps(self, steps):
        port = engine_runs.present().enter(self, steps)
        try:
            while not port.is_over:
                if port.go_until is None:
                    port.wait()
                    continue
                yield self.step
                self.attempt(port)
                time.sleep(0.005)
                port.poll()
        finally:
            port.left(self.step)
        if port.fault is not None:
            raise port.fault

    def pack(self):
        return pickle.dumps((self.step, self.weight, self.lr))

    def unpack(self, data):
        self.step, self.weight, self.lr = pickle.loads(data)

    def digest(self):
        return f"{self.step} {self.weight.tolist()} {self.lr}"

    def parameter_digest(self):
        return str(self.weight.tolist())

    def owned(self):
        return [self.weight]

counter = Counter()
"""
LATE = """
import time
from nbdist.engine import runs

def make_late(its, by_s):
    '''Have this engine hear of a run's end later than it could.'''
    end, poll, late = its._end, its.poll, []

    def look():
        poll()
        while late and time.monotonic() > late[0][0]:
            end(late.pop(0)[1])

    its._end = lambda order: late.append((time.monotonic() + by_s, order))
    its.poll = look

if rank == 2:
    make_late(runs.present(), 0.5)
"""
RECOVERY_S = 6.0
"""Four times the time in which a killed engine's seat is filled again."""


@pytest.fixture
def trained(four):
    """Four engines with a trainer, on which no run goes on when the test ends."""
    four.run("fails_at = None")
    four.run(TRAINER)
    yield four
    for run in four.runs:
        if not run.is_over:
            run.stop()


def test_a_run_from_its_begin_to_its_end(trained):
    """It returns at once; its history has each step once; the replicas are equal."""
    begun = time.monotonic()
    run = trained.train("counter", steps=60)
    assert time.monotonic() - begun < 4
    assert run.wait(60) is run
    assert (run.state, run.num_committed, run.first_step, run.target) == ("finished", 60, 0, 60)
    history = run.history
    assert history["step"].tolist() == list(range(60))
    assert set(history["samples"]) == {12}
    assert set(history["world_size"]) == {4}
    assert np.allclose(history["lr"], 0.1)
    digests = trained.parameter_digest("counter")
    assert list(digests) == [0, 1, 2, 3]
    assert len(set(digests.values())) == 1
    with pytest.raises(nbdist.WrongState, match="finished"):
        run.pause()


def test_a_cell_that_overtakes_the_word_of_a_runs_end(cluster):
    """What the kernel has seen to be over is so in its next cell, on every rank."""
    engines = cluster(3)
    engines.run(TRAINER)
    engines.run(LATE)
    for number in range(3):
        run = engines.train("counter", steps=4).wait(60)
        assert run.state == "finished"
        engines.run(f"counter = Counter(); made = {number}")
        assert engines.run("made").values == dict.fromkeys(range(3), number)


def test_a_run_is_driven(trained):
    """Pause, steps, a new rate, go on, stop: each is so when it returns."""
    run = trained.train("counter", steps=100_000)
    run.pause()
    assert run.state == "paused"
    first = len(run.history["step"])
    run.set(lr=0.5)
    run.step(3)
    assert run.state == "paused"
    assert len(run.history["step"]) == first + 3
    assert run.history["lr"][-3:].tolist() == [0.5] * 3
    run.resume()
    assert run.state == "running"
    with pytest.raises(nbdist.WrongState, match="run trains"):
        trained.train("counter", steps=1)
    with pytest.raises(TimeoutError, match=r"counter: running, \d+ of 100000 steps"):
        run.wait(0.1)
    assert trained.status()[0].step >= first + 3
    run.stop()
    assert (run.state, run.wait(0)) == ("stopped", run)


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "^rank 0: no variable 'nothing'"), ("fails_at", "fails_at is a ")],
)
def test_what_holds_no_trainer_is_refused(trained, name, words):
    """With the rank, and the reason; nothing goes on then."""
    known = len(trained.runs)
    with pytest.raises(nbdist.NbdistError, match=words):
        trained.train(name, steps=3)
    assert len(trained.runs) == known


def test_a_run_that_raises_fails_with_the_engines_traceback(trained):
    """The user's line is in it, and the world is whole again afterwards."""
    trained.run("fails_at = 5")
    run = trained.train("counter", steps=20)
    with pytest.raises(nbdist.CellFailed, match="ValueError: step 5 fails") as caught:
        run.wait(60)
    ((_, error),) = caught.value.errors.items()
    assert any("step 5 fails" in line for line in error.traceback)
    assert run.state == "failed"
    trained.wait_healthy(timeout=20)


def test_a_run_outlives_a_rank(trained, pids, until):
    """No step is missing or told twice, and the incident is the run's."""
    run = trained.train("counter", steps=100_000)
    generation = trained.generation
    until(lambda: len(run.history["step"]) > 5, 60, lambda: str(run))
    os.kill(pids(trained)[1], signal.SIGKILL)
    trained.wait_healthy(timeout=4 * RECOVERY_S, after=generation)
    reached = len(run.history["step"])
    with pytest.raises(TimeoutError):
        run.wait(0.3)
    run.stop()
    history = run.history
    assert history["step"].tolist() == list(range(len(history["step"])))
    assert len(history["step"]) > reached
    assert set(history["generation"]) > {generation}
    assert run.incidents[0].kind == "lost"
    assert len(set(trained.parameter_digest("counter").values())) == 1


def test_an_interrupt_of_the_wait_detaches(trained, until):
    """The run goes on, and can be waited for again."""
    run = trained.train("counter", steps=200)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="the run goes on"):
            run.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert run.state == "running"
    run.wait(60)
    until(lambda: run.num_committed == 200 or run.refresh(), 60, "all steps are known")


def test_a_cell_that_trains_goes_on_when_a_rank_dies(trained, pids, background, until):
    """Rank 0 too: every rank has an outcome, that of the last engine on its slot."""
    code = (
        "for number in counter.steps(400):\n"
        "    pass\n"
        "print('done at', counter.step)\n"
        "(rank, counter.step, counter.parameter_digest())"
    )
    cell = background(trained.run, code)
    until(lambda: trained.runs and trained.runs[-1].spec.cell, 60, "the cell trains")
    generation = trained.generation
    run = trained.runs[-1]
    until(lambda: run.refresh() or run.num_committed > 20, 60, lambda: str(run))
    os.kill(pids(trained)[0], signal.SIGKILL)
    result = cell.result(60)
    assert trained.generation > generation
    assert {rank: value[:2] for rank, value in result.values.items()} == {
        rank: (rank, 400) for rank in range(4)
    }
    assert len({value[2] for value in result.values.values()}) == 1
    assert "was replaced" in result.outputs[0]
    assert all("done at 400\n" in text for text in result.outputs.values())
    assert (run.state, run.wait(60)) == ("finished", run)


def test_a_cell_that_trains_follows_the_size_of_the_world(cluster, background, until):
    """A slot that is added runs the cell too; one that is given back has no outcome but a note."""
    engines = cluster(2)
    engines.run(TRAINER)
    code = (
        "for number in counter.steps(100_000):\n"
        "    if world_size == 1:\n"
        "        break\n"
        "(rank, counter.step)"
    )
    cell = background(engines.run, code)
    until(lambda: engines.runs, 60, "the cell trains")
    engines.scale(3)
    assert engines.world_size == 3
    engines.scale(1)
    result = cell.result(60)
    assert result.values == {0: (0, len(engines.runs[-1].history["step"]))}
    assert [note.partition(" has no")[0] for note in result.notes] == [
        "rank 1 (slot 1)",
        "rank 2 (slot 2)",
    ]
    assert set(engines.runs[-1].history["world_size"]) == {2, 3}


def test_a_wait_outlives_the_supervisor(cluster, running, background, until):
    """Its successor takes the run up; nothing that was committed is lost."""
    engines = cluster(2)
    engines.run(TRAINER)
    run = engines.train("counter", steps=400)
    waiting = background(run.wait)
    until(lambda: run.refresh() or run.num_committed > 20, 60, lambda: str(run))
    (supervisor,) = running(engines.logs.parent, "nbdist.supervisor")
    os.kill(supervisor, signal.SIGKILL)
    assert waiting.result(60) is run
    assert run.history["step"].tolist() == list(range(400))


def test_a_cell_that_is_sent_meanwhile_runs_between_two_steps(trained):
    """On all ranks at the same one, with a collective in it; the run goes on."""
    run = trained.train("counter", steps=100_000)
    code = (
        "total = torch.tensor([counter.step])\ndist.all_reduce(total)\n(counter.step, total.item())"
    )
    values = trained.run(code).values
    (step, total) = values[0]
    assert values == dict.fromkeys(range(4), (step, total))
    assert total == 4 * step
    trained.push(pushed=step)
    assert trained.pull("pushed") == dict.fromkeys(range(4), step)
    assert len(set(trained.parameter_digest("counter").values())) == 1
    assert run.state == "running"


def test_the_history_outlives_the_cluster(cluster, background, until):
    """Whoever waits is told at once; what was committed can be read afterwards."""
    engines = cluster(2)
    engines.run(TRAINER)
    run = engines.train("counter", steps=100_000)
    until(lambda: run.refresh() or run.num_committed > 10, 60, lambda: str(run))
    waiting = background(run.wait)
    begun = time.monotonic()
    engines.shutdown()
    with pytest.raises(nbdist.WrongState, match="shut down before the run was over"):
        waiting.result(60)
    assert time.monotonic() - begun < 10
    assert run.state == "stopped"
    steps = run.history["step"].tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) > 10
