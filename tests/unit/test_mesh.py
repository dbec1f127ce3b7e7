"""Which rank of a mesh has what, and which meshes there are."""

import pytest
import torch
from torch import nn

from nbdist.train import (
    GPT,
    DataParallel,
    GPTConfig,
    Mesh,
    Pipeline,
    Sharded,
    TensorParallel,
    estimate,
)
from nbdist.train.strategies.axes import Axes
from nbdist.train.strategies.copies import Kept, Spread, Stand, are_together, newest
from nbdist.train.strategies.grid import Grid
from nbdist.train.strategies.twins import buckets


@pytest.mark.parametrize(
    ("axes", "num_ranks", "parts", "places"),
    [
        (Axes(), 3, [0, 1, 2], [(0, 1)] * 3),
        (Axes(2), 4, [0, 1, 0, 1], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (Axes(2), 2, [0, 1], [(0, 1), (0, 1)]),
        (Axes(num_twins=2), 6, [0, 1, 2, 0, 1, 2], [(0, 2)] * 3 + [(1, 2)] * 3),
        (Axes(2), 1, [0], [(0, 1)]),
        (Axes(num_twins=2), 1, [0], [(0, 1)]),
    ],
)
def test_who_has_what(axes, num_ranks, parts, places):
    """Neighbours hold one model; a rank alone has all of it."""
    assert axes.fits(num_ranks)
    assert axes.parts(num_ranks) == parts
    assert [axes.place(rank, num_ranks) for rank in range(num_ranks)] == places
    models = axes.models(num_ranks)
    assert [rank for model in models for rank in model] == list(range(num_ranks))
    assert all([parts[rank] for rank in model] == list(range(len(model))) for model in models)


@pytest.mark.parametrize(
    ("axes", "num_ranks"), [(Axes(2), 3), (Axes(4), 2), (Grid(2), 3), (Grid(num_pieces=4), 2)]
)
def test_numbers_of_ranks_that_do_not_fit(axes, num_ranks):
    """Some would have nothing to do, or a model would lack parts."""
    assert not axes.fits(num_ranks)
    assert "a multiple of" in axes.wanted


@pytest.mark.parametrize(
    ("grid", "num_ranks", "stages", "pieces", "places"),
    [
        (Grid(num_pieces=2), 4, [0, 0, 1, 1], [0, 1, 0, 1], [(0, 1)] * 4),
        (Grid(2), 6, [0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, [(0, 1)] * 6),
        (Grid(2, has_rows=True), 4, [0, 1, 0, 1], [0, 0, 1, 1], [(0, 2)] * 2 + [(1, 2)] * 2),
        (Grid(2, has_rows=True), 2, [0, 1], [0, 0], [(0, 1)] * 2),
        (Grid(num_pieces=2), 1, [0], [0], [(0, 1)]),
        (Grid(2, has_rows=True), 1, [0], [0], [(0, 1)]),
    ],
)
def test_who_has_which_piece_of_which_stages(grid, num_ranks, stages, pieces, places):
    """All hold something of their own, next to those that they talk to most; who has the same
    stages takes the same samples, or with rows each its own."""
    ranks = range(num_ranks)
    assert grid.fits(num_ranks)
    assert [grid.stages(rank, num_ranks).rank for rank in ranks] == stages
    assert [grid.pieces(rank, num_ranks).rank for rank in ranks] == pieces
    assert [grid.place(rank, num_ranks) for rank in ranks] == places
    assert [grid.twins(rank, num_ranks) for rank in ranks] == [(0, 1)] * num_ranks
    for rank in ranks:
        own = grid.together(grid.stages(rank, num_ranks), grid.pieces(rank, num_ranks))
        assert own == grid.portion(rank, num_ranks) == (rank, num_ranks)
    for pipeline in grid.pipelines(num_ranks):
        assert [stages[rank] for rank in pipeline] == sorted(set(stages))
        assert len({pieces[rank] for rank in pipeline}) == 1


def test_a_part_comes_from_its_twin():
    """It is newer than any copy; where two parts' twins stand apart, all go back to copies."""

    def stand(step, part, *copied):
        at = [Spread(s, 2, 2) for s in (step, *copied)]
        return Stand(at[0], part, tuple(Kept(spread, part, 1 - part) for spread in at[1:]))

    newcomer = Stand(Spread(0, 2, 2), 1, ())
    three = [stand(7, 0, 3, 6), stand(7, 1, 3, 6), stand(7, 0, 3, 6)]
    assert newest([*three, newcomer], 2) == Spread(7, 2, 2)
    assert not are_together([*three, newcomer], [0, 1, 0, 1])
    assert are_together([*three, stand(7, 1)], [0, 1, 0, 1])
    behind = [stand(8, 0, 3, 6), stand(7, 1, 3, 6), stand(8, 0, 3, 6), newcomer]
    assert newest(behind, 2) == Spread(6, 2, 2)
    assert newest([stand(7, 0, 3, 6), stand(8, 1, 3, 6), stand(8, 0, 3, 6)], 2) == Spread(8, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "give two of data=, pipeline= and tensor="),
        ({"data": 2}, ValueError, "a mesh has two axes"),
        ({"pipeline": 2}, ValueError, "a mesh has two axes"),
        ({"pipeline": 2, "tensor": 2, "data": 2}, ValueError, "not there yet"),
        ({"pipeline": 0, "data": 2}, ValueError, "pipeline is 0"),
        ({"pipeline": "two", "data": 2}, TypeError, "pipeline is 'two'; it must be a number"),
        ({"pipeline": 2, "data": Pipeline(2)}, TypeError, "Other strategies are not there yet"),
        ({"tensor": 2, "data": Sharded()}, ValueError, r"data=Sharded\(\) goes with pipeline="),
        ({"pipeline": 2, "data": Sharded(copy_every=3)}, ValueError, r"give data=Sharded\(\)"),
        (
            {"pipeline": 2, "tensor": TensorParallel(copy_every=3)},
            ValueError,
            "as the pipeline's copy_every says",
        ),
        ({"pipeline": 2, "data": DataParallel(compress="fp16")}, ValueError, "not there yet"),
        (
            {"tensor": TensorParallel(), "data": DataParallel()},
            ValueError,
            "give data= as a number",
        ),
        (
            {"pipeline": Pipeline(4, "interleaved"), "data": DataParallel()},
            ValueError,
            "give data= as a number",
        ),
        (
            {"pipeline": Pipeline(4, "interleaved"), "data": Sharded()},
            ValueError,
            "give a schedule that always has as many stages on a rank",
        ),
        (
            {"pipeline": Pipeline(4, "interleaved"), "tensor": TensorParallel()},
            ValueError,
            "give tensor= as a number, or a schedule",
        ),
    ],
)
def test_a_mesh_that_cannot_be(arguments, error, words):
    """It says what must be given, or what is not there yet."""
    with pytest.raises(error, match=words):
        Mesh(**arguments)


@pytest.mark.parametrize(
    ("mesh", "fit", "misfit"),
    [
        (Mesh(pipeline=2, data=2), [1, 4], [2, 3, 6, 8]),
        (Mesh(pipeline=2, data=DataParallel()), [1, 2, 4, 6], [3]),
        (Mesh(pipeline=Pipeline(4, "zbv"), data=2), [4], [8]),
        (Mesh(pipeline=Pipeline(4, "interleaved"), data=2), [4, 8], [3]),
        (Mesh(tensor=TensorParallel(), data=2), [2, 4, 8], [3]),
        (Mesh(tensor=2, data=3), [6], [2, 4]),
        (Mesh(pipeline=2, tensor=2), [1, 4], [2, 3, 6]),
        (Mesh(pipeline=2, tensor=TensorParallel()), [2, 4, 6], [3]),
        (Mesh(pipeline=Pipeline(4, "interleaved"), tensor=2), [2, 4], [3]),
        (Mesh(pipeline=2, data=Sharded()), [1, 2, 4, 6], [3]),
    ],
)
def test_the_ranks_of_a_mesh(mesh, fit, misfit):
    """What is a number is that number when a trainer is made; else it follows from the ranks."""
    for num_ranks in fit:
        mesh.check_ranks(num_ranks)
    for num_ranks in misfit:
        with pytest.raises(ValueError, match=f"{num_ranks}"):
            mesh.check_ranks(num_ranks)


def test_what_it_costs():
    """Each rank what its part does, and 2(d−1)/d times its gradients' bytes beside it."""

    def model():
        return GPT(GPTConfig(num_layers=4, num_heads=2, width=8, context=4))

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for along, mesh in ((Pipeline(2), {"pipeline": 2}), (TensorParallel(), {"tensor": 2})):
        one = estimate(model, along, 2, sample=tokens, global_batch=8)
        made = estimate(model, Mesh(**mesh, data=2), 4, sample=tokens, global_batch=16)
        assert made.idle_share == one.idle_share
        for rank, need in enumerate(made.ranks):
            alone = one.ranks[rank % 2]
            assert need == alone._replace(sent=alone.sent + alone.gradients)
        assert made.ranks[0].copies > 0
    assert estimate(model, Mesh(tensor=2, data=2), 4).ranks[0].sent is None
    whole = estimate(model, DataParallel(), 1).ranks[0]
    piped = estimate(model, Pipeline(2), 2, sample=tokens, global_batch=8).ranks
    for mesh in (Mesh(pipeline=2, tensor=2), Mesh(pipeline=2, data=Sharded())):
        made = estimate(model, mesh, 4, sample=tokens, global_batch=8).ranks
        halves = [(made[0], made[1]), (made[2], made[3])]
        if mesh.tensor is None:
            halves = [(made[0], made[2]), (made[1], made[3])]
            assert sum(need.parameters for need in made) == whole.parameters
        for stage, ranks in zip(piped, halves, strict=True):
            assert all(need.parameters < stage.parameters for need in ranks)
            assert sum(need.parameters for need in ranks) >= stage.parameters
            assert all((need.gathered > 0) == (mesh.tensor is None) for need in ranks)
        assert made[0].copies > 0
    one = Mesh(pipeline=2, data=Sharded())
    assert estimate(model, one, 4, sample=tokens).ranks[0].sent is None
    with pytest.raises(ValueError, match="mesh of 2 x 2 ranks"):
        estimate(model, Mesh(pipeline=2, data=2), 6)


def test_it_describes_itself():
    """In one sentence about each axis, with its formula."""
    said = Mesh(pipeline=2, data=2).describe()
    assert "cut into 2 stages" in said
    assert "2(d−1)/d times their bytes" in said
    assert "matrices that the plan cuts" in Mesh(tensor=2, data=2).describe()
    both = Mesh(pipeline=2, tensor=2).describe()
    assert "cut into 2 stages" in both
    assert "matrices that the plan cuts" in both
    rows = Mesh(pipeline=2, data=Sharded()).describe()
    assert "1/d of the rows of the same stages" in rows
    assert "2(d−1)/d times the stages' bytes" in rows


def test_buckets_are_full_and_of_one_type():
    """In the order of the parameters; one that is too large is a bucket by itself."""
    tensors = [nn.Parameter(torch.zeros(num)) for num in (2, 2, 9, 1)]
    tensors.append(nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    assert [len(bucket) for bucket in buckets(tensors, 16)] == [2, 1, 1, 1]
    assert [tensor for bucket in buckets(tensors, 16) for tensor in bucket] == tensors
    assert list(buckets([], 16)) == []
