"""The engines' variables: what an engine tells of one, and how ranks are compared."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainers import make as make_trainer

from nbdist.engine import entry
from nbdist.engine import variables as on_engine
from nbdist.engine.variables import LIMIT_S, describe, describe_all
from nbdist.protocol import calls, values
from nbdist.protocol.variables import MAX_NAMES, MAX_NUMBERS, Described
from nbdist.session.variables import compare, variables_of


class Holder:
    """An object of the user's."""

    def __init__(self, **parts):
        self.__dict__ |= parts


def form(value):
    told = describe("x", value)
    return told.type, told.shape, told.dtype, told.device, told.text


# ---- on an engine


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, ("int", "", "", "", "3")),
        (0.1, ("float", "", "", "", "0.1")),
        (10**500, ("int", "", "", "", "1661 bits")),
        ("a" * 50, ("str", "", "", "", f"'{'a' * 40}' …")),
        ([1, 2], ("list", "len 2", "", "", "")),
        (torch.zeros(2, 3), ("Tensor", "(2, 3)", "float32", "cpu", "")),
        (np.zeros(2, "int16"), ("ndarray", "(2,)", "int16", "", "")),
        (torch.nn.Linear(2, 3), ("Linear", "9 parameters", "float32", "cpu", "")),
        (torch.nn.ReLU(), ("ReLU", "0 parameters", "", "", "")),
        (torch.zeros(2, device="meta"), ("Tensor", "(2,)", "float32", "meta", "")),
    ],
)
def test_the_form_of_a_variable_is_told_without_its_value(value, expected):
    """Type, shape, dtype, device; of a number or text the value, shortened."""
    assert form(value) == expected


def test_a_trainer_is_compared_when_it_has_trained():
    """Before its first step each rank has weights of its own, which say nothing."""
    told = describe("t", make_trainer())
    assert (told.text, told.digest) == ("step 0", "")
    assert "has not trained yet" in told.not_compared


def test_a_trainer_that_has_trained_has_a_digest(monkeypatch):
    """It is not packed for it: its state may be as large as the memory that is left."""
    trainer = make_trainer()
    trainer.fit(1)
    monkeypatch.setattr(type(trainer), "pack", None)
    told = describe("t", {"held": trainer})
    assert told.digest
    assert told.not_sent == ""
    assert describe("t", trainer).text == "step 1"


def test_parts_of_something_larger_are_not_looked_at():
    """To look at what stands for parts on other ranks may be a collective, in which ranks hang."""

    class Part(torch.Tensor):
        def __tensor_flatten__(self):
            raise AssertionError

    value = [torch.zeros(1).as_subclass(Part)]
    assert describe("x", value).not_compared == "each rank holds a part of its own"
    assert describe("x", value[0]).num_numbers == 0


def test_what_cannot_be_sent_is_named_with_the_member_at_fault():
    """By the way to it from the name, through containers, objects, modules and closures."""
    lock = threading.Lock()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    model[1].guard = lock
    told = describe("h", Holder(a=1, b=[0, {"k": Holder(lock=lock)}]))
    assert "h (a Holder) cannot be sent: cannot pickle" in told.not_sent
    assert told.not_sent.endswith("; at fault: h.b[1]['k'].lock (a lock)")
    assert (told.digest, told.not_compared) == ("", told.not_sent)
    told = describe("model", model)
    assert "; at fault: model.1.guard (a lock); its state_dict() may be" in told.not_sent
    assert told.digest
    assert ".lock (a lock)" in describe("f", lambda: lock).not_sent
    assert describe("g", (n for n in ())).not_sent.startswith("g (a generator) cannot be sent")


def test_what_cannot_be_pulled_or_pushed_is_named_likewise():
    """With the member at fault, even where an object raises when it is looked into."""
    with pytest.raises(
        TypeError, match=r"cannot pickle .*; at fault: x\['a'\] \(a lock\)\. Nothing"
    ):
        values.pack_named({"x": {"a": threading.Lock()}})
    itself = Holder(lock=threading.Lock())
    itself.itself = itself
    with pytest.raises(TypeError, match=r"at fault: x\.lock \(a lock\)$"):
        values.pack_one("x", itself)

    class Broken:
        @property
        def __dict__(self):
            raise ValueError("no")

        def __reduce__(self):
            raise OSError("of the user's")

    with pytest.raises(TypeError, match=r"^x \(a Broken\) cannot be sent: of the user's$"):
        values.pack_one("x", Broken())


def test_an_object_that_cannot_be_looked_into_is_told_with_its_error():
    """Nothing that a variable raises spoils the list."""

    class Broken(list):
        def __len__(self):
            raise ValueError("no length")

    assert describe("x", Broken()).not_compared == "ValueError: no length"
    assert describe("x", Broken()).type == "Broken"


def test_large_values_are_compared_where_they_are_named(monkeypatch):
    """By the bytes of all their parts, or their number."""
    monkeypatch.setattr(on_engine, "MAX_BYTES", 1000)
    monkeypatch.setattr(on_engine, "MAX_PARTS", 30)
    for value in (torch.zeros(300), {"a": [torch.zeros(300)]}, [[] for _ in range(40)]):
        told = describe_all({"x": value}, ())["x"]
        assert (told.digest, told.not_compared) == ("", "it is large; %dist_vars x compares it")
        assert describe_all({"x": value}, ["x"])["x"].digest
    assert describe_all({"x": torch.zeros(200)}, ())["x"].digest


def test_when_the_time_is_up_only_forms_are_told():
    """The rest says how it is compared."""
    clock = count(0, 0.75 * LIMIT_S).__next__
    told = describe_all({"a": 1, "b": 2}, (), clock)
    assert told["a"].digest
    assert told["b"].not_compared == "there was no time left; %dist_vars b compares it"
    assert told["b"].text == "2"


def test_imports_are_left_out_and_names_are_bounded():
    """Imported modules are told only where they are named."""
    named = {f"n{index:04}": index for index in range(MAX_NAMES + 5)}
    assert len(describe_all(named, ())) == MAX_NAMES
    assert list(describe_all({"math": math, "x": 1}, ())) == ["x"]
    assert describe_all({"math": math, "x": 1}, ["math"])["math"].type == "module"


def test_describing_changes_nothing():
    """Neither values nor gradients nor what is bound."""
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = [model.weight.clone(), model.weight.grad.clone()]
    named = {"model": model, "opt": torch.optim.Adam(model.parameters()), "x": [1]}
    known = dict(named)
    describe_all(named, ())
    assert named == known
    assert torch.equal(model.weight, before[0])
    assert torch.equal(model.weight.grad, before[1])
    assert not named["opt"].state


def test_the_kernels_calls_land_here(monkeypatch):
    """They look at the user's names of this process's engine only."""
    names = {"x": torch.tensor([1.0, 2.0]), "m": torch.nn.Linear(1, 1), "a": np.arange(2)}
    engine = SimpleNamespace(names=lambda: names)
    monkeypatch.setattr(entry, "present", lambda: engine)
    assert set(on_engine.variables(())) == {"x", "m", "a"}
    got = {n: np.frombuffer(b).tolist() for n, b in on_engine.numbers(["x", "a", "gone"]).items()}
    assert got == {"x": [1.0, 2.0], "a": [0.0, 1.0]}
    assert len(on_engine.numbers(["m"])["m"]) == 16
    for name in (calls.VARIABLES, calls.NUMBERS):
        assert callable(eval(name))


def test_only_small_plain_numbers_can_be_asked_for():
    """Of others the distance is not worked out."""
    asked = {
        "few": torch.zeros(3), "many": torch.zeros(MAX_NUMBERS + 1),
        "complex": torch.zeros(2, dtype=torch.complex64), "texts": np.array(["a"]),
        "sparse": torch.zeros(2, 2).to_sparse(), "meta": torch.zeros(2, device="meta"),
        "module": torch.nn.Linear(2, 2), "number": 5,
    }  # fmt: skip
    told = {name: describe(name, value).num_numbers for name, value in asked.items()}
    assert told == {**dict.fromkeys(asked, 0), "few": 3, "module": 6}


# ---- side by side


def tensor(digest="d", shape="(2,)", **about):
    return Described(type="Tensor", shape=shape, digest=digest, num_numbers=2, **about)


def facts(found):
    return found.is_equal, found.like, found.differing, found.missing, found.why_not_compared


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([tensor(), tensor(), tensor()], (True, 0, (), (), "")),
        ([tensor("e"), tensor(), tensor()], (False, 1, (0,), (), "")),
        ([tensor(), tensor("e")], (False, 0, (1,), (), "")),
        ([tensor(), None], (False, 0, (), (1,), "")),
        ([tensor(), tensor(shape="(3,)")], (False, 0, (1,), (), "")),
        ([tensor(), tensor("", not_compared="late")], (None, 0, (), (), "late")),
        ([tensor(), tensor("", "(3,)", not_compared="late")], (False, 0, (1,), (), "")),
        ([tensor(device="cpu"), tensor(device="cuda:0")], (True, 0, (), (), "")),
    ],
)
def test_ranks_are_compared_by_form_and_digest(told, expected):
    """With the largest group, of which the lowest rank stands; unknown is neither yes nor no."""
    (found,) = compare({rank: {"x": one} if one else {} for rank, one in enumerate(told)})
    assert facts(found) == expected


def test_what_a_rank_did_not_come_to_is_not_missing():
    """Each rank tells of its first names only."""
    first = {f"n{index:04}": tensor() for index in range(MAX_NAMES)}
    found = compare({0: first, 1: {**first, "a": tensor(), "z": tensor()}})
    assert len(found) == MAX_NAMES
    assert [one.name for one in found if one.missing] == ["a"]


class Calls:
    """Stands for the calls of engines: notes what is asked, between begin and end."""

    def __init__(self, told, numbers):
        self.told, self.numbers, self.asked, self.holds = told, numbers, [], 0

    @contextmanager
    def between(self, ranks):
        assert ranks is None
        self.holds += 1
        yield "run"

    def call(self, function, run, names):
        assert run == "run"
        self.asked.append((function, names))
        return self.told if function == calls.VARIABLES else self.numbers


def test_how_far_ranks_are_apart_is_asked_for_what_differs_in_value_alone():
    """In the same hold; nan where one alone is no number, equal infinities are no distance."""
    forms = {"x": tensor, "same": tensor, "shape": tensor}
    told = {
        0: {**{name: make() for name, make in forms.items()}, "y": tensor()},
        1: {"x": tensor("e"), "same": tensor(), "shape": tensor(shape="(9,)"), "y": tensor("e")},
    }
    sent = {
        0: {"x": np.array([1.0, math.inf]).tobytes(), "y": np.array([1.0, math.nan]).tobytes()},
        1: {"x": np.array([3.5, math.inf]).tobytes(), "y": np.array([math.nan, 1.0]).tobytes()},
    }
    engines = Calls(told, sent)
    found = {one.name: one for one in variables_of(engines, ())}
    assert engines.asked == [(calls.VARIABLES, ()), (calls.NUMBERS, ["x", "y"])]
    assert engines.holds == 1
    assert found["x"].distance == {1: 2.5}
    assert math.isnan(found["y"].distance[1])
    assert found["shape"].distance == found["same"].distance == {}


def test_a_name_that_no_rank_has_is_refused():
    """It says that private names are not looked at."""
    with pytest.raises(ValueError, match="no rank has a variable _z, z"):
        variables_of(Calls({0: {}, 1: {}}, {}), ["z", "_z"])


def test_nothing_more_is_asked_where_all_are_equal():
    """One call is enough."""
    engines = Calls({0: {"x": tensor()}, 1: {"x": tensor()}}, {})
    assert [one.is_equal for one in variables_of(engines, ())] == [True]
    assert len(engines.asked) == 1
