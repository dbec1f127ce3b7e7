"""The user's names on an engine: told apart by digests, packed, taken over."""

from __future__ import annotations

import math
import threading
import types

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from trainers import FakePort, Samples, go
from trainers import make as make_trainer

from nbdist.engine.digests import fingerprint
from nbdist.engine.namespace import pack_names, take_names, to_cpu, user_names
from nbdist.protocol import values


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 3)


def trained(seed=0, steps=1):
    """A model and an optimizer that has made so many steps."""
    model = linear(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def wrapped(model):
    """A `DistributedDataParallel` without a group."""
    outer = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(outer)
    outer.module = model
    return outer


def made(source, name="f"):
    """What a cell of this source binds."""
    user_ns = {"__name__": "__main__"}
    exec(source, user_ns)
    return user_ns[name]


def kind(value):
    return fingerprint(value).partition(":")[0]


# ---- names


def test_names_are_those_that_the_user_made():
    """Not IPython's, not ours, not private ones; sorted."""
    user_ns = dict.fromkeys(
        (
            "model",
            "a",
            "_private",
            "__name__",
            "In",
            "Out",
            "exit",
            "get_ipython",
            "hidden",
            *values.OURS,
        )
    )
    assert user_names(user_ns, ["hidden"]) == ["a", "model"]


# ---- digests


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ("1", b"1"),
        (None, 0),
        (1j, 1),
        ([1, 2], [2, 1]),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
        (math, types),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(0), torch.zeros(0, 2)),
        ([torch.zeros(2)], [torch.ones(2)]),
        ([torch.zeros(2), torch.ones(2)], [torch.ones(2), torch.zeros(2)]),
        ([[1], 2], [[1, 2]]),
        ([[torch.zeros(1)], torch.ones(1)], [[torch.zeros(1), torch.ones(1)]]),
        ([[], []], [[[]]]),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),
        ((1, (2,)), (1, 2)),
        ([], {}),
        (linear(0), linear(1)),
        (linear(0), wrapped(linear(0))),
        (trained(steps=1)[1], trained(steps=2)[1]),
    ],
)
def test_different_values_have_different_digests(first, second):
    """In value, in kind, in shape or in type."""
    assert fingerprint(first) != fingerprint(second) != ""


MAKERS = {
    "an integer": lambda: 7,
    "not a number": lambda: float("nan"),
    "a text": lambda: "text",
    "a list": lambda: [1, {"a": (2.5, None)}],
    "a module of Python": lambda: math,
    "a tensor": lambda: torch.arange(6).reshape(2, 3),
    "a scalar tensor": lambda: torch.tensor(True),
    "a tensor of bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "an empty tensor": lambda: torch.zeros(0),
    "a list of tensors": lambda: [torch.ones(2), (torch.zeros(1),)],
    "a dict of tensors": lambda: {"w": torch.ones(2, requires_grad=True) * 2},
    "a model": linear,
    "a model with buffers": lambda: torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(3)),
    "a model without parameters": torch.nn.ReLU,
    "an optimizer": lambda: trained()[1],
    "a scheduler": lambda: torch.optim.lr_scheduler.StepLR(trained()[1], 3),
    "a function": lambda: made("def f(x):\n    return [y + 1 for y in x]"),
    "a class of a cell": lambda: made("class f:\n    x = 1"),
    "a data set": lambda: torch.utils.data.TensorDataset(torch.arange(3)),
    "a namespace of tensors": lambda: types.SimpleNamespace(w=torch.ones(2)),
    "a data class": lambda: made(
        "import dataclasses\n@dataclasses.dataclass\nclass f:\n    x: int = 1"
    ),
    "a class of modules": lambda: made(
        "import torch\nclass f(torch.nn.Module):\n    @property\n    def p(self):\n        return 1"
    ),
    "an object of a cell's class": lambda: made("class C:\n    x = 1\nf = C()"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_equal_values_have_equal_digests(make):
    """Made twice, as on two engines."""
    assert fingerprint(make()) == fingerprint(make()) != ""


def test_a_tensor_is_compared_by_what_it_holds():
    """Not by how it lies in memory, nor by the graph that it hangs in."""
    plain = torch.arange(6.0).reshape(2, 3)
    turned = torch.arange(6.0).reshape(2, 3).t().contiguous().t()
    assert fingerprint(turned) == fingerprint(plain)
    assert fingerprint(plain.clone().requires_grad_() * 1) == fingerprint(plain)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(1), "tensor"),
        (linear(), "module"),
        (wrapped(linear()), "ddp"),
        (trained()[1], "optimizer"),
        (torch.optim.lr_scheduler.StepLR(trained()[1], 3), "optimizer"),
        (math, "import"),
        (made("def f(): pass"), "function"),
        (1, "int"),
        ([1], "list"),
    ],
)
def test_a_digest_says_of_what_kind_the_value_is(value, expected):
    """The supervisor treats replicas and imports in their own ways."""
    assert kind(value) == expected


def test_running_means_do_not_tell_replicas_apart():
    """Each rank sees other data; the parameters are equal all the same."""
    first, second = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    first(torch.randn(4, 3))
    assert fingerprint(first) == fingerprint(second)
    with torch.no_grad():
        first.weight[0] = 2.0
    assert fingerprint(first) != fingerprint(second)


def test_a_module_without_parameters_is_compared_by_its_buffers():
    """They are all that it has."""
    first, second = (torch.nn.BatchNorm1d(3, affine=False) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    first(torch.randn(4, 3))
    assert fingerprint(first) != fingerprint(second)


def test_a_function_is_compared_by_its_code():
    """Wherever it stands; other constants, names or inner functions make another one."""
    same = made("\n\n# moved\ndef f(x):\n    return x + 1")
    assert fingerprint(made("def f(x):\n    return x + 1")) == fingerprint(same)
    sources = [
        "def f(x):\n    return x + 1",
        "def f(x):\n    return x + 2",
        "def f(x):\n    return x - 1",
        "def f(x):\n    return x.a",
        "def f(x):\n    return x.b",
        "def f(x):\n    return lambda: x + 1",
        "def f(x):\n    return lambda: x + 2",
    ]
    assert len({fingerprint(made(source)) for source in sources}) == len(sources)


def test_a_class_of_a_cell_is_compared_by_what_it_holds():
    """Another value, method or name makes another one; so for its objects."""
    sources = [
        "class C:\n    x = 1",
        "class C:\n    x = 2",
        "class C:\n    y = 1",
        "class C:\n    def x(self):\n        return 1",
        "class C:\n    def x(self):\n        return 2",
    ]
    assert len({fingerprint(made(source, "C")) for source in sources}) == len(sources)
    objects = [made(f"{source}\nf = C()\nf.a = 1") for source in sources]
    objects.append(made(f"{sources[0]}\nf = C()\nf.a = 2"))
    assert len(set(map(fingerprint, objects))) == len(objects)


def test_a_value_that_holds_itself_is_no_error():
    """It has a digest or none."""
    value = []
    value.append(value)
    assert isinstance(fingerprint(value), str)


class Grumpy:
    """Raises whatever is asked of it."""

    def __reduce__(self):
        raise RuntimeError("not me")


@pytest.mark.parametrize("value", [threading.Lock(), (x for x in ()), Grumpy(), [Grumpy()]])
def test_what_cannot_be_compared_has_no_digest(value):
    """And that is no error."""
    assert fingerprint(value) == ""


# ---- packing and taking over


def hand_over(donor, newcomer, *names):
    """Give names from one namespace to another; what failed there."""
    data, unsent = pack_names(donor, names)
    assert unsent == {}
    return take_names(newcomer, data, names)


def test_values_arrive():
    """Missing ones are bound, others replaced; what was not asked for stays."""
    newcomer = {"x": 0, "mine": 1}
    donor = {"x": 7, "t": torch.arange(3), "f": made("def f(x):\n    return x + 1"), "y": 5}
    data, failed = pack_names(donor, ["x", "t", "f", "y"])
    assert failed == {}
    assert take_names(newcomer, data, ["x", "t", "f", "elsewhere"]) == {}
    assert newcomer.keys() == {"x", "mine", "t", "f"}
    assert (newcomer["x"], newcomer["mine"], newcomer["f"](1)) == (7, 1, 2)
    assert torch.equal(newcomer["t"], torch.arange(3))


def test_what_cannot_be_packed_is_named_and_costs_the_others_nothing():
    """With the reason."""
    data, failed = pack_names({"lock": threading.Lock(), "x": 7}, ["lock", "x"])
    assert list(failed) == ["lock"]
    assert failed["lock"].startswith("cannot be sent: TypeError: cannot pickle")
    newcomer = {}
    assert take_names(newcomer, data, ["lock", "x"]) == {}
    assert newcomer == {"x": 7}


def test_a_newcomers_model_is_loaded_and_not_replaced():
    """So that its own optimizer goes on to hold its parameters."""
    model, optimizer = trained(seed=1, steps=0)
    newcomer = {"model": model, "optimizer": optimizer}
    trained_model, trained_optimizer = trained(seed=2, steps=3)
    donor = {"model": trained_model, "optimizer": trained_optimizer}
    assert hand_over(donor, newcomer, "model", "optimizer") == {}
    assert newcomer["model"] is model
    assert newcomer["optimizer"] is optimizer
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert {n: fingerprint(v) for n, v in newcomer.items()} == {
        n: fingerprint(v) for n, v in donor.items()
    }


def test_a_model_that_is_missing_is_given_whole():
    """Its class and its state."""
    newcomer = {}
    model = linear(3)
    assert hand_over({"model": model}, newcomer, "model") == {}
    assert newcomer["model"] is not model
    assert fingerprint(newcomer["model"]) == fingerprint(model)


class Counter:
    """As small as a trainer can be."""

    is_replicated = has_twin = True
    leaves_by = 0

    def __init__(self, step, is_replicated=True):
        self.step, self.is_replicated = step, is_replicated

    async def drive(self, port):
        raise NotImplementedError

    def pack(self):
        return str(self.step).encode()

    def unpack(self, data):
        self.step = int(data)

    def digest(self):
        return f"step {self.step}"

    def parameter_digest(self):
        return ""

    def owned(self):
        return [self]


def test_a_trainer_is_loaded_in_place_or_given_whole():
    """One that the replay made takes over the state; where none is, the donor's arrives."""
    data, failed = pack_names({"t": Counter(7)}, ["t"])
    assert not failed
    mine = Counter(0)
    namespace, empty = {"t": mine}, {}
    assert not take_names(namespace, data, ["t"])
    assert not take_names(empty, data, ["t"])
    assert namespace["t"] is mine
    assert mine.step == empty["t"].step == 7


def test_a_trainer_is_compared_by_its_own_digest():
    """Equal states are equal, whatever else the objects hold."""
    assert fingerprint(Counter(3)) == fingerprint(Counter(3)) != fingerprint(Counter(4))
    assert kind(Counter(3)) == "trainer"
    assert kind(Counter) == "class"


def test_a_trainer_that_is_each_ranks_own_is_given_to_nobody():
    """It counts as equal everywhere: the stages of one rank are no stages of another's."""
    assert fingerprint(Counter(3, is_replicated=False)) == fingerprint(
        Counter(0, is_replicated=False)
    )


@pytest.mark.parametrize("make", [lambda: trained()[1], lambda: wrapped(linear())])
def test_what_hangs_on_something_else_is_not_given_whole(make):
    """An optimizer would hold parameters of nobody, a wrapped model a group that is not there."""
    newcomer = {}
    failed = hand_over({"x": make()}, newcomer, "x")
    assert "only its state could be sent" in failed["x"]
    assert newcomer == {}


def test_a_wrapped_model_is_loaded():
    """Where the newcomer has wrapped one itself."""
    donor, newcomer = {"d": wrapped(linear(1))}, {"d": wrapped(linear(2))}
    before = newcomer["d"]
    assert hand_over(donor, newcomer, "d") == {}
    assert newcomer["d"] is before
    assert fingerprint(before) == fingerprint(donor["d"])


def test_a_state_that_does_not_fit_is_named_and_costs_the_others_nothing():
    """The newcomer's model has another shape: it keeps it, and is told."""
    newcomer = {"model": torch.nn.Linear(5, 5)}
    failed = hand_over({"model": linear(), "x": 7}, newcomer, "model", "x")
    assert list(failed) == ["model"]
    assert failed["model"].startswith("could not be taken over: RuntimeError")
    assert newcomer["model"].in_features == 5
    assert newcomer["x"] == 7


def after(num, **changes):
    """A trainer with so many steps behind it."""
    trainer = make_trainer(**changes)
    go(trainer, FakePort(num))
    return trainer


def test_a_trainer_is_compared_by_its_state():
    """One that was given whole, and one that was loaded, are equal to the one that gave; before the
    first step all are."""
    trainer, loaded = after(3), make_trainer()
    given = {}
    assert hand_over({"t": trainer}, given, "t") == {}
    assert hand_over({"t": trainer}, {"t": loaded}, "t") == {}
    assert fingerprint(trainer) == fingerprint(given["t"]) == fingerprint(loaded)
    assert fingerprint(trainer) != fingerprint(after(2))
    assert fingerprint(make_trainer()) == fingerprint(make_trainer(seed=4))
    assert fingerprint([trainer]) == fingerprint([loaded])
    assert fingerprint(trainer).startswith("trainer:")


def test_a_newcomers_trainer_is_loaded_and_not_replaced():
    """Even where the donor's holds what no other process can be given."""
    odd = Samples()
    odd.lock = threading.Lock()
    newcomer = {"t": make_trainer()}
    mine, model = newcomer["t"], newcomer["t"].model
    assert hand_over({"t": after(3, data=odd)}, newcomer, "t") == {}
    assert newcomer["t"] is mine
    assert mine.model is model
    assert (mine.step, mine.digest()) == (3, after(3).digest())
    assert "only its state" in hand_over({"t": after(3, data=odd)}, {}, "t")["t"]


class Awkward:
    """Can be packed and not unpacked."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_value_that_cannot_be_unpacked_is_named():
    """What the newcomer had stays."""
    newcomer = {"x": 1}
    failed = hand_over({"x": Awkward()}, newcomer, "x")
    assert failed["x"].startswith("could not be taken over: ValueError: invalid literal")
    assert newcomer == {"x": 1}


# ---- on the CPU


def test_tensors_are_cut_loose_wherever_they_stand():
    """In lists, tuples and dicts; other containers and values stay what they are."""
    hanging = torch.ones(2, requires_grad=True) * 2
    given = {"a": [hanging, (hanging, 1)], "b": "text", "c": {hanging}}
    found = to_cpu(given)
    assert not found["a"][0].requires_grad
    assert not found["a"][1][0].requires_grad
    assert type(found["a"][1]) is tuple
    assert (found["a"][1][1], found["b"]) == (1, "text")
    assert found["c"] is given["c"]
    assert hanging.requires_grad


@pytest.mark.parametrize(
    ("name", "says"), [("rank", "nbdist itself binds rank"), ("a b", "'a b' cannot be the name")]
)
def test_what_cannot_be_a_users_name_is_not_sent(name, says):
    """And nothing beside it."""
    with pytest.raises(ValueError, match=rf"{says}.*Nothing was sent"):
        values.pack_named({"fine": 1, name: 2})
