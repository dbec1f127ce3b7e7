"""From the states of ranks that hold parts of a model to that of a rank with another part."""

import pytest
import torch
from torch import nn

from nbdist.train.parting import Gathered, GatheredPieces, Piece, names_by_group


def build(names):
    """A part of a model of five parameters; values follow from the names."""
    part = nn.ParameterDict({n: nn.Parameter(torch.full((2,), float(ord(n)))) for n in names})
    part.register_buffer("seen", torch.tensor(float(len(names))))
    return part


def optimizer_of(part, lr=0.1):
    """Two groups: vowels have no weight decay."""
    named = list(part.named_parameters())
    vowels = [p for n, p in named if n in "ae"]
    others = [p for n, p in named if n not in "ae"]
    groups = [{"params": others, "weight_decay": 0.5}, {"params": vowels, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def trained(names, lr):
    """The state of a rank that has made a step."""
    part = build(names)
    optimizer = optimizer_of(part, lr)
    for name, parameter in part.named_parameters():
        parameter.grad = torch.full((2,), float(ord(name)))
    optimizer.step()
    return {
        "parameters": dict(part.named_parameters()),
        "buffers": dict(part.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "groups": names_by_group(part, optimizer),
        "counters": {"step": 1},
        "scheduler": None,
        "registered": {},
    }


@pytest.mark.parametrize("names", ["bcd", "a", "e", "abcde", "bd"])
def test_a_part_has_what_the_whole_has(names):
    """Values, what the optimizer keeps of each, and the settings of each group, by name."""
    gathered = Gathered(names, ["seen"])
    assert not gathered
    for state in (trained("ab", lr=0.3), trained("cd", lr=0.3), trained("e", lr=0.3)):
        gathered.add(state)
    assert gathered
    part = build(names)
    optimizer = optimizer_of(part)
    groups = names_by_group(part, optimizer)
    state = gathered.state(groups, optimizer.state_dict())
    whole = trained("abcde", lr=0.3)
    assert state["counters"] == {"step": 1}
    assert set(state["parameters"]) == set(names)
    for name in names:
        assert torch.equal(state["parameters"][name], whole["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])
    of_whole = {n: whole["optimizer"]["state"][i] for n, i in numbers(whole)}
    for name, parameter in part.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], of_whole[name]["exp_avg"])
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.3]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    assert names_by_group(part, optimizer) == groups


def numbers(state):
    """Pairs of a parameter's name and its number in the optimizer."""
    for names, group in zip(state["groups"], state["optimizer"]["param_groups"], strict=True):
        yield from zip(names, group["params"], strict=True)


def some_rows(start, stop, lr):
    """The state of a rank that has these rows of a parameter of ten, and has made a step."""
    part = nn.ParameterDict({"a": nn.Parameter(torch.arange(float(start), stop))})
    optimizer = torch.optim.AdamW(part.named_parameters(), lr=lr)
    part["a"].grad = torch.arange(float(start), stop)
    optimizer.step()
    return {
        "parameters": dict(part.named_parameters()),
        "buffers": {},
        "optimizer": optimizer.state_dict(),
        "groups": names_by_group(part, optimizer),
        "offsets": {"a": [start]},
        "counters": {"step": 1},
        "scheduler": None,
        "registered": {},
    }


@pytest.mark.parametrize(
    ("had", "wanted"),
    [
        ([(0, 4), (4, 8), (8, 10)], (3, 9)),
        ([(0, 5), (5, 10)], (0, 10)),
        ([(0, 10)], (5, 10)),
        ([(0, 5), (5, 10), (10, 10)], (10, 10)),
        ([(3, 9)], (3, 9)),
    ],
)
def test_rows_come_out_of_the_rows_of_others(had, wanted):
    """Just those that are wanted, each with its own moments; a count of steps stays one number."""
    gathered = GatheredPieces({"a": Piece((wanted[0],), (wanted[1] - wanted[0],))}, [])
    for start, stop in had:
        gathered.add(some_rows(start, stop, 0.1))
    expected = some_rows(*wanted, 0.1)
    state = gathered.state([["a"]], expected["optimizer"])
    assert torch.equal(state["parameters"]["a"], expected["parameters"]["a"])
    moments, its = state["optimizer"]["state"][0], expected["optimizer"]["state"][0]
    assert all(torch.equal(moments[key], its[key]) for key in its)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1


def some_of(piece):
    """The state of a rank that has this piece of a matrix of 4 × 6."""
    whole = torch.arange(24.0).view(4, 6)
    mine = whole[tuple(slice(at, at + num) for at, num in zip(*piece, strict=True))]
    return {
        "parameters": {"a": mine},
        "buffers": {},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": -mine}},
            "param_groups": [{"params": [0], "lr": 0.1}],
        },
        "groups": [["a"]],
        "offsets": {"a": list(piece.offsets)},
        "counters": {"step": 1},
        "scheduler": None,
        "registered": {},
    }


ROWS = [Piece((0, 0), (3, 6)), Piece((3, 0), (1, 6))]
COLUMNS = [Piece((0, 0), (4, 3)), Piece((0, 3), (4, 3))]
WHOLE = [Piece((0, 0), (4, 6))]


@pytest.mark.parametrize("had", [ROWS, COLUMNS, WHOLE, [*COLUMNS, *WHOLE], COLUMNS[::-1]])
@pytest.mark.parametrize("wanted", [*ROWS, *COLUMNS, *WHOLE, Piece((1, 2), (2, 3))])
def test_a_piece_comes_out_of_any_pieces(had, wanted):
    """Rows, columns or both, in any order, also where several have the same."""
    gathered = GatheredPieces({"a": wanted}, [])
    for piece in had:
        gathered.add(some_of(piece))
    expected = some_of(wanted)
    state = gathered.state([["a"]], expected["optimizer"])
    assert torch.equal(state["parameters"]["a"], expected["parameters"]["a"])
    moments, its = state["optimizer"]["state"][0], expected["optimizer"]["state"][0]
    assert all(torch.equal(moments[key], its[key]) for key in its)
