"""From a model to stages: which blocks, where it is cut, and what of it is made."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nbdist.train import GPT, GPTConfig, Sharded
from nbdist.train.randomness import seeded
from nbdist.train.strategies import building, splitting
from nbdist.train.strategies.held import Cut, Layout, hold
from nbdist.train.strategies.pieces import Pieces

SMALL = GPTConfig(num_layers=2, num_heads=2, width=16, context=8, vocabulary=32)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=8), num_parts=st.integers(1, 8))
def test_the_costliest_part_costs_least(costs, num_parts):
    """As a look at all possible cuts says; no part is empty."""
    num_parts = min(num_parts, len(costs))
    lengths = splitting.balance(costs, num_parts)
    assert len(lengths) == num_parts
    assert sum(lengths) == len(costs)
    assert min(lengths) >= 1

    def worst(ends):
        edges = [0, *ends, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    best = min(map(worst, itertools.combinations(range(1, len(costs)), num_parts - 1)))
    assert worst(list(itertools.accumulate(lengths))[:-1]) == best


def test_blocks_are_found():
    """In a Sequential, by a method, by names, by a function."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert splitting.blocks_of(model, "auto") == list(model)
    assert len(splitting.blocks_of(GPT(SMALL), "auto")) == 4
    assert splitting.blocks_of(model, ["0", "1"]) == list(model)
    assert splitting.blocks_of(nn.Sequential(model), ["0.0", "0.1"]) == list(model)
    assert splitting.blocks_of(model, lambda m: [m[0]]) == [model[0]]
    with pytest.raises(TypeError, match="nothing says how to cut it"):
        splitting.blocks_of(nn.Linear(2, 2), "auto")
    for wrong in ([3], 3, [], None):
        with pytest.raises(TypeError, match="must be a list of Modules"):
            splitting.blocks_of(model, lambda _, wrong=wrong: wrong)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["0", "2"], "leaves out '1' of an nn.Sequential"),
        (["0", "1", "2.0"], "leaves out '2.1'"),
        (["1", "0", "2"], r"changes the order .* Name \['0', '1', '2'\] in their order"),
    ],
)
def test_a_row_is_named_whole_and_in_its_order(names, says):
    """Even what has no parameters makes another model of it where it is left out."""
    model = nn.Sequential(
        nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    )
    with pytest.raises(ValueError, match=says):
        splitting.blocks_of(model, names)


def test_a_name_that_is_none_of_the_models_is_said():
    """With the setting it came from, and what there is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match=r"split: no part .* 'nope'; a Sequential has '0', '1'"):
        splitting.blocks_of(model, ["0", "nope"])
    with pytest.raises(ValueError, match=r"blocks: no part .* 'nope'"):
        Sharded(blocks=["nope"]).blocks_of(model)
    with pytest.raises(TypeError, match=r"blocks\(model\) returned 3"):
        Sharded(blocks=lambda _: 3).blocks_of(model)


@pytest.mark.parametrize("split", ["even", [], [0, 2], [1, "a"], 3, [True]])
def test_what_is_no_split(split):
    """The message says what may be."""
    with pytest.raises((TypeError, ValueError), match="split is"):
        splitting.check_split(split)


def test_costs_are_operations_first():
    """A wide layer counts for more than a long table; what cannot be counted counts by bytes."""
    blocks = [nn.Embedding(1000, 8), nn.Linear(8, 64), nn.Linear(64, 8)]
    table, wide, narrow = splitting.costs_of(blocks, lambda: torch.zeros(1, 4, dtype=torch.int64))
    assert wide == pytest.approx(narrow, rel=0.1)
    assert table < wide

    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    costs = splitting.costs_of([Odd(4, 4), nn.Linear(4, 4)], lambda: torch.zeros(1, 4))
    assert costs == pytest.approx([0.5, 0.5])


def test_numbers_of_blocks_must_fit():
    """They say how many blocks each stage has, all together as many as there are."""
    blocks = [nn.Linear(2, 2) for _ in range(5)]
    assert splitting.counts_of(blocks, 2, [1, 4], list) == [1, 4]
    with pytest.raises(ValueError, match=r"split is \[1, 3\].*the model has 5 blocks"):
        splitting.counts_of(blocks, 2, [1, 3], list)
    with pytest.raises(ValueError, match="the model has 5 blocks; a stage needs one"):
        splitting.counts_of(blocks, 6, "auto", list)


def held(rank, *, model=lambda: GPT(SMALL), given=None, owners=(0, 1, 2), split="auto"):
    def make():
        with seeded(3, torch.device("cpu")):
            return model()

    layout = Layout(owners, rank, max(owners) + 1)
    sample = torch.zeros(1, 8, dtype=torch.int64)
    return hold(make, given=given, cut=Cut(split, layout, lambda: sample))


@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_has_its_part_of_the_whole(tied):
    """All parts together are the model as one process makes it; its ends may share a weight."""

    def model():
        return GPT(
            GPTConfig(num_layers=2, num_heads=2, width=16, context=8, vocabulary=32, tied=tied)
        )

    with seeded(3, torch.device("cpu")):
        whole = dict(model().named_parameters())
    parts = [held(rank, model=model) for rank in range(3)]
    names = [dict(part.named_parameters()) for part in parts]
    assert set().union(*names) == set(whole)
    for part in names:
        assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    assert parts[0].shared == ({"token_embedding.weight": (0, 2)} if tied else {})


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.tensor([1.0, 2.0]))
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor([3.0]))


def test_numbers_that_are_written_down_in_a_model():
    """`torch.tensor(…)` leaves no trace where there is no memory, and must not shift the rest."""

    def model():
        return nn.Sequential(Written(), nn.Linear(8, 8))

    with seeded(3, torch.device("cpu")):
        whole = model()
    whole = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for rank in range(2):
        part = held(rank, model=model, owners=(0, 1))
        tensors = [*part.named_parameters(), *part.named_buffers()]
        assert tensors
        assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors)


def test_what_other_ranks_hold_has_no_memory_here(monkeypatch):
    """While the model is made, too: at most one tensor beside the wanted ones at a time."""
    made = []
    build = building.build

    def watched(*args):
        made.append(build(*args))
        return made[-1]

    monkeypatch.setattr(building, "build", watched)
    part = held(1)
    own = {p.data_ptr() for p in part.parameters()}
    for name, tensor in made[0].named_parameters():
        size = tensor.untyped_storage().nbytes()
        assert bool(size) == (tensor.data_ptr() in own and size > 0), name
    assert sum(p.untyped_storage().nbytes() for p in made[0].parameters()) == sum(
        p.nbytes for p in part.parameters()
    )


def test_a_parameter_made_of_another_ranks_is_refused():
    """Its value cannot be known here; the message says what to do."""

    def model():
        row = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with torch.no_grad():
            row[1].weight.copy_(row[0].weight * 2)
        return row

    with pytest.raises(ValueError, match="computes a parameter of one stage from a parameter"):
        held(1, model=model, owners=(0, 1))
    assert held(0, model=model, owners=(0, 1)).stage(0) is not None


def test_a_model_that_cannot_be_made_without_memory_is_made_whole():
    """With a warning: it works, and costs what it costs."""

    def model():
        row = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        float(row[0].weight.detach().sum())
        return row

    with pytest.warns(UserWarning, match="made whole on every rank"):
        part = held(1, model=model, owners=(0, 1))
    assert [name for name, _ in part.named_parameters()] == ["1.weight", "1.bias"]


def test_blocks_that_are_not_the_models_or_leave_some_out():
    """Both are named."""
    row = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"in no block: 2\.weight, 2\.bias"):
        held(0, given=row, owners=(0, 1), split=lambda m: list(m)[:2])
    with pytest.raises(ValueError, match="not the model's; blocks must be parts"):
        held(0, given=row, owners=(0, 1), split=lambda m: [m, nn.Linear(2, 2)])
    idle = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match="rank 1 would have nothing to train"):
        held(0, given=idle, owners=(0, 1), split=[1, 1])


@given(num=st.integers(1, 40), num_microbatches=st.integers(1, 12))
def test_batches_come_apart_into_equal_pieces(num, num_microbatches):
    """Every sample is in one piece; what fills them up is dropped again, from every tensor."""
    pieces = Pieces(num, num_microbatches)
    inputs = torch.arange(num)
    filled = pieces.fill(inputs)
    assert len(filled) == pieces.size * num_microbatches
    assert sum(pieces.sizes) == num
    for piece, cut, size in zip(filled.split(pieces.size), pieces.cuts, pieces.sizes, strict=True):
        assert piece[:size].tolist() == list(range(cut.start, cut.stop))
    output = pieces.drop_filling({"a": filled * 2, "b": (filled, torch.tensor(3))})
    assert output["a"].tolist() == (inputs * 2).tolist()
    assert output["b"][0].tolist() == inputs.tolist()
    assert int(output["b"][1]) == 3
