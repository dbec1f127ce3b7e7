"""Schedules that split backward passes, where that is known to go wrong."""

import pytest
import torch
from little import CLASSES, FEATURES, WIDTH, far, usual
from torch import nn

from nbdist.train import DataParallel, Mesh, Pipeline

SCHEDULES = ["zero-bubble", "zbv", "dualpipev"]


class Twice(nn.Module):
    """Uses one weight twice, and takes what it gives apart: a node of the graph with many ends."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        first, second = self.layer(torch.tanh(self.layer(x))).chunk(2, dim=-1)
        return torch.cat([second, first * second], dim=-1)


def build():
    """Four blocks with a weight that is used twice each, between two layers."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), *[Twice(WIDTH) for _ in range(4)], nn.Linear(WIDTH, CLASSES)
    )


def after_one_step(strategy):
    """Of this rank: its gradients and its parameters."""
    trainer = usual(strategy, model=build)
    trainer.fit(1)
    named = list(trainer.model.named_parameters())
    return ({n: p.grad.numpy() for n, p in named}, {n: p.detach().numpy() for n, p in named})


@pytest.fixture
def expected(together):
    """The gradients of one process."""
    ((gradients, _),) = together(1, lambda _: after_one_step(DataParallel()))
    return gradients


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_that_is_used_twice_has_its_whole_gradient(together, expected, schedule):
    """pytorch#180952, #170277: parts of it were missing where weights' passes come later."""
    answers = together(2, lambda _: after_one_step(Pipeline(4, schedule, 8)))
    gradients = answers[0][0] | answers[1][0]
    assert set(gradients) == set(expected)
    assert far(gradients, expected) <= 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twins_sum_what_comes_late(together, expected, schedule):
    """pytorch#144530: gradients of weights' passes that came after a sum were not in it."""
    mesh = Mesh(pipeline=Pipeline(4, schedule, 8), data=2)
    answers = together(4, lambda _: after_one_step(mesh))
    for gradients, parameters in answers:
        assert far(gradients, {name: expected[name] for name in gradients}) <= 1e-6
        twin = next(its for _, its in answers if set(its) == set(parameters))
        assert far(parameters, twin) == 0
    assert set().union(*(gradients for gradients, _ in answers)) == set(expected)
