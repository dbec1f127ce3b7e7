"""A pipeline is the same training as one process does, whatever the schedule."""

import pytest
import torch
from little import FEATURES, WIDTH, build, check_lost, dataset, far, gpt, right, text, token_loss
from torch import nn
from torch.nn import functional

from nbdist.errors import RecoveryFailed, WrongState
from nbdist.train import (
    DataParallel,
    Evaluate,
    Pipeline,
    Trainer,
    next_token_loss,
)
from nbdist.train.randomness import seeded
from nbdist.train.sampling import Sampling

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


def gradient(together, num, strategy, **changes):
    """Gradients of the first step, from all ranks."""
    held, _ = fitted(together, num, strategy, 1, **changes)
    return {name: grad for name, (_, grad) in held.items()}


def test_looped_bfs_adds_up_in_another_order(together):
    """Its backward passes go from the last micro-batch to the first: equal within 1e-8."""
    one = gradient(together, 1, Pipeline(4, "looped-bfs", 8))
    other = gradient(together, 2, Pipeline(4, "looped-bfs", 8))
    assert max(abs(one[name] - other[name]).max() for name in one) <= 1e-8


@pytest.mark.parametrize(
    "changes",
    [{}, {"global_batch": 47}, {"global_batch": 48, "accumulate": 3}, {"clip_norm": 0.01}],
)
def test_the_gradient_is_that_of_the_whole_batch(together, changes):
    """Pieces equal or not, in one passage or in three, clipped or not: within 1e-6.

    Accumulating with torch's own scaling shrinks gradients: torchtitan#1733, torchtitan#1732.
    """

    def whole(_):
        trainer = make(Pipeline(1, "gpipe", 1), **{**changes, "accumulate": 1})
        trainer.fit(1)
        return {name: grad for name, (_, grad) in values(trainer).items()}

    expected = together(1, whole)[0]
    assert far(gradient(together, 2, Pipeline(2, "1f1b", 4), **changes), expected) <= 1e-6


def test_tokens_count_alike_in_every_micro_batch(together):
    """With (sum, count) the mean is over what counts, wherever that is."""
    expected = gradient(together, 1, Pipeline(1, "gpipe", 1), loss=token_loss)
    got = gradient(together, 2, Pipeline(2, "1f1b", 8), loss=token_loss)
    assert far(got, expected) <= 1e-6


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.Dropout(0.3),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.3),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, 5),
        )

    def pipeline_blocks(self):
        return list(self.row)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_dropout_and_running_statistics_do_not_depend_on_the_schedule(together, schedule):
    """Random numbers follow from block and micro-batch; a trial run of torch's leaves no trace."""

    def body(_):
        trainer = make(Pipeline(CASES[schedule][0], schedule, 8), model=Noisy)
        losses = trainer.fit(3)["loss"].tolist()
        buffers = {name: b.numpy().copy() for name, b in trainer.model.named_buffers()}
        return losses, values(trainer) | buffers

    ((losses, alone),) = together(1, body)
    merged = {}
    for its, held in together(2, body):
        assert its == pytest.approx(losses, rel=1e-6)
        merged |= held
    assert set(merged) == set(alone)
    assert "row.2.running_mean" in merged
    for name, value in alone.items():
        one, other = (v[0] if isinstance(v, tuple) else v for v in (value, merged[name]))
        assert (one == other).all(), name


def test_short_batches_and_evaluations(together):
    """An epoch's short last batch is filled up, and evaluations see every sample once."""
    data = dataset(41)

    def body(_):
        trainer = make(
            Pipeline(2, "1f1b", 4),
            data=data,
            global_batch=16,
            tail="short",
            evaluate=Evaluate(data, every=3, metrics={"worst": right}),
        )
        losses = trainer.fit(6)["loss"].tolist()
        return losses, [e.metrics for e in trainer.evaluations]

    ((losses, metrics),) = together(1, body)
    for its, their in together(2, body):
        assert its == pytest.approx(losses, rel=1e-6)
        for got, expected in zip(their, metrics, strict=True):
            assert got == pytest.approx(expected, rel=1e-6)
    assert len(metrics) == 2


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_every_schedule_evaluates(together, schedule):
    """Also those that split backward passes, and between two steps."""

    def body(_):
        trainer = make(Pipeline(4, schedule, 4), evaluate=Evaluate(dataset(21), every=1))
        trainer.fit(3)
        return [e.metrics["loss"] for e in trainer.evaluations]

    (expected,) = together(1, body)
    for got in together(2, body):
        assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (4, "zero-bubble"), (4, "zbv")])
def test_the_byte_model_learns_as_in_one_process(together, tied, stages, schedule):
    """Only the `strategy=` line differs; a weight at both ends stays one weight, bit for bit.

    Zero-bubble schedules gave wrong gradients for shared weights: pytorch#180952, pytorch#170277.
    """

    def body(strategy):
        trainer = make(
            strategy,
            model=gpt(tied),
            data=text(),
            loss=next_token_loss,
            global_batch=16,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
            clip_norm=1.0,
        )
        return trainer.fit(8)["loss"].tolist(), values(trainer)

    ((expected, whole),) = together(1, lambda _: body(DataParallel()))
    answers = together(2, lambda _: body(Pipeline(stages, schedule, 4)))
    for losses, _ in answers:
        assert losses == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
    one, other = (held for _, held in answers)
    assert set(one) | set(other) == set(whole)
    both = set(one) & set(other)
    assert both == ({"token_embedding.weight"} if tied and schedule != "zbv" else set())
    for name in both:
        assert (one[name][0] == other[name][0]).all()


def test_a_rank_never_holds_the_rest(together):
    """A function that makes the model is asked for this rank's stages alone."""

    def body(_):
        trainer = make(Pipeline(2, "1f1b", 4, split=[1, 5]))
        return sorted(name for name, _ in trainer.model.named_parameters())

    first, last = together(2, body)
    assert first == ["0.0.bias", "0.0.weight"]
    assert len(last) == 10


def test_a_module_gives_the_weights_of_rank_0(together):
    """Made beforehand, with other weights on each rank, it trains with those of rank 0."""

    def body(rank):
        torch.manual_seed(rank)
        trainer = make(Pipeline(2, "1f1b", 4), model=build())
        return trainer.fit(2)["loss"].tolist()

    (expected,) = together(1, body)
    for losses in together(2, body):
        assert losses == pytest.approx(expected, rel=1e-6)


OWN = {
    0: ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
    1: ["1F0", "1I0", "1F1", "1W0", "1B1", "1F2", "1B2", "1F3", "1B3"],
}


def test_a_schedule_of_the_users_own(together):
    """It is run as it stands, and comes to the same."""
    expected = gradient(together, 1, Pipeline(2, OWN, 4))
    got = gradient(together, 2, Pipeline(2, OWN, 4))
    assert far(got, expected) <= 1e-6


def test_the_users_own_error_is_raised(together):
    """Not torch's account of it."""

    class Odd(nn.Module):
        def forward(self, _):
            raise KeyError("mine")

    def body(_):
        model = nn.Sequential(Odd(), *build())
        with pytest.raises(KeyError, match="mine"):
            make(Pipeline(1, "gpipe", 2), model=model).fit(1)
        return True

    assert together(1, body) == [True]


def test_an_own_loop(together):
    """`step.train(batch)` stands for the loss and its backward pass, whatever the strategy."""

    def body(strategy):
        trainer = make(strategy)
        for step in trainer.steps(2):
            with step:
                for batch in step.batches():
                    step.train(batch)
        return trainer.history["loss"].tolist()

    (expected,) = together(1, lambda _: body(DataParallel()))
    for losses in together(2, lambda _: body(Pipeline(2, "1f1b", 4))):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_the_users_own_is_refused(together):
    """No rank has the whole model; the message says what to call."""

    def body(_):
        trainer = make(Pipeline(1, "gpipe", 2))
        with pytest.raises(WrongState, match=r"step\.train\(batch\)"):
            go_back(trainer)
        with pytest.raises(WrongState, match="no rank holds the whole model"):
            trainer.model(torch.zeros(1, FEATURES))
        return True

    assert together(1, body) == [True]


def go_back(trainer):
    for step in trainer.steps(1):
        with step:
            for _ in step.batches():
                step.backward(torch.zeros((), requires_grad=True))


def test_reduced_precision(together):
    """Under autocast, the same on two ranks as on one."""
    _, expected = fitted(together, 1, Pipeline(2, "1f1b", 4), precision="bf16")
    _, losses = fitted(together, 2, Pipeline(2, "1f1b", 4), precision="bf16")
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_rank_that_stands_elsewhere_is_named(together):
    """Where a stage has lost its weights nobody trains on, and all ranks say so."""

    def body(rank):
        trainer = make(Pipeline(2, "1f1b", 4, copy_every=0))
        trainer.fit(2)
        if rank == 1:
            trainer = make(Pipeline(2, "1f1b", 4, copy_every=0))
        trainer._state.exchange._is_new = True
        with pytest.raises(RecoveryFailed, match=r"stages \[1\] were lost .* of step 2: rank 1"):
            trainer.fit(1)
        return True

    assert together(2, body) == [True, True]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_stage_comes_back_from_the_neighbour(together, lost):
    """All go back to the last copy, and the curve is that of an undisturbed run, bit for bit."""

    def trainer():
        return make(
            Pipeline(3, "1f1b", 6, copy_every=2),
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            model=Noisy,
        )

    check_lost(together, 3, lost, trainer)


def test_neighbours_that_are_lost_together_are_named(together):
    """A state that was in both of their memories is nowhere else."""

    def body(rank):
        one = make(Pipeline(3, "1f1b", 6, copy_every=2))
        one.fit(5)
        if rank:
            one = make(Pipeline(3, "1f1b", 6, copy_every=2))
        one._state.exchange._is_new = True
        with pytest.raises(RecoveryFailed, match=r"stages \[1, 2\] .* neighbours were lost"):
            one.fit(1)
        return True

    assert together(3, body) == [True] * 3
