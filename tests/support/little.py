"""Little models and data that strategies are tried with, and how far two results are apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.data import ByteText, pydoc_text
from nbdist.errors import RecoveryFailed
from nbdist.train import GPT, DataParallel, Evaluate, GPTConfig, Trainer, next_token_loss
from nbdist.train.randomness import seeded

FEATURES, CLASSES, WIDTH = 12, 5, 24


def build():
    layers = [nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU())]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Flaky(nn.Module):
    """Fails once, going backward, on every rank."""

    fails = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*build())

    def forward(self, inputs):
        middle = self.layers[:3](inputs)
        if Flaky.fails:
            Flaky.fails = False
            middle.register_hook(self.fail)
        return self.layers[3:](middle)

    def fail(self, _):
        raise KeyError("mine")


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


def mostly_slow(cases, *quick):
    """Cases of a test, of which each run does only some."""
    return [
        pytest.param(
            *(c if isinstance(c, tuple) else (c,)), marks=() if c in quick else pytest.mark.slow
        )
        for c in cases
    ]


def usual(strategy, **changes):
    """A trainer of a little model."""
    given = {
        "model": build,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "loss": functional.cross_entropy,
        "data": dataset(),
        "global_batch": 48,
    }
    return Trainer(strategy=strategy, **given | changes)


def outcome(trainer, steps):
    """Whole parameters, whole gradients of the last step, and the losses."""
    losses = trainer.fit(steps)["loss"].tolist()
    model = trainer.model
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    if trainer.is_replicated:
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    else:
        parameters = dict(model.whole_parameters())
        gradients = {name: model.gather(name, grad) for name, grad in gradients.items()}
    return (
        {name: value.numpy() for name, value in parameters.items()},
        {name: value.numpy() for name, value in gradients.items()},
        losses,
    )


def check_sixty_steps(together, num_ranks, strategy):
    """The byte model's loss on real text is within 1e-3 of that of one process."""

    def last(strategy):
        trainer = usual(
            strategy,
            model=lambda: GPT(GPTConfig(num_layers=2, width=64)),
            data=ByteText(pydoc_text(), 128),
            loss=next_token_loss,
            global_batch=8,
            clip_norm=1.0,
        )
        return trainer.fit(60)["loss"][-1]

    (expected,) = together(1, lambda _: last(DataParallel()))
    assert expected < 4.0
    for loss in together(num_ranks, lambda _: last(strategy)):
        assert loss == pytest.approx(expected, abs=1e-3)


def check_short_batches(together, num_ranks, strategy):
    """Every sample counts once in a step and in an evaluation, whatever does not come out even."""
    data = dataset(41)

    def body(strategy):
        trainer = usual(
            strategy,
            data=data,
            global_batch=16,
            tail="short",
            evaluate=Evaluate(data, every=3, batch=3, metrics={"right": right}),
        )
        losses = trainer.fit(6)["loss"].tolist()
        return losses, [e.metrics for e in trainer.evaluations]

    ((losses, metrics),) = together(1, lambda _: body(DataParallel()))
    for its, their in together(num_ranks, lambda _: body(strategy)):
        assert its == pytest.approx(losses, rel=1e-5)
        for got, expected in zip(their, metrics, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
    assert len(metrics) == 2


def check_own_loops(together, num_ranks, strategy):
    """A loop of the user's may call `step.backward` or `step.train`; both are as in one process."""

    def body(strategy, is_own):
        trainer = usual(strategy)
        for step in trainer.steps(2):
            with step:
                for x, y in step.batches():
                    if is_own:
                        step.backward(functional.cross_entropy(trainer.model(x), y), count=len(x))
                    else:
                        step.train((x, y))
        return trainer.history["loss"].tolist()

    (expected,) = together(1, lambda _: body(DataParallel(), True))
    for is_own in (False, True):
        for losses in together(num_ranks, lambda _, is_own=is_own: body(strategy, is_own)):
            assert losses == pytest.approx(expected, rel=1e-6)


def check_lost(together, num_ranks, lost, trainer):
    """What one rank loses comes back: all go back to the last copy, and the curve is that of an
    undisturbed run, bit for bit."""

    def undisturbed(_):
        one = trainer()
        return one.fit(9)["loss"].tolist(), one.digest()

    def disturbed(rank):
        one = trainer()
        one.fit(5)
        if rank == lost:
            one = trainer()
        one._state.exchange._is_new = True
        one.fit(9 - one.step)
        return one.history["loss"].tolist(), one.digest(), one.step

    expected = together(num_ranks, undisturbed)
    answers = together(num_ranks, disturbed)
    for (losses, digest), (its, its_digest, step) in zip(expected, answers, strict=True):
        assert step == 9
        assert its[-5:] == losses[-5:]
        assert its_digest == digest


def check_nobody_has(together, make, said):
    """Of three ranks two lose what they held, and what they had copied: all refuse with this
    sentence, a pattern, instead of training on."""

    def body(rank):
        one = make()
        one.fit(5)
        if rank:
            one = make()
        one._state.exchange._is_new = True
        with pytest.raises(RecoveryFailed, match=said):
            one.fit(1)
        return True

    assert together(3, body) == [True] * 3


def check_gathered(answers):
    """Each rank has gathered the whole model, with the weights that it begins with."""
    with seeded(0, torch.device("cpu")):
        expected = {name: p.detach().numpy() for name, p in build().named_parameters()}
    for gathered in answers:
        assert set(gathered) == set(expected)
        assert all((gathered[name] == expected[name]).all() for name in expected)
