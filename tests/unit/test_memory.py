"""Where memory runs out, the error says for what, and what would need less."""

import resource

import pytest
import torch
from trainers import FakePort, go, make

from nbdist.errors import OutOfMemory
from nbdist.train import DataParallel, Pipeline
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
