"""Little models and data that strategies are tried with, and how far two results are apart."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.train import GPT, GPTConfig

FEATURES, CLASSES, WIDTH = 12, 5, 24


def build():
    layers = [nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU())]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def dataset(num=96):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (num,), generator=generator))


def far(one, other):
    assert set(one) == set(other)
    return max(abs(one[name] - other[name]).max() / abs(other[name]).max() for name in other)


def token_loss(output, target):
    """Sum and count over the samples that count."""
    valid = target >= 2
    return functional.cross_entropy(output[valid], target[valid], reduction="sum"), valid.sum()


def right(output, target):
    return (output.argmax(1) == target).float().mean()


def gpt(tied):
    return lambda: GPT(GPTConfig(num_layers=2, num_heads=2, width=32, context=16, tied=tied))


def text():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 256, (64, 17), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])
