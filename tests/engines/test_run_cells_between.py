"""Cells while a training run goes on, what users do wrong in a run, and how it is driven."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import numpy as np
import pytest
import training

import nbdist

MANY = 1_000_000
FREE_S = 4 * 1.0
"""Four times the time in which the others are free when one rank's code has raised."""


@pytest.fixture(scope="module")
def start_shared():
    """A short hang timeout, so that a cell can outlast it."""
    return lambda: nbdist.start(4, hang_timeout_s=3.0)


@pytest.fixture
def trained(four):
    """Four engines with a trainer; no run goes on when the test ends."""
    four.run(training.CELL)
    yield four
    for run in four.runs:
        if not run.is_over:
            run.stop()


@pytest.fixture
def goes_on(until):
    """`goes_on(run)`: steps are committed from now on."""

    def check(run):
        mark = len(run.history["step"]) + 3
        until(lambda: len(run.history["step"]) >= mark, 60, lambda: f"{run} goes on")
        assert run.state == "running"

    return check


def same(engines, code):
    """What an expression is on every rank, since it is the same on all."""
    found = engines.run(code, once=True).values
    assert list(found) == list(range(engines.world_size))
    assert all(value == found[0] for value in found.values()), found
    return found[0]


def test_fifty_cells_between_steps(trained, goes_on):
    """Each runs on all ranks between the same two steps, with a collective in it, and says so; a
    push, a pull and a digest likewise (F37, R25)."""
    run = trained.train("trainer", steps=MANY)
    goes_on(run)
    code = (
        "total = torch.tensor([trainer.step])\ndist.all_reduce(total)\n(trainer.step, int(total))"
    )
    steps = []
    for _ in range(50):
        result = trained.run(code)
        step = result.values[0][0]
        assert result.values == dict.fromkeys(range(4), (step, 4 * step))
        assert result.notes == (f"ran between steps {step - 1} and {step}",)
        steps.append(step)
    assert steps == sorted(steps)
    trained.push(pushed=steps)
    assert trained.pull("pushed") == dict.fromkeys(range(4), steps)
    training.check_replicas(trained)
    assert trained.run("dist.barrier()").notes  # as %sync
    goes_on(run)
    training.check_steps(run)


@pytest.mark.parametrize(
    ("code", "ranks"),
    [
        ("1 / 0 if rank == 2 else dist.all_reduce(torch.ones(1))", {2}),
        ("1 / 0", {0, 1, 2, 3}),
        ("import os\nif rank == 3: os.kill(os.getpid(), 9)\ndist.barrier()", {3}),
    ],
)
def test_a_cell_fails_in_mid_run(trained, goes_on, code, ranks):
    """On one rank, on all, or with the rank itself: the run goes on, and loses nothing (R24)."""
    run = trained.train("trainer", steps=MANY)
    goes_on(run)
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed) as caught:
        trained.run(code)
    assert time.monotonic() - begun < FREE_S
    assert set(caught.value.errors) == ranks
    goes_on(run)
    trained.wait_healthy(timeout=20)
    run.stop()
    training.check_steps(run)
    training.check_samples(trained, len(run.history["step"]))
    training.check_replicas(trained)


@pytest.mark.parametrize(
    "code",
    [
        "trainer = make()",
        "del trainer",
        "trainer = None",
        "for step in trainer.steps(3): pass",
        "trainer.fit(3)",
    ],
)
def test_what_trains_is_neither_remade_nor_stepped(trained, goes_on, code):
    """WrongState on every rank, and the run goes on with its trainer under its name."""
    run = trained.train("trainer", steps=MANY)
    with pytest.raises(nbdist.CellFailed, match="WrongState") as caught:
        trained.run(code)
    assert set(caught.value.errors) == set(range(4))
    goes_on(run)
    with pytest.raises(nbdist.NbdistError, match="keeps its name"):
        trained.push(trainer=3)
    assert same(trained, "trainer.step") > 0
    run.stop()
    trained.run("trainer = make()")
    assert same(trained, "trainer.step") == 0


def test_a_long_cell_holds_the_run(trained, goes_on):
    """No rank is taken for hung while a cell keeps the run waiting."""
    run = trained.train("trainer", steps=MANY)
    goes_on(run)
    known = len(run.incidents)
    wait_s = trained.config.hang_timeout_s + 2
    trained.run(f"import time\nif rank == 1: time.sleep({wait_s})")
    assert len(run.incidents) == known
    goes_on(run)


def test_a_run_is_driven(trained):
    """pause, set, step, resume and stop are so when they return; a rate is the scheduler's base;
    one run follows the other, and each can be awaited."""
    trained.run("trainer = make(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5))")
    run = trained.train("trainer", steps=MANY)
    run.pause()
    assert run.state == "paused"
    first = len(run.history["step"])
    run.set(lr=0.8)
    run.step(3)
    assert run.state == "paused"
    rates = [0.8 * 0.5 ** (n // 4) for n in range(first, first + 3)]
    np.testing.assert_allclose(run.history["lr"][first:], rates)
    run.resume()
    assert run.state == "running"
    run.stop()
    assert (run.state, run.wait(0)) == ("stopped", run)
    done = len(run.history["step"])
    following = trained.train("trainer", steps=5).wait(60)
    assert following.history["step"].tolist() == list(range(done, done + 5))

    async def await_one():
        return await trained.train("trainer", steps=5)

    assert asyncio.run(await_one()).history["step"][-1] == done + 9


PLACES = {
    "data": "Data.__getitem__",
    "loss": "loss",
    "optimizer": "torch.optim.SGD.step",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["rank == 2", "True"])
def test_the_users_code_raises_in_a_run(trained, place, where):
    """The run fails with the rank and the user's own lines; the others are free within a second,
    all hold the same step, and a new run goes on from there (T24, R24, F14)."""
    code = f"""
fails, usual = True, {PLACES[place]}
def faulty(*args, **kwargs):
    if fails and trainer.step == 6 and ({where}):
        raise OSError("no more")
    return usual(*args, **kwargs)
class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        return faulty(self)
class Holes(Data):
    __getitem__ = faulty
"""
    code += {
        "data": "trainer = make(data=Holes())",
        "loss": "trainer = make(loss=faulty)",
        "optimizer": "trainer = make(optimizer=lambda named: Faulty(named, lr=0.1))",
    }[place]
    trained.run(code)
    run = trained.train("trainer", steps=20)
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed, match=r"OSError: no more \(rank \d\)") as caught:
        run.wait(60)
    step = same(trained, "(trainer.step, trainer.digest())")[0]
    assert time.monotonic() - begun < FREE_S
    ((rank, error),) = caught.value.errors.items()
    assert rank == 2 or where == "True"
    text = "\n".join(error.traceback)
    assert 'raise OSError("no more")' in text
    assert f"nbdist{os.sep}train" not in text
    assert run.state == "failed"
    assert step in (6, 7)
    trained.run("fails = False")
    assert trained.train("trainer", steps=10).wait(60).history["step"].tolist()[0] == step
    training.check_replicas(trained)


def test_two_at_once_when_a_cell_begins(trained, goes_on, background, pids):
    """Ranks die while the run is brought to a stand for a cell: it fails or runs, the run goes on
    (R2, R3)."""
    run = trained.train("trainer", steps=MANY)
    goes_on(run)
    found, generation = pids(trained), trained.generation
    cell = background(trained.run, "dist.barrier()")
    for rank in (0, 3):
        os.kill(found[rank], signal.SIGKILL)
    with contextlib.suppress(nbdist.CellFailed):
        cell.result(60)
    trained.wait_healthy(timeout=20, after=generation)
    goes_on(run)
    run.stop()
    training.check_samples(trained, len(run.history["step"]))


def test_a_subgroup_before_its_first_use(trained, goes_on, pids):
    """A group of the user's own that is first used after a death in mid-run raises at once, and
    does not hang (R6, T17)."""
    run = trained.train("trainer", steps=MANY)
    goes_on(run)
    trained.run("mine = dist.new_group([0, 1])", once=True)
    generation = trained.generation
    os.kill(pids(trained)[1], signal.SIGKILL)
    trained.wait_healthy(timeout=20, after=generation + 1)
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed, match="GroupGone"):
        trained.run("dist.all_reduce(torch.ones(1), group=mine)", ranks=[0])
    assert time.monotonic() - begun < FREE_S
    goes_on(run)


def test_an_interrupt_detaches_a_notebook_from_its_run(kernel):
    """Stop ends the wait alone, and the run goes on; a loop in a cell of the magic's outlives its
    first rank (F38)."""
    notebook = kernel()
    notebook.start(2)
    notebook.do(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\nshell.run_line_magic('load_ext', 'nbdist')"
    )
    notebook.do(f"c.run({training.CELL!r})\nrun = c.train('trainer', steps=300)")
    notebook.begin("do", "run.wait()")
    time.sleep(0.3)  # it waits in a lock: nothing can be polled
    os.killpg(notebook.pid, signal.SIGINT)
    with pytest.raises(AssertionError, match="Detached: the run goes on"):
        notebook._answer("an interrupted wait")
    assert notebook.ask("run.state") == "running"
    assert notebook.ask("len(run.wait(60).history['step'])") == 300
    text = (
        "for step in trainer.steps(150):\n    with step:\n        for x, y in step.batches():\n"
        "            step.backward(loss(trainer.model(x), y))\n"
        "        if step.number == 310 and rank == 0 and generation == 1: os._exit(1)\n"
    )
    notebook.do("c.run('import os')")
    notebook.do(f"shell.run_cell_magic('distributed', '', {text!r})")
    assert notebook.ask("list(c.run('trainer.step').values.values())") == [450, 450]
