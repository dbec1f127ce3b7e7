"""Which rows of a model a rank has, and which of its parts are gathered together."""

import pytest
import torch
from torch import nn

from nbdist.train import GPT, GPTConfig, Sharded
from nbdist.train.strategies.axes import Portion
from nbdist.train.strategies.divided import made_together
from nbdist.train.strategies.slices import bundles_of


def gpt(tied=False):
    with torch.device("meta"):
        return GPT(GPTConfig(num_layers=2, num_heads=1, width=8, context=4, tied=tied))


@pytest.mark.parametrize(("num", "num_ranks"), [(1, 3), (2, 3), (7, 3), (9, 3), (10, 4), (3, 1)])
def test_rows_are_cut_as_torch_cuts_them(num, num_ranks):
    """Together they are all, and each rank's are those of torch.chunk."""
    whole = torch.arange(num)
    chunks = [*whole.chunk(num_ranks), *[whole[:0]] * num_ranks][:num_ranks]
    for rank, chunk in enumerate(chunks):
        assert torch.equal(whole[Portion(rank, num_ranks).rows(num)], chunk)
    assert Portion(0, num_ranks).num_padded(num) == len(chunks[0]) * num_ranks


def test_every_parameter_is_in_one_bundle():
    """Blocks that are modules of the model, in their order, and last of all what is in none."""
    model = gpt()
    bundles = bundles_of(model, Sharded().blocks_of(model))
    assert [bundle.module for bundle in bundles] == [*model.blocks, model]
    names = [name for bundle in bundles for name in bundle.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert bundles[-1].names == [n for n, _ in model.named_parameters() if "blocks" not in n]


def test_a_parameter_of_two_blocks_is_in_neither():
    """It is gathered with what is in no block, for the whole pass."""
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    third.weight = first.weight
    model = nn.Sequential(first, second, third)
    bundles = bundles_of(model, list(model))
    assert [bundle.names for bundle in bundles] == [
        ["1.weight", "1.bias"],
        ["0.weight", "0.bias", "2.bias"],
    ]


def test_blocks_in_one_another_are_gathered_once():
    """The outer one, where it comes first, has all of the inner."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    bundles = bundles_of(model, [model[0], model[0][0], model, nn.Linear(1, 1)])
    assert [bundle.module for bundle in bundles] == [model[0], model]


def test_blocks_are_made_in_passes_of_a_ranks_part():
    """No pass makes more than a rank's part of the model, or than its largest bundle."""
    bundles = bundles_of(gpt(), Sharded().blocks_of(gpt()))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 40))
    bundles = bundles_of(model, list(model))
    for num_ranks in (1, 2, 4, 8):
        parts = list(made_together(bundles, num_ranks))
        assert [bundle for part in parts for bundle in part] == bundles
        total = sum(bundle.num_bytes for bundle in bundles)
        most = max(total / num_ranks, *(bundle.num_bytes for bundle in bundles))
        assert all(sum(bundle.num_bytes for bundle in part) <= most for part in parts)
        assert len(parts) <= 2 * num_ranks


def test_blocks_are_found_or_named():
    """As a pipeline would be cut, by the members of ModuleLists, by names, or by a function."""
    model = gpt()

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    listed = Listed()
    assert Sharded().blocks_of(listed) == list(listed.layers)
    assert Sharded().blocks_of(nn.Linear(2, 2)) == []
    assert Sharded(["blocks.1", "head"]).blocks_of(model) == [model.blocks[1], model.head]
    assert Sharded(lambda its: its.blocks).blocks_of(model) == list(model.blocks)


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"blocks": "all"}, TypeError, "blocks is 'all'; it must be"),
        ({"blocks": 3}, TypeError, "blocks is 3"),
        ({"blocks": [1]}, TypeError, "the names of the blocks"),
        ({"copy_every": -1}, ValueError, "copy_every is -1"),
    ],
)
def test_arguments_that_cannot_be(arguments, kind, match):
    """Each is refused with its name, its value and what may be."""
    with pytest.raises(kind, match=match):
        Sharded(**arguments)


def test_what_it_costs_is_one_sentence():
    """`describe` has the formula of what a rank sends."""
    assert "3(n−1)/n times the parameters' bytes" in Sharded().describe()
