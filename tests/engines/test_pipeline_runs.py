"""A pipeline trains like any other strategy, and goes on when a stage is lost."""

import numpy as np
import pytest
import training

import nbdist

CELL = training.cell_in_parts('Pipeline(2, "1f1b", 4, copy_every=5)')


def test_a_stage_that_is_lost_comes_back(cluster, until):
    """Each rank is killed in turn, at random moments: the curve is that of an undisturbed run, bit
    for bit, and no more steps are done again than lie between two copies."""
    training.kill_each(cluster(2), until, CELL, num_kills=4, seed=5, rtol=0)


def test_without_copies_a_lost_stage_ends_the_run(cluster, until):
    """It never hangs and never trains on with other weights: the sentence says what was lost."""
    engines = cluster(2)
    engines.run(CELL)
    engines.run("trainer = make(strategy=Pipeline(2, '1f1b', 4, copy_every=0))")
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: training.passed(run, 5), 60, "the run goes on")
    engines.kill(1)
    with pytest.raises(nbdist.RecoveryFailed, match=r"stages \[1\] were lost with the weights"):
        run.wait(60)
    engines.wait_healthy(60)
    assert set(engines.run("rank", once=True).values.values()) == {0, 1}


LOOP = """
for step in trainer.steps(80):
    with step:
        for batch in step.batches():
            step.train(batch)
"""


def test_an_own_loop_lives_through_a_loss(cluster, background, until):
    """The newcomer goes into the same loop, and comes out of it with the others."""
    engines = cluster(2)
    engines.run(CELL)
    cell = background(engines.run, LOOP)
    until(lambda: engines.runs and training.passed(engines.runs[-1], 15), 60, "the cell trains")
    engines.kill(1)
    assert cell.result(60).outputs is not None
    run = engines.runs[-1]
    assert len(run.history["step"]) == 80
    np.testing.assert_array_equal(run.history["loss"], training.undisturbed(engines, 80))


def test_a_stage_that_is_lost_between_two_runs_comes_back(cluster):
    """The next run begins with all ranks going back to their copies. What it planned and what was
    measured can be looked at."""
    engines = cluster(2)
    engines.run(CELL)
    first = engines.train("trainer", steps=18).wait(60).history["loss"]
    before = engines.generation
    engines.kill(1)
    engines.wait_healthy(60, after=before + 1)
    second = engines.train("trainer", steps=6).wait(60).history
    assert second["step"].tolist() == list(range(18, 24))
    losses = training.undisturbed(engines, 24)
    np.testing.assert_array_equal(np.concatenate([first, second["loss"]]), losses)
    for run in engines.runs[:2]:
        text = run.figure("pipeline").text
        assert "the bubble is" in text
        assert "planned are 20% = (p−1)/(m+p−1) with p = 2, m = 4" in text


def test_a_seat_that_stays_empty_has_the_model_cut_anew(cluster, until):
    """Three stages, one lost: two ranks train on, from copies; with a third again they are three.
    The curve is that of a run of one size, bit for bit."""
    engines = cluster(3, policy="shrink")
    mine = "make(strategy=Pipeline(world_size, '1f1b', 6, copy_every=5))"
    engines.run(CELL.replace("trainer = make()", f"trainer = {mine}"))
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: training.passed(run, 12), 60, "the run goes on")
    engines.kill(1)
    until(lambda: set(run.history["world_size"][-3:]) == {2}, 60, "two ranks train on")
    engines.scale(3)
    until(lambda: set(run.history["world_size"][-3:]) == {3}, 60, "three ranks train on")
    run.stop()
    training.check_steps(run)
    num_steps = len(run.history["step"])
    losses = training.undisturbed(engines, num_steps, mine)
    np.testing.assert_array_equal(run.history["loss"], losses)
    (lost,) = [i for i in run.incidents if i.kind == "lost"]
    assert lost.steps_repeated <= 6, lost


def test_stages_are_given_back_one_after_the_other(cluster, until):
    """Four engines become two in mid-run, of which each leaves its stages to others: the curve is
    that of a run of one size, bit for bit."""
    engines = cluster(4)
    mine = "make(strategy=Pipeline(world_size, '1f1b', 4, copy_every=5))"
    engines.run(CELL.replace("trainer = make()", f"trainer = {mine}"))
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: training.passed(run, 8), 60, "the run goes on")
    engines.scale(2)
    until(lambda: set(run.history["world_size"][-3:]) == {2}, 60, "two ranks train on")
    run.stop()
    training.check_steps(run)
    losses = training.undisturbed(engines, len(run.history["step"]), mine)
    np.testing.assert_array_equal(run.history["loss"], losses)
    assert [i.slots for i in run.incidents] == [(3,), (2,)]
