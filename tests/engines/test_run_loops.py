"""Training loops that the user writes, in cells, whatever happens to the engines meanwhile."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
import training

import nbdist

LOOP = """
import os, time

def train(trainer, num, each=lambda step: None):
    for step in trainer.steps(num):
        with step:
            each(step)
            for x, y in step.batches():
                step.backward(loss(trainer.model(x), y), count=len(y))
        yield step

def note(step):
    seen.append((step.number, step.attempt, step.generation, step.indices.tolist()))
"""
LEAVE_S = 4 * 1.0
"""Four times the time in which all ranks have left a step that failed on one."""
MANY = 100_000
"""More steps than a test waits for: it stops the run."""
WHOLE = "(trainer.step, trainer.digest(), model is trainer.model)"


@pytest.fixture
def looped(four):
    """Four engines on which loops can be written; each test makes trainers of its own."""
    four.run(training.CELL + LOOP)
    return four


@pytest.fixture
def loop(background, until):
    """`loop(engines, code, at)`: run a cell; returns when its run has so many steps."""

    def begin(engines, code, at=10):
        known = len(engines.runs)
        cell = background(engines.run, code)
        until(lambda: len(engines.runs) > known, 60, "the cell trains")
        run = engines.runs[known]
        until(lambda: len(run.history["step"]) >= at, 60, "steps are committed")
        return run, cell

    return begin


@pytest.fixture
def lose_some(pids, until):
    """`lose_some(engines, run, ranks)`: kill ranks of a loop; returns when the loop goes on with
    all seats filled again."""

    def lose(engines, run, *ranks):
        generation, found = engines.generation, pids(engines)
        for rank in ranks:
            os.kill(found[rank], signal.SIGKILL)
        engines.wait_healthy(timeout=20, after=generation + 1)
        mark = len(run.history["step"]) + 5
        until(lambda: len(run.history["step"]) >= mark, 60, "the loop goes on")

    return lose


def finish(run, cell):
    """Stop a loop; the outcome of its cell, and how many steps it has trained."""
    run.stop()
    return cell.result(60), len(run.history["step"])


def values(engines, code):
    """What an expression is on every rank; one value, since it is the same on all."""
    found = engines.run(code, once=True).values
    assert list(found) == list(range(engines.world_size))
    assert all(value == found[0] for value in found.values()), found
    return found[0]


def check_shares(result, run):
    """Where all ranks have told what they trained on, it was the batch of that step, once."""
    batches = {}
    for seen in result.values.values():
        for number, _, generation, indices in seen:
            batches.setdefault((number, generation), []).append(indices)
    columns = [run.history[name].tolist() for name in ("step", "generation", "world_size")]
    whole = [b for s, g, size in zip(*columns, strict=True) if len(b := batches[s, g]) == size]
    assert len(whole) >= 10
    for batch in whole:
        assert len({index for share in batch for index in share}) == training.BATCH


@pytest.mark.parametrize("victims", [(0,), (2,), (1, 3)])
def test_a_loop_goes_on_when_ranks_die(looped, loop, lose_some, victims):
    """A broken step comes again with its number, the next attempt and the same samples; newcomers
    begin at the present step, and print their part (C15, R10, R20, T25)."""
    code = f"trainer, seen = make(), []\nfor step in train(trainer, {MANY}, note): pass\n"
    run, cell = loop(looped, code + "print('end')\nseen")
    lose_some(looped, run, *victims)
    result, num = finish(run, cell)
    training.check_steps(run)
    training.check_samples(looped, num)
    training.check_replicas(looped)
    for rank, seen in result.values.items():
        numbers = [number for number, *_ in seen]
        assert sorted({*numbers}) == list(range(numbers[0], num))
        assert (numbers[0] > 0) == (rank in victims)
        again = [(a, b) for a, b in itertools.pairwise(seen) if a[0] == b[0]]
        assert all(b[1] == a[1] + 1 for a, b in again)
        assert result.outputs[rank].count("end\n") == 1
        assert ("was replaced" in result.outputs[rank]) == (rank in victims)
    check_shares(result, run)
    losses = training.undisturbed(looped, num)
    np.testing.assert_allclose(run.history["loss"], losses, rtol=1e-5)


def test_a_loop_in_a_function(looped, loop, lose_some):
    """The trainer needs no name: the newcomer's own is given the state of the others'."""
    code = f"""
def go():
    mine = make(seed=3)
    numbers = [step.number for step in train(mine, {MANY})]
    return mine.step, numbers[-1], mine.digest()
go()
"""
    run, cell = loop(looped, code)
    lose_some(looped, run, 0)
    result, num = finish(run, cell)
    assert result.values == dict.fromkeys(range(4), result.values[0])
    assert result.values[0][:2] == (num, num - 1)


def test_after_a_loop(looped, loop, lose_some, pids):
    """A cell that trained is not replayed to those who come later: its names are copied, and what
    each rank has for itself is named as missing; they train on together."""
    looped.run("trainer = make(seed=5); model = trainer.model")
    code = f"for step in train(trainer, {MANY}): pass\nlast, who = step.number, os.getpid()"
    run, cell = loop(looped, code)
    lose_some(looped, run, 1)
    _, num = finish(run, cell)
    assert values(looped, WHOLE)[::2] == (num, True)
    assert values(looped, "(last, step.number)") == (num - 1, num - 1)
    generation = looped.generation
    os.kill(pids(looped)[3], signal.SIGKILL)
    looped.wait_healthy(timeout=20, after=generation + 1)
    assert values(looped, WHOLE)[::2] == (num, True)
    assert values(looped, "last") == num - 1
    missing = looped.status()[3].not_restored
    assert "who" in missing
    assert not any("cell" in name for name in missing)
    looped.run(f"for step in train(trainer, 5): assert step.number >= {num}")
    training.check_replicas(looped)
    assert looped.train("trainer", steps=5).wait(60).first_step == num + 5


def test_two_loops_with_scheduler_and_evaluation(looped, loop, lose_some, until):
    """Each loop is a run of its own; rates and evaluations are those of an undisturbed one."""
    looped.run(
        "def halve(o):\n    return torch.optim.lr_scheduler.StepLR(o, 10, 0.9)\n"
        "trainer = make(scheduler=halve, evaluate=Evaluate(Data(), every=50))"
    )
    one = f"for step in train(trainer, {MANY}): pass\n"
    first, cell = loop(looped, one + one + "trainer.step", at=5)
    lose_some(looped, first, 3)
    first.stop()
    until(lambda: looped.runs[-1] is not first, 60, "the second loop")
    second = looped.runs[-1]
    lose_some(looped, second, 0)
    result, _ = finish(second, cell)
    rates = np.concatenate([first.history["lr"], second.history["lr"]])
    assert result.values == dict.fromkeys(range(4), len(rates))
    np.testing.assert_allclose(rates, [0.05 * 0.9 ** (n // 10) for n in range(len(rates))])
    steps = [e.step for run in (first, second) for e in run.evaluations]
    assert steps == list(range(50, len(rates) + (steps[-1:] == [len(rates)]), 50))


def test_a_loop_follows_the_size_of_the_world(cluster, loop, until):
    """Added engines come into the loop, those given back leave it; with policy shrink the loop goes
    on without the lost (C17, R22, R11)."""
    engines = cluster(2, policy="shrink")
    engines.run(training.CELL + LOOP)
    code = (
        "trainer = make()\n"
        "for step in train(trainer, 100_000):\n"
        "    if world_size == 1: break\n"
        "(rank, slot, step.number + 1, trainer.step)"
    )
    run, cell = loop(engines, code)
    engines.scale(3)
    until(lambda: run.history["world_size"][-1] == 3, 60, "it goes on with three")
    engines.kill(1)
    until(lambda: run.history["world_size"][-1] == 2, 60, "it goes on with two")
    engines.scale(1)
    result = cell.result(60)
    num = len(run.history["step"])
    assert result.values == {0: (0, 0, num, num)}
    assert {note.partition(" has no")[0] for note in result.notes} == {
        "rank 1 (slot 1)",
        "rank 2 (slot 2)",
    }
    assert set(run.history["world_size"]) >= {2, 3}
    training.check_samples(engines, num)


def test_all_leave_a_loop_early(looped):
    """A break on all ranks ends the run; the trainer goes on from there."""
    looped.run("trainer = make()")
    code = "for step in train(trainer, 50):\n    if step.number == 9: break\ntrainer.step"
    assert looped.run(code).values == dict.fromkeys(range(4), 10)
    assert looped.runs[-1].wait(60).state == "stopped"
    assert looped.run("[s.number for s in train(trainer, 2)]").values[3] == [10, 11]


def test_one_leaves_a_loop_early(looped):
    """The others are freed, and told which rank left them; all hold the same step then (C11, T22:
    nothing but a cut frees an operation that waits)."""
    looped.run("trainer = make()")
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed, match="rank 2 left the training loop"):
        looped.run("for step in train(trainer, 50):\n    if step.number == 9 and rank == 2: break")
    assert time.monotonic() - begun < LEAVE_S
    with pytest.raises(nbdist.WrongState, match="rank 2 left"):
        looped.runs[-1].wait(60)
    assert values(looped, "(trainer.step, trainer.digest())")[0] == 10
    looped.run("for step in train(trainer, 2): pass")


def test_a_loop_on_some_ranks_says_where_it_belongs(looped):
    """Nobody waits for the others, and the message names the cell in which it can train."""
    looped.run("trainer = make()")
    with pytest.raises(nbdist.CellFailed, match=r"sent to rank 0 only; .*%%distributed") as caught:
        looped.run("for step in train(trainer, 5): pass", ranks=[0])
    assert caught.value.notes == ["rank 0 was released from its training loop"]
    looped.run("for step in train(trainer, 2): pass")


@pytest.mark.parametrize("place", ["before backward", "after the step"])
def test_one_raises_in_a_loop(looped, place):
    """All ranks leave the step within a second, the rank and the user's line are named; all hold
    the same step, and the next loop goes on (T24, R24, R29: no rank's counter drifts)."""
    looped.run(
        "trainer = make()\n"
        "def fail(step):\n"
        "    if rank == 1 and step.number == 7: raise ValueError('bad sample')"
    )
    each = "fail" if place == "before backward" else "lambda step: None"
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed, match=r"ValueError: bad sample \(rank 1\)") as caught:
        looped.run(f"for step in train(trainer, 50, {each}): fail(step)")
    assert time.monotonic() - begun < LEAVE_S
    assert set(caught.value.errors) == {1}
    text = "\n".join(caught.value.errors[1].traceback)
    assert "bad sample" in text
    assert "nbdist" not in text
    run = looped.runs[-1]
    with pytest.raises(nbdist.CellFailed, match="bad sample"):
        run.wait(60)
    step = values(looped, "(trainer.step, trainer.digest())")[0]
    assert step == len(run.history["step"])
    assert looped.run("[s.number for s in train(trainer, 2)]").values[0] == [step, step + 1]
    training.check_samples(looped, step + 2)


def test_all_raise_in_a_loop(looped):
    """The first is named, and nothing hangs (F14)."""
    looped.run("trainer = make()")
    with pytest.raises(nbdist.CellFailed, match="ZeroDivisionError"):
        looped.run("for step in train(trainer, 50, lambda step: 1 // (5 - step.number)): pass")
    assert values(looped, "(trainer.step, trainer.digest())")[0] == 5
    looped.run("for step in train(trainer, 2): pass")


def test_a_loop_is_interrupted(looped):
    """All ranks leave it with KeyboardInterrupt, hold the same step, and train on (R32, F38)."""
    looped.run("trainer = make()")
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.3 + 0.003 * number)
        try:
            with pytest.raises(KeyboardInterrupt):
                looped.run("for step in train(trainer, 100_000): pass")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert looped.runs[-1].wait(60).state == "stopped"
        step = values(looped, "(trainer.step, trainer.digest())")[0]
        assert looped.run("[s.number for s in train(trainer, 2)]").values[1] == [step, step + 1]
    signal.signal(signal.SIGALRM, old)


def test_a_loop_that_a_cell_leaves_open(looped):
    """It is over with the cell: nobody is waited for, and the next loop begins anew."""
    looped.run("trainer = make()\nkept = train(trainer, 50)\nnext(kept).number")
    assert looped.runs[-1].wait(60).state == "stopped"
    assert looped.run("[s.number for s in train(trainer, 2)]").values[2] == [1, 2]
    assert looped.run("list(kept)").values[0] == []


@pytest.mark.parametrize("is_own", [True, False])
def test_a_loss_that_is_not_a_number_on_one_rank(looped, is_own):
    """All ranks skip that step alike, and count it (R29)."""
    looped.run(
        "def sick(output, target):\n"
        "    factor = float('nan') if rank == 2 and trainer.step == 4 else 1.0\n"
        "    return loss(output, target) * factor\n"
        "trainer = make(loss=sick)"
    )
    if is_own:
        looped.run(
            "for step in trainer.steps(8):\n"
            "    with step:\n"
            "        for x, y in step.batches(): step.backward(sick(trainer.model(x), y))"
        )
    else:
        looped.train("trainer", steps=8).wait(60)
    assert values(looped, "(trainer.step, trainer.num_skipped, trainer.digest())")[:2] == (8, 1)
    assert np.isnan(looped.runs[-1].history["loss"]).tolist() == [n == 4 for n in range(8)]


@pytest.mark.parametrize("num", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_many_join_at_random_moments(looped, loop, pids, until, num):
    """A newcomer of a loop never meets another collective than its own: the generation decides who
    is in a group (R9, T35, T23)."""
    looped.run("trainer = make()")
    run, cell = loop(looped, "for step in train(trainer, 100_000): pass\ntrainer.step")
    moment = random.Random(9)
    for number in range(num):
        generation = looped.generation
        mark = len(run.history["step"]) + moment.randrange(8)
        until(lambda mark=mark: len(run.history["step"]) >= mark, 60, "the loop goes on")
        os.kill(pids(looped)[number % 4], signal.SIGKILL)
        looped.wait_healthy(timeout=20, after=generation + 1)
    result, steps = finish(run, cell)
    assert result.values == dict.fromkeys(range(4), steps)
    training.check_steps(run)
    training.check_samples(looped, steps)
    training.check_replicas(looped)
