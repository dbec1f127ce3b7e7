"""The gradient of a step is that of one process on the whole batch, however it is shared out."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.train import DataParallel, Trainer
from nbdist.train.sampling import permutation

NUM_SAMPLES, FEATURES, CLASSES = 96, 12, 5
TOLERANCE = 1e-6


def build():
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)
    )


def dataset(num=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (num,), generator=generator))


def make(**changes):
    usual = {
        "model": build,
        "optimizer": lambda named: torch.optim.SGD(named, lr=1.0),
        "loss": functional.cross_entropy,
        "data": dataset(),
        "global_batch": 60,
        "strategy": DataParallel(bucket_mb=0.002),  # several buckets
    }
    return Trainer(**usual | changes)


def flat(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).numpy()


def one_step(trainer):
    """The gradient that it applied, and the digest of what came of it."""
    trainer.fit(1)
    return flat(trainer), trainer.digest()


def whole_batch(trainer, loss_of=functional.cross_entropy, clip_norm=None):
    """The gradient of the whole first batch, by torch alone."""
    data, order = trainer._state.loader._fetcher._data, trainer._state.sampling.batch(0)
    samples = [data[i] for i in order.tolist()]
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    loss_of(trainer.model(inputs), targets).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(trainer.model.parameters(), clip_norm)
    return flat(trainer)


def far(one, other):
    return float(abs(one - other).max() / abs(other).max())


def check(together, num, expected, make_trainer):
    """All ranks are equal, and as expected."""
    gradients, digests = zip(*together(num, lambda _: one_step(make_trainer())), strict=True)
    assert len(set(digests)) == 1
    assert far(gradients[0], expected) <= TOLERANCE


def alone(together, make_trainer, *arguments):
    return together(1, lambda _: whole_batch(make_trainer(), *arguments))[0]


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_the_gradient_is_that_of_the_whole_batch(together, num):
    """At 61 samples shares are unequal; the mean is over samples, not over ranks."""

    def trainer():
        return make(global_batch=61)

    check(together, num, alone(together, trainer), trainer)


def token_loss(output, target):
    """Sum and count over the tokens that count."""
    valid = target >= 0
    return functional.cross_entropy(output[valid], target[valid], reduction="sum"), valid.sum()


class Texts:
    """Sequences whose tokens mostly do not count, in the first half of the first batch."""

    def __init__(self, few, many, batch=8, length=250):
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(batch, length, FEATURES, generator=generator)
        self.targets = torch.randint(0, CLASSES, (batch, length), generator=generator)
        for place, index in enumerate(permutation(batch, 0, 0)):
            total = few if place < batch // 2 else many
            self.targets[index, total * 2 // batch :] = -1
        half = permutation(batch, 0, 0)[: batch // 2]
        short = few - int((self.targets[half] >= 0).sum())
        self.targets[half[0], : int((self.targets[half[0]] >= 0).sum()) + short] = 1

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return self.inputs[i], self.targets[i]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_tokens_count_alike_on_ranks_with_few_and_many(together, accumulate):
    """10 and 1000 tokens on two ranks: each token weighs the same.

    A mean of means, as in torchtitan#2206, transformers#34191 and mlx-lm#1413, would be far off.
    """

    def trainer():
        return make(data=Texts(10, 1000), global_batch=8, loss=token_loss, accumulate=accumulate)

    def mean(output, target):
        total, count = token_loss(output, target)
        return total / count

    counts = [int((Texts(10, 1000).targets[half] >= 0).sum()) for half in halves()]
    assert counts == [10, 1000]
    check(together, 2, alone(together, trainer, mean), trainer)


def halves():
    order = permutation(8, 0, 0)
    return order[:4], order[4:]


@pytest.mark.parametrize(("num", "accumulate"), [(1, 3), (2, 4), (3, 7)])
def test_accumulating_is_one_big_batch(together, num, accumulate):
    """Gradients travel with the last batch only, and the sum is not forgotten or sent twice.

    A flag that is set after the backward pass (build-nanogpt#30), or a first batch that is not
    exchanged (pytorch#187732, pytorch#143580, accelerate#3679) would show here.
    """

    def trainer():
        return make(global_batch=61, accumulate=accumulate)

    check(together, num, alone(together, trainer), trainer)


@pytest.mark.parametrize("num", [1, 3])
def test_the_norm_is_that_of_the_global_gradient(together, num):
    """Clipping scales what one process would have had, after the sum."""
    expected = alone(together, make, functional.cross_entropy, 0.01)
    assert (expected.astype("float64") ** 2).sum() ** 0.5 == pytest.approx(0.01, rel=1e-3)
    check(together, num, expected, lambda: make(clip_norm=0.01))


def test_more_ranks_than_samples(together):
    """A rank without a sample takes part, and adds nothing."""

    def trainer():
        return make(global_batch=3)

    check(together, 4, alone(together, trainer), trainer)


class Halting(nn.Module):
    """Some parameters are frozen, some have no part in the loss."""

    def __init__(self, uses_side):
        super().__init__()
        self.inner = build()
        self.side = nn.Linear(CLASSES, CLASSES)
        self.idle = nn.Linear(3, 3)
        self.uses_side = uses_side

    def forward(self, x):
        y = self.inner(x)
        return y + self.side(y) if self.uses_side(x) else y


def test_frozen_parameters_stay(together):
    """They are left alone, and nobody waits for their gradient."""

    def frozen():
        model = Halting(lambda _: True)
        model.idle.requires_grad_(False)
        model.inner[0].requires_grad_(False)
        return model

    def body(_):
        trainer = make(model=frozen)
        before = [p.detach().clone() for p in trainer.model.inner[0].parameters()]
        trainer.fit(3)
        after = trainer.model.inner[0].parameters()
        same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return same, trainer.parameter_digest()

    (one, digest), (other, its) = together(2, body)
    assert one
    assert other
    assert digest == its


def test_unused_parameters_are_named(together):
    """The error says which they are, and what may be done; no rank hangs."""

    def body(_):
        with pytest.raises(RuntimeError) as raised:
            make(model=lambda: Halting(lambda _: False)).fit(1)
        return str(raised.value)

    for message in together(2, body):
        assert "4 of the model's parameters: side.weight, side.bias, idle.weight" in message
        assert "find_unused=True" in message


def test_unused_parameters_may_be_searched_for(together):
    """Those that only some ranks use have the gradient of the whole batch; the others none."""
    middle = permutation(NUM_SAMPLES, 0, 0)[:30]

    def model():
        first = dataset().tensors[0][middle[0]]
        return Halting(lambda x: bool((x == first).all(1).any()))  # rank 0 alone

    def body(_):
        trainer = make(
            model=model, strategy=DataParallel(find_unused=True, bucket_mb=0.002), accumulate=2
        )
        trainer.fit(2)
        return trainer.parameter_digest(), trainer.model.idle.weight.grad is None

    (one, idle), (other, its) = together(2, body)
    assert one == other
    assert idle
    assert its


def test_an_own_loop_comes_to_the_same(together):
    """Its votes come after the gradients, the trainer's own with them: the path is one."""

    def own(_):
        trainer = make(accumulate=2)
        for step in trainer.steps(4):
            with step:
                for x, y in step.batches():
                    step.backward(functional.cross_entropy(trainer.model(x), y), count=len(x))
        return trainer.digest(), trainer.history["loss"]

    def fitted(_):
        trainer = make(accumulate=2)
        losses = trainer.fit(4)["loss"]
        return trainer.digest(), losses

    (mine, losses), (usual, expected) = together(2, own)[1], together(2, fitted)[1]
    assert mine == usual
    assert losses == pytest.approx(expected, rel=1e-6)
