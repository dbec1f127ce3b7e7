"""What a trainer says of arguments that it cannot use: the name, the value, what may be."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, TensorDataset
from trainers import Samples, make

from nbdist.train import DataParallel, Evaluate
from nbdist.train.checks import shown


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def nothing_trains():
    return nn.Linear(4, 1).requires_grad_(False)


def stranger(_named):
    return torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": 3}, TypeError, ["model is 3", "a Module, or a function that returns one"]),
        ({"model": lambda: 3}, TypeError, ["model() returned a int", "must be a Module"]),
        ({"model": nothing_trains}, ValueError, ["Linear", "nothing to train"]),
        ({"optimizer": "sgd"}, TypeError, ["optimizer is 'sgd'", "to an Optimizer"]),
        ({"optimizer": lambda _: 3}, TypeError, ["returned a int", "torch.optim.AdamW(named"]),
        ({"optimizer": stranger}, ValueError, ["1 parameters that are not the model's", "(3,)"]),
        ({"loss": 3}, TypeError, ["loss is 3", "a function"]),
        ({"loss": None}, ValueError, ["one of loss and forward", "neither"]),
        ({"forward": lambda m, b: (m, b)}, ValueError, ["one of loss and forward", "both"]),
        ({"forward": 3, "loss": None}, TypeError, ["forward is 3", "a function"]),
        ({"collate": 3}, TypeError, ["collate is 3", "a function"]),
        ({"data": Stream()}, TypeError, ["data is a Stream", "map-style", "seed and step alone"]),
        ({"data": 3}, TypeError, ["data is a int", "map-style", "callable"]),
        ({"data": iter([1])}, TypeError, ["cannot be indexed", "map-style"]),
        ({"data": (torch.zeros(3), torch.zeros(3))}, TypeError, ["2 tensors", "TensorDataset"]),
        ({"data": []}, ValueError, ["data is empty"]),
        ({"data": Samples(5)}, ValueError, ["5 samples", "global_batch is 8", 'tail="short"']),
        ({"num_workers": -1}, ValueError, ["num_workers is -1", "0 or more"]),
        ({"tail": "pad"}, ValueError, ["tail is 'pad'", "['drop', 'short']"]),
        ({"global_batch": 0}, ValueError, ["global_batch is 0", "1 or more"]),
        ({"global_batch": 8.0}, ValueError, ["global_batch is 8.0", "whole number"]),
        ({"global_batch": True}, ValueError, ["global_batch is True", "whole number"]),
        ({"seed": -1}, ValueError, ["seed is -1", "0 or more"]),
        ({"scheduler": 3}, TypeError, ["scheduler is 3", "a function"]),
        ({"scheduler": lambda _: 3}, TypeError, ["returned a int", "LRScheduler"]),
        (
            {"scheduler": lr_scheduler.ReduceLROnPlateau},
            TypeError,
            ["ReduceLROnPlateau", "needs a metric"],
        ),
        ({"accumulate": 0}, ValueError, ["accumulate is 0", "1 or more"]),
        ({"accumulate": 9}, ValueError, ["accumulate is 9", "global_batch, 8"]),
        ({"clip_norm": 0}, ValueError, ["clip_norm is 0", "more than 0"]),
        ({"clip_norm": math.nan}, ValueError, ["clip_norm is nan", "more than 0"]),
        ({"precision": "fp8"}, ValueError, ["precision is 'fp8'", "['float32', 'bf16']"]),
        ({"evaluate": 3}, TypeError, ["evaluate is 3", "Evaluate(data, every=…)"]),
        ({"strategy": "ddp"}, TypeError, ["strategy is 'ddp'", "DataParallel()"]),
        ({"strategy": DataParallel}, TypeError, ["strategy is <class", "DataParallel()"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be(changes, error, words):
    """The message names the argument and its value, and says what may be."""
    with pytest.raises(error) as raised:
        make(**changes)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bucket_mb": 0}, ["bucket_mb is 0", "more than 0"]),
        ({"shards": 0}, ["shards is 0", "1 or more"]),
        ({"compress": "fp8"}, ["compress is 'fp8'", "[None, 'fp16', 'bf16', 'int8', 'topk'"]),
        ({"topk_share": 0}, ["topk_share is 0", "more than 0"]),
        ({"topk_share": 1.5}, ["topk_share is 1.5", "at most 1"]),
        ({"powersgd_rank": 0}, ["powersgd_rank is 0", "1 or more"]),
        ({"exact": True}, ["exact is True", "leave it at False"]),
    ],
)
def test_a_strategy_that_cannot_be(settings, words):
    """What is not there is refused when it is asked for, not when it crashes.

    Compression hooks that torch offers and gloo cannot do end in a crash: pytorch#58467.
    """
    with pytest.raises(ValueError, match="is") as raised:
        DataParallel(**settings)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"every": 0}, ValueError, ["every is 0", "1 or more"]),
        ({"batch": 0}, ValueError, ["batch is 0", "1 or more"]),
        ({"metrics": [len]}, TypeError, ["metrics is [", "a dict"]),
        ({"metrics": {"top": 3}}, TypeError, ["metrics['top'] is 3", "a function"]),
        ({"metrics": {"loss": len}}, ValueError, ['metrics has "loss"', "own loss"]),
    ],
)
def test_an_evaluation_that_cannot_be(settings, error, words):
    """So it is for an evaluation."""
    with pytest.raises(error) as raised:
        Evaluate(Samples(), **settings)
    for word in words:
        assert word in str(raised.value)


def test_an_evaluation_of_nothing():
    """There must be something to evaluate on."""
    with pytest.raises(ValueError, match=r"evaluate\.data is empty"):
        make(evaluate=Evaluate([]))


@pytest.mark.parametrize("steps", [-1, 2.0, True, None])
def test_a_number_of_steps_that_cannot_be(steps):
    """Both loops say so before they begin."""
    trainer = make()
    for loop in (trainer.fit, trainer.steps):
        with pytest.raises(ValueError, match=r"steps is .*; it must be a whole number, 0 or more"):
            loop(steps)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (3.0, TypeError, ["loss returned a float", "a tensor with one element", "(sum, count)"]),
        (torch.zeros(8), ValueError, ["shape (8,)", "one element"]),
        ((torch.zeros(()), 1, 2), ValueError, ["loss returned 3 values", "(sum, count)"]),
        ((torch.zeros(()), "many"), TypeError, ["count is 'many'", "a number"]),
        ((torch.zeros(()), -1), ValueError, ["count is -1", "0 or more"]),
    ],
)
def test_a_loss_that_cannot_be(returned, error, words):
    """What a loss function returns is looked at in the first step."""
    trainer = make(loss=lambda *_: returned)
    with pytest.raises(error) as raised:
        trainer.fit(1)
    for word in words:
        assert word in str(raised.value)


def test_a_batch_that_is_no_pair():
    """With loss=, samples are pairs; the message names forward=."""
    trainer = make(data=TensorDataset(torch.zeros(8, 4)))
    with pytest.raises(TypeError, match=r"a list of 1.*forward="):
        trainer.fit(1)


def test_what_cannot_be_registered():
    """What is to be handed on needs both methods, and a name of its own."""
    trainer = make()
    with pytest.raises(TypeError, match="a list has no state_dict and no load_state_dict"):
        trainer.register("list", [])
    trainer.register("model", trainer.model)
    trainer.register("model", trainer.model)
    with pytest.raises(ValueError, match="another object has this name"):
        trainer.register("model", nn.Linear(1, 1))


def test_a_message_is_the_same_on_all_ranks():
    """It holds no address, and no text of any length."""
    assert [shown(5), shown("x"), shown(None)] == ["5", "'x'", "None"]
    assert [shown(object()), shown([0] * 99)] == ["a object", "a list"]
