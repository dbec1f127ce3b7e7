"""Runs whose ranks train apart, and ranks that die, stop, come and go."""

import numpy as np
import pytest
import training

import nbdist

PERIOD = 4


def to_an_outer_step(engines, num_steps):
    """Train on until every fragment has been exchanged with what it is to come to."""
    run = engines.train("trainer", steps=PERIOD + -num_steps % PERIOD)
    run.wait(60)
    return run


@pytest.mark.parametrize(
    "strategy",
    [
        f"LocalSGD({PERIOD})",
        pytest.param(
            f"DiLoCo({PERIOD}, fragments=2, delay=1, momentum=0.3)", marks=pytest.mark.slow
        ),
        pytest.param(
            f"DiLoCo({PERIOD}, fragments=2, delay=1, momentum=0.3, compress='int8')",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_stopped_filled_and_grown(cluster, until, strategy):
    """Every step is committed once; a loss costs what its rank had trained since the last outer
    step, all ranks say the same of it, and the curve is hardly another."""
    engines = cluster(2, hang_timeout_s=1.0)
    engines.run(training.CELL)
    engines.run(
        "from nbdist.train import DiLoCo, LocalSGD\n" + f"trainer = make(strategy={strategy})"
    )
    run = engines.train("trainer", steps=1_000_000)
    training.disturb(engines, run, until)
    run.stop()
    training.check_steps(run)
    assert set(run.history["world_size"]) >= {2, 3}
    num_lost = engines.run("trainer.num_lost_steps", once=True).values
    assert len(set(num_lost.values())) == 1
    # Four were lost and one was given back, with at most a period each; and where a group broke in
    # a vote, a step of one that had not heard of it.
    assert 0 <= num_lost[0] <= 5 * (PERIOD + 2)
    losses = run.history["loss"]
    num_steps = len(losses)
    end = to_an_outer_step(engines, num_steps)
    if "LocalSGD" in strategy:
        training.check_replicas(engines)
    training.check_steps(end, first=num_steps)
    whole = training.undisturbed(engines, num_steps)
    assert np.mean(losses[-20:]) == pytest.approx(np.mean(whole[-20:]), rel=0.15)


def test_without_a_loss_every_sample_counts_once(cluster):
    """What ranks have trained on apart is in the mean, each sample with its weight."""
    engines = cluster(3)
    engines.run(training.CELL)
    engines.run("from nbdist.train import LocalSGD\ntrainer = make(strategy=LocalSGD(5))")
    run = engines.train("trainer", steps=115)
    run.wait(90)
    training.check_steps(run)
    training.check_samples(engines, 115)
    training.check_replicas(engines)
    assert set(engines.run("trainer.num_lost_steps", once=True).values.values()) == {0}


def test_who_waits_for_codes_of_one_that_left_is_freed(cluster):
    """A wait in futures without a frame of torch's own is one too: nobody waits for ever, and none
    that waits is taken for one that hangs."""
    engines = cluster(3)
    engines.run(training.CELL)
    engines.run(
        "from nbdist.train import DiLoCo\n"
        "trainer = make(strategy=DiLoCo(6, fragments=3, delay=1, compress='int8'))"
    )
    loop = """
for step in trainer.steps(50):
    with step:
        for batch in step.batches():
            step.train(batch)
    if step.number == 3 and rank == 2:
        break
"""
    with pytest.raises(nbdist.CellFailed, match="rank 2 left the training loop"):
        engines.run(loop, timeout=90)
    assert not [i for i in engines.incidents if i.cause != "user"]
