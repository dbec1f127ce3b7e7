"""A pipeline is the same training as one process does, whatever the schedule."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.train import Pipeline, Trainer
from nbdist.train.randomness import seeded
from nbdist.train.sampling import Sampling

FEATURES, CLASSES, WIDTH = 12, 5, 24
CASES = {
    "gpipe": (2, 2),
    "1f1b": (2, 2),
    "interleaved": (4, 2),
    "looped-bfs": (4, 2),
    "zero-bubble": (4, 2),
    "zbv": (4, 2),
    "dualpipev": (4, 2),
}
"""Stages and ranks."""


def build():
    layers = [nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU())]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def dataset(num=96):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (num,), generator=generator))


def make(strategy, **changes):
    usual = {
        "model": build,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.9),
        "loss": functional.cross_entropy,
        "data": dataset(),
        "global_batch": 48,
    }
    return Trainer(strategy=strategy, **usual | changes)


def values(trainer):
    """Names -> parameters and gradients of this rank."""
    return {
        name: (p.detach().numpy().copy(), None if p.grad is None else p.grad.numpy().copy())
        for name, p in trainer.model.named_parameters()
    }


def fitted(together, num, strategy, steps=3, **changes):
    """All parameters, the history on rank 0."""

    def body(_):
        trainer = make(strategy, **changes)
        history = trainer.fit(steps)
        return values(trainer), history["loss"].tolist()

    answers = together(num, body)
    assert len({tuple(losses) for _, losses in answers}) == 1
    together_ = {}
    for held, _ in answers:
        together_ |= held
    return together_, answers[0][1]


def by_hand(num_microbatches, steps=3, lr=0.5):
    """A plain loop over micro-batches, by torch alone."""
    with seeded(0, torch.device("cpu")):
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampling, data, losses = Sampling(96, 48, seed=0), dataset(), []
    for step in range(steps):
        optimizer.zero_grad()
        order = torch.from_numpy(sampling.batch(step))
        inputs, target = (tensor[order] for tensor in data.tensors)
        total = 0.0
        for x, y in zip(
            inputs.chunk(num_microbatches), target.chunk(num_microbatches), strict=True
        ):
            loss = functional.cross_entropy(model(x), y)
            total += loss.item() * len(x)
            (loss * (len(x) / 48)).backward()
        optimizer.step()
        losses.append(total / 48)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("schedule", CASES)
def test_every_schedule_is_accumulation_bit_by_bit(together, schedule):
    """Parameters after three steps are those of a loop over micro-batches in one process."""
    stages, ranks = CASES[schedule]
    held, losses = fitted(together, ranks, Pipeline(stages, schedule, 8))
    expected, expected_losses = together(1, lambda _: by_hand(8))[0]
    assert set(held) == set(expected)
    far = max(abs(held[name][0] - expected[name]).max() for name in expected)
    assert far <= (1e-6 if schedule == "looped-bfs" else 0.0)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
