"""Ranks in two directions train on when one is lost: its twin has its part, or its neighbour."""

import numpy as np
import pytest
import training
from training import cell_in_parts, kill_each

CELL = cell_in_parts("Mesh(pipeline=Pipeline(2, '1f1b', 4, copy_every=5), data=2)")
STAGES = "pipeline=Pipeline(2, '1f1b', 4, split=[7, 8], copy_every=5)"
PLAN = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

PLAN = {str(4 * i): ColwiseParallel() for i in range(3)}
PLAN |= {str(4 * i + 2): RowwiseParallel() for i in range(3)}
"""
DIVIDED = {
    "rows": cell_in_parts(f"Mesh({STAGES}, data=Sharded())"),
    "panels": cell_in_parts(f"Mesh({STAGES}, tensor=TensorParallel(PLAN))", PLAN),
}


def test_a_stage_that_is_lost_comes_from_its_twin(cluster, until):
    """Killed in the middle of a pass perhaps, or of a sum; the curve is that of an undisturbed
    run."""
    kill_each(cluster(4), until, CELL, 2, seed=9)


def test_a_model_on_one_rank_has_no_neighbour_for_copies(cluster):
    """It lies on an axis of one rank, and its twin has all of it: it trains beyond a copy."""
    engines = cluster(2)
    engines.run(cell_in_parts("Mesh(pipeline=Pipeline(1, '1f1b', 4, copy_every=2), data=2)"))
    run = engines.train("trainer", steps=5)
    run.wait()
    training.check_steps(run)
    assert run.num_committed == 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["rows", pytest.param("panels", marks=pytest.mark.slow)])
def test_a_piece_of_a_stage_comes_from_the_neighbours_copy(cluster, until, how):
    """Nobody else has it: all go back to that step; the curve is that of an undisturbed run."""
    kill_each(cluster(4), until, DIVIDED[how], 1, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", DIVIDED)
def test_any_piece_of_any_stage_may_be_lost(cluster, until, how, seed):
    """At any moment: while a stage is gathered, within its layers, between stages, in the vote."""
    kill_each(cluster(4), until, DIVIDED[how], 8, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_any_stage_of_either_may_be_lost(cluster, until, seed):
    """At any moment: in a send, a sum of gradients, the vote, the update."""
    kill_each(cluster(4), until, CELL, 4, seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", [CELL, *DIVIDED.values()], ids=["twins", *DIVIDED])
def test_half_of_the_ranks_are_given_back(cluster, until, cell):
    """They leave together, and come again; the curve is that of a run that stayed as it was."""
    engines = cluster(4)
    engines.run(cell)
    run = engines.train("trainer", steps=1_000_000)
    for size in (2, 4):
        mark = len(run.history["step"]) + 8
        until(lambda mark=mark: len(run.history["step"]) > mark, 60, lambda: str(run))
        engines.scale(size)
        until(lambda n=size: set(run.history["world_size"][-3:]) == {n}, 60, lambda: str(run))
    run.stop()
    training.check_steps(run)
    losses = training.undisturbed(engines, len(run.history["step"]))
    np.testing.assert_allclose(run.history["loss"], losses, rtol=1e-5)
