"""Which parts of a model `TensorParallel` cuts, and along which dimension."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from nbdist.train import GPT, GPTConfig, TensorParallel
from nbdist.train.parting import Piece, pieces_of
from nbdist.train.strategies.axes import Axes, Portion
from nbdist.train.strategies.divided import without_memory
from nbdist.train.strategies.panels import hold
from nbdist.train.strategies.torch_tensor import Tensors, planned

SMALL = GPTConfig(num_layers=2, num_heads=2, width=8, context=4, vocabulary=16)


def test_the_plan_of_gpt_has_two_pairs_in_each_block():
    """The first of each by columns, which torch keeps as rows of the weight, the second by rows."""
    whole = without_memory(GPT(SMALL))
    dims = Tensors(Portion(0, 2), torch.device("cpu"), Axes()).cut(whole, GPT(SMALL).tensor_plan(2))
    expected = {}
    for block in ("blocks.0.", "blocks.1."):
        for layer in (block + "attention.query_key_value", block + "mlp.widen"):
            expected |= {f"{layer}.weight": 0, f"{layer}.bias": 0}
        for layer in (block + "attention.onto_stream", block + "mlp.onto_stream"):
            expected |= {f"{layer}.weight": 1, f"{layer}.bias": None}
    assert dims == expected


def test_a_rank_holds_its_panels_of_the_values_of_the_whole():
    """Cut where the plan says so; a module that the user has made is left as it is."""
    for is_given in (False, True):
        torch.manual_seed(5)
        given = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))

        def make(given=given, is_given=is_given):
            torch.manual_seed(5)
            made = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
            return given if is_given else made

        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        held = hold(
            make,
            is_given=is_given,
            plan_of=lambda *_, its=plan: its,
            portion=Portion(1, 2),
            axes=Axes(),
        )
        assert pieces_of(held) == {
            "0.weight": Piece((2, 0), (2, 3)),
            "0.bias": Piece((2,), (2,)),
            "2.weight": Piece((0, 2), (2, 2)),
            "2.bias": Piece((0,), (2,)),
        }
        own = dict(held.named_parameters())
        assert torch.equal(own["0.weight"], given[0].weight[2:])
        assert torch.equal(own["2.weight"], given[2].weight[:, 2:])
        assert torch.equal(own["2.bias"], given[2].bias)
        own["2.weight"].data.zero_()
        assert held.whole[2].weight.to_local().eq(0).all()
        assert given[2].weight.ne(0).any()
        assert [name for name, _ in held.source] == (list(own) if is_given else [])


def test_names_may_be_patterns():
    """Each part of a name is told apart by itself, as torch does it."""
    first, second = ColwiseParallel(), RowwiseParallel()
    found = planned(GPT(SMALL), {"blocks.*.mlp.widen": first, "blocks.1.*": second})
    assert [(name, style) for name, style in found if style is first] == [
        ("blocks.0.mlp.widen", first),
        ("blocks.1.mlp.widen", first),
    ]
    assert ("blocks.1.mlp", second) in found
    assert ("blocks.1.mlp.widen", second) not in found
    with pytest.raises(ValueError, match=r"no part of the model is named 'blocks\.2\.mlp'"):
        planned(GPT(SMALL), {"blocks.2.mlp": first})


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"plan": "mine"}, TypeError, "plan is 'mine'; it must be"),
        ({"plan": {}}, TypeError, "it must be"),
        ({"plan": {"0": "columns"}}, TypeError, "ParallelStyle"),
        ({"plan": {"0": ColwiseParallel}}, TypeError, "such as ColwiseParallel()"),
        ({"plan": {0: ColwiseParallel()}}, TypeError, "names of the model's parts"),
        ({"copy_every": -1}, ValueError, "copy_every is -1"),
    ],
)
def test_settings_are_checked(arguments, kind, words):
    """The message says what is allowed."""
    with pytest.raises(kind) as caught:
        TensorParallel(**arguments)
    assert words in str(caught.value)


def test_a_model_may_have_a_plan_of_its_own():
    """As nbdist's GPT has; what is given comes first, and who has none is told so."""

    class Own(nn.Module):
        def tensor_plan(self, num_ranks):
            return {"a": num_ranks}

    style = ColwiseParallel()
    assert TensorParallel().plan_of(Own(), 3) == {"a": 3}
    assert TensorParallel({"b": style}).plan_of(Own(), 3) == {"b": style}
    with pytest.raises(ValueError, match="for a Linear give plan="):
        TensorParallel().plan_of(nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="num_heads=2, which 3 ranks cannot share alike"):
        TensorParallel().plan_of(GPT(SMALL), 3)


def test_it_says_what_it_costs():
    """In one sentence with the formula."""
    assert "2(n−1)/n times the bytes that pass" in TensorParallel().describe()
