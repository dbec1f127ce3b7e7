"""A small regression that several ranks train together: model, samples, trainer."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.train import Trainer

FEATURES = 12


def mlp(*widths):
    """Layers of these widths, and one number at their end."""
    layers, before = [], FEATURES
    for width in widths:
        layers += [nn.Linear(before, width), nn.GELU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 1))


def dataset(num=250):
    """Always the same samples."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :1].sin() + inputs[:, 1:2])


def make(**changes):
    """A trainer of it; `changes` are arguments of its own."""
    usual = {
        "model": lambda: mlp(32),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        "loss": functional.mse_loss,
        "data": dataset(),
        "global_batch": 60,
        "seed": 3,
    }
    return Trainer(**usual | changes)
