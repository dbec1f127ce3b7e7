"""A model that is cut by rows trains like any other, and goes on when a rank's rows are lost."""

import numpy as np
import pytest
import training
from training import cell_in_parts, kill_each, passed

import nbdist

CELL = cell_in_parts("Sharded(['2', '4', '6'], copy_every=5)")


def test_rows_that_are_lost_come_back(cluster, until):
    """The curve is that of an undisturbed run, and no more steps are done again than lie between
    two copies."""
    kill_each(cluster(3), until, CELL, 3, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("seed", range(3))
def test_any_rank_of_four_may_be_lost(cluster, until, seed):
    """At any moment: in a gather, in a sum of gradients, in the vote, in the update."""
    kill_each(cluster(4), until, CELL, 8, seed)


LOOP = """
for step in trainer.steps(60):
    with step:
        for x, y in step.batches():
            step.backward(functional.cross_entropy(trainer.model(x), y), count=len(x))
"""


def test_an_own_loop_lives_through_a_loss(cluster, background, until):
    """The newcomer goes into the same loop, and calls the model as the others do."""
    engines = cluster(2)
    engines.run(CELL)
    cell = background(engines.run, LOOP)
    until(lambda: engines.runs and passed(engines.runs[-1], 15), 60, "the cell trains")
    engines.kill(1)
    assert cell.result(60).outputs is not None
    losses = training.undisturbed(engines, 60)
    np.testing.assert_allclose(engines.runs[-1].history["loss"], losses, rtol=1e-5)
    gathered = engines.run("{n: t.sum().item() for n, t in trainer.model.whole_parameters()}")
    assert gathered.values[0] == gathered.values[1]


def test_without_copies_lost_rows_end_the_run(cluster, until):
    """It never hangs and never trains on with other weights: the sentence says what was lost."""
    engines = cluster(2)
    engines.run(CELL)
    engines.run("trainer = make(strategy=Sharded(['2'], copy_every=0))")
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: passed(run, 5), 60, "the run goes on")
    engines.kill(1)
    with pytest.raises(nbdist.RecoveryFailed, match="the rows of rank 1 of 2 were lost"):
        run.wait(60)


def test_a_seat_that_stays_empty_has_the_rows_cut_anew(cluster, until):
    """Three ranks, one lost: two train on, from copies; with a third again they are three."""
    engines = cluster(3, policy="shrink")
    engines.run(CELL)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: passed(run, 12), 60, "the run goes on")
    engines.kill(1)
    until(lambda: set(run.history["world_size"][-3:]) == {2}, 60, "two ranks train on")
    engines.scale(3)
    until(lambda: set(run.history["world_size"][-3:]) == {3}, 60, "three ranks train on")
    run.stop()
    training.check_steps(run)
    losses = training.undisturbed(engines, len(run.history["step"]))
    np.testing.assert_allclose(run.history["loss"], losses, rtol=1e-5)
