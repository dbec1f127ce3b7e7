"""The models that tutorials, tests and benchmarks train."""

from __future__ import annotations

import math

import pytest
import torch

from nbdist.data import ByteText, pydoc_text
from nbdist.train import GPT, GPTConfig, bench_model, next_token_loss
from nbdist.train.models import BENCH_CLASSES, BENCH_FEATURES

SMALL = GPTConfig(num_layers=1, num_heads=2, width=16, context=12, vocabulary=256)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def tokens(batch=2, length=12):
    return torch.randint(256, (batch, length))


def test_logits_have_a_row_for_each_token():
    """Tokens (batch, length) become logits (batch, length, vocabulary), if shorter too."""
    model = GPT(SMALL)
    for length in (1, 5, 12):
        assert model(tokens(length=length)).shape == (2, length, 256)


def test_no_token_sees_a_later_one():
    """Changing token 7 leaves the logits of the tokens before it as they were."""
    model, first = GPT(SMALL).eval(), tokens()
    second = first.clone()
    second[:, 7] = (second[:, 7] + 1) % 256
    before, after = model(first), model(second)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_parameters_are_counted_by_hand():
    """The count is that of the formula, and a tied readout counts once."""
    block = 12 * 16 * 16 + 13 * 16
    rest = 256 * 16 + 12 * 16 + 2 * 16
    assert GPT(SMALL).num_parameters == block + rest + 256 * 16
    tied = GPT(GPTConfig(num_layers=1, num_heads=2, width=16, context=12, tied=True))
    assert tied.num_parameters == block + rest
    assert tied.head.weight is tied.token_embedding.weight
    assert GPT(GPTConfig(vocabulary=107)).num_parameters == 837_120


def test_the_first_loss_is_near_that_of_guessing():
    """Before training, the model knows nothing, with a tied readout too."""
    guessing = math.log(256)
    inputs, targets = tokens(8), tokens(8)
    for config in (SMALL, GPTConfig(num_layers=1, width=64, context=12, tied=True)):
        loss = next_token_loss(GPT(config)(inputs), targets)
        assert loss.item() == pytest.approx(guessing, rel=0.2)


def test_the_loss_is_the_mean_over_samples():
    """A batch's loss is the mean of its samples', so shares can be weighted by their count."""
    logits, targets = torch.randn(3, 4, 256), tokens(3, 4)
    each = [next_token_loss(logits[i : i + 1], targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(next_token_loss(logits, targets), torch.stack(each).mean())


def test_dropout_acts_in_training_only():
    """Two passes differ while training, and are equal in evaluation."""
    model = GPT(GPTConfig(num_layers=1, num_heads=2, width=16, context=12, dropout=0.5))
    inputs = tokens()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_every_parameter_gets_a_gradient():
    """Nothing in the model is unused, so DDP needs no search for unused parameters."""
    for model in (GPT(SMALL), GPT(GPTConfig(num_layers=1, width=16, context=12, tied=True))):
        next_token_loss(model(tokens()), tokens()).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: an integer, at least 1"),
        ({"width": 100, "num_heads": 3}, "width=100: must be a multiple of num_heads=3"),
        ({"context": 12.0}, "context=12.0: an integer"),
        ({"dropout": 1.0}, "dropout=1.0: at least 0 and less than 1"),
    ],
)
def test_a_config_that_makes_no_sense_names_field_and_value(wrong, message):
    """The error says which field, its value, and what is allowed."""
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


def test_a_sequence_that_is_too_long_is_refused():
    """The error gives both lengths."""
    with pytest.raises(ValueError, match="a sequence of 13 tokens, and context=12"):
        GPT(SMALL)(tokens(length=13))


def test_the_bench_model_learns_and_stays_small():
    """It has the shapes it says, and under a MiB of parameters."""
    model = bench_model()
    assert model(torch.randn(5, BENCH_FEATURES)).shape == (5, BENCH_CLASSES)
    assert sum(p.numel() for p in model.parameters()) * 4 < 2**20


@pytest.mark.timeout(120)
def test_the_gpt_learns_english_within_sixty_steps():
    """A small GPT on the pydoc corpus falls from 5.5 to under 3.0 in 60 steps."""
    config = GPTConfig(num_layers=2, num_heads=4, width=64, context=64)
    model, data = GPT(config), ByteText(pydoc_text(), config.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.randperm(len(data))
    losses = []
    for step in range(60):
        samples = [data[int(i)] for i in order[step * 16 : step * 16 + 16]]
        inputs, targets = (torch.stack(half) for half in zip(*samples, strict=True))
        loss = next_token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < 3.0
