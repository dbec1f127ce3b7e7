"""Where memory runs out, the error says for what, and what would need less."""

import gc
import resource
import weakref

import pytest
import torch
from torch import nn
from trainers import FakePort, go, make

from nbdist.errors import OutOfMemory, forget
from nbdist.train import DataParallel, LocalSGD, Pipeline
from nbdist.train.memory import explained, is_exhausted

TORCHS = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 400 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (TORCHS, True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_says_that_memory_has_run_out(error, answer):
    """torch on the CPU raises a plain RuntimeError."""
    assert is_exhausted(error) is answer


@pytest.mark.parametrize(
    ("strategy", "words"), [(DataParallel(), r"strategy=Pipeline"), (Pipeline(2), "copy_every=0")]
)
def test_it_says_what_would_need_less(monkeypatch, strategy, words):
    """Every strategy knows; the limit of the process is told, where it has one."""
    limits = {resource.RLIMIT_DATA: 300_000_000, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    said = explained(TORCHS, strategy, torch.nn.Linear(1000, 1000, bias=False))
    assert isinstance(said, OutOfMemory)
    assert "1,000,000 parameters, 4 MB" in str(said)
    assert "RLIMIT_DATA is 300 MB)" in str(said)
    assert words in str(said)
    assert said.__cause__ is TORCHS


def test_other_errors_are_raised_as_they_are():
    """And so is one that has been explained."""
    error = RuntimeError("shapes do not fit")
    assert explained(error, DataParallel()) is error
    said = explained(TORCHS, DataParallel())
    assert explained(said, DataParallel()) is said


def fail():
    raise TORCHS


def test_a_run_ends_with_it():
    """In a step, and where the trainer is made."""
    trainer, port = make(), FakePort(3)
    trainer.model.register_forward_hook(lambda *_: fail())
    with pytest.raises(OutOfMemory, match="this rank holds"):
        go(trainer, port)
    assert "memory ran out in training" in dict(port.told)["raised"]
    with pytest.raises(OutOfMemory, match="while the model was being made"):
        make(model=fail)


@pytest.fixture
def uncollected():
    """Python looks for no cycles meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by(trainer):
    """What it consists of, watched."""
    state = trainer._state
    return [weakref.ref(part) for part in (state, state.module, state.optimizer, state.exchange)]


STRATEGIES = (DataParallel(), Pipeline(1, "1f1b", 2, copy_every=0), LocalSGD(2))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_what_a_trainer_holds_goes_with_it(strategy):
    """At once: its parts hold one another in no circle, for which memory would have to wait."""
    make(
        model=lambda: nn.Sequential(nn.Linear(4, 1)), strategy=strategy
    )  # torch's own first time makes circles
    gc.collect()
    parts = held_by(make(model=lambda: nn.Sequential(nn.Linear(4, 1)), strategy=strategy))
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("uncollected")
def test_an_error_keeps_nothing_of_a_trainer():
    """Once it has been told, and what its frames hold was let go."""
    make()
    gc.collect()

    def run_out(*_):
        raise MemoryError

    trainer, port = make(), FakePort(3)
    trainer.model.register_forward_hook(run_out)
    parts = held_by(trainer)
    try:
        go(trainer, port)
    except OutOfMemory as error:
        forget(error)
    del trainer, port
    assert [part() for part in parts] == [None] * len(parts)


class Circle:
    """Holds itself, as torch's wrappers do."""

    def __init__(self):
        self.own = self


@pytest.mark.usefixtures("uncollected")
def test_what_trainers_that_are_gone_left_makes_room_for_the_next():
    """Also where only cycles hold it; those that live keep what they have."""
    trainer = make()
    trainer._state.circle = circle = Circle()
    circle.state = trainer._state
    parts, other = held_by(trainer), make()
    kept = held_by(other)
    del trainer, circle
    assert parts[0]() is not None
    make()
    assert [part() for part in parts] == [None] * len(parts)
    assert None not in [part() for part in kept]
