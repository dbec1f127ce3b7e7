"""Training with gradients that are compressed on their way, by every codec there is."""

import math

import numpy as np
import pytest
import regression
import torch
import torch.distributed as dist
from regression import FEATURES, mlp
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from trainers import FakePort, GroupError

from nbdist.data import ByteText, pydoc_text
from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import GPT, DataParallel, GPTConfig, Trainer, next_token_loss
from nbdist.train.loop import train, walk

NAMES = ("fp16", "bf16", "int8", "topk", "powersgd")
FEEDBACK = ("int8", "topk", "powersgd")


def make(compress, **changes):
    """Wide enough for several buckets."""
    strategy = DataParallel(compress=compress, bucket_mb=0.005, powersgd_rank=2)
    return regression.make(**{"model": lambda: mlp(48, 48), "strategy": strategy} | changes)


def left(trainer):
    """How much this rank has not sent yet."""
    return trainer._state.exchange._courier.codec.residual.total()


def gradients(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).numpy()


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_equal(together, name, num):
    """Bit by bit, with shares that differ, several buckets, and more than one batch a step; the
    run comes as far as one that sends everything."""

    def body(_):
        trainer = make(name, global_batch=61, accumulate=2, clip_norm=5.0)
        trainer.fit(60)
        return trainer.history["loss"], trainer.digest()

    losses, digests = zip(*together(num, body), strict=True)
    whole = together(num, lambda _: make(None, global_batch=61, accumulate=2).fit(60)["loss"])[0]
    assert len(set(digests)) == 1
    assert losses[0][0] == pytest.approx(whole[0], rel=1e-12)  # its vote is as it was
    assert losses[0][-10:].mean() == pytest.approx(whole[-10:].mean(), abs=0.03)
    assert whole[-10:].mean() < whole[0] / 4


@pytest.mark.parametrize(
    ("name", "most"), [(None, 1.0), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.26), ("topk", 0.132)]
)
def test_the_payload_that_is_told(together, name, most):
    """The buckets' values are the bytes that were handed to collectives, votes left out."""
    vote_bytes = 3 * 2 * 4

    def body(_):
        strategy = DataParallel(compress=name, bucket_mb=0.25)
        trainer = make(name, model=lambda: nn.Linear(500, 800), strategy=strategy, **wide())
        trainer.fit(3)
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        mine = records[records["step"] == 2]
        done = mine[mine["kind"] == Kind.BUCKET_DONE]
        assert (done["t1_ns"] >= done["t0_ns"]).all()
        num_bytes = sum(p.nbytes for p in trainer.model.parameters())
        return (done["value"].sum() - vote_bytes) / num_bytes

    def wide():
        data = TensorDataset(torch.randn(60, 500), torch.randn(60, 800))
        return {"data": data, "global_batch": 6}

    for share in together(2, body):
        assert most * 0.95 < share <= most


@pytest.mark.parametrize("num", [2, 3])
def test_the_mean_of_what_was_sent_becomes_the_gradient(together, num):
    """Of a loss whose gradient stays the same: its error after 20 steps is 1.2/20 of the first
    one's at most, over several buckets and ranks with different shares."""

    def body(_):
        trainer = make(
            "int8",
            loss=lambda output, target: (output * target).mean(),
            model=lambda: nn.Linear(FEATURES, 300, bias=False),
            data=TensorDataset(torch.randn(61, FEATURES), torch.randn(61, 300)),
            optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
            global_batch=61,
        )
        start, errors = trainer.model.weight.detach().clone(), []
        inputs, targets = trainer._state.loader._fetcher._data.tensors
        true = (targets.T @ inputs / targets.numel()).double()
        for number in range(20):
            trainer.fit(1)
            sent = (start - trainer.model.weight.detach()).double()
            errors.append(float((sent / (number + 1) - true).norm() / true.norm()))
        return errors

    torch.manual_seed(0)
    for errors in together(num, body):
        assert errors[0] > 1e-3
        assert errors[-1] <= 1.2 / 20 * errors[0]


@pytest.mark.parametrize("name", FEEDBACK)
def test_losses_that_count_otherwise(together, name):
    """Each sample counts for eight tokens: the same path, bit by bit. What the first step leaves is
    in the scale of its loss, which is another than that of all later ones."""

    def body(_):
        def tokens(model, batch):
            x, y = batch
            return functional.mse_loss(model(x), y, reduction="sum") * 8, 8 * len(x)

        def samples(model, batch):
            x, y = batch
            return functional.mse_loss(model(x), y, reduction="sum"), len(x)

        answers = []
        for forward in (tokens, samples):
            trainer = make(name, loss=None, forward=forward)
            trainer.fit(6)
            answers.append((trainer.parameter_digest(), left(trainer)))
        return answers

    for by_tokens, by_samples in together(2, body):
        assert by_tokens == by_samples
        assert by_tokens[1] > 0


@pytest.mark.parametrize("is_own_loop", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_on_one_rank(together, name, is_own_loop):
    """All skip that step alike, with a finite loss and no clip norm; nothing of it is left."""

    def body(rank):
        calls = []

        def poison(gradient):
            calls.append(1)
            return gradient * math.nan if rank == 1 and len(calls) == 4 else gradient

        trainer = make(name)
        trainer.model[2].weight.register_hook(poison)
        if is_own_loop:
            for step in trainer.steps(8):
                with step:
                    for x, y in step.batches():
                        step.backward(functional.mse_loss(trainer.model(x), y), count=len(x))
        else:
            trainer.fit(8)
        losses = trainer.history["loss"]
        return trainer.num_skipped, losses, math.isfinite(left(trainer)), trainer.digest()

    answers = together(3, body)
    assert [skipped for skipped, *_ in answers] == [1] * 3
    assert np.isfinite(answers[0][1]).all()
    assert answers[0][1][-1] < answers[0][1][0]
    assert all(is_finite for _, _, is_finite, _ in answers)
    assert len({digest for *_, digest in answers}) == 1


def test_a_sum_that_fp16_cannot_hold(together):
    """In the first step the loss's scale is not known yet: it is skipped, and the next is not."""

    def body(_):
        trainer = make(
            "fp16",
            loss=None,
            forward=lambda model, batch: (
                functional.mse_loss(model(batch[0]), batch[1], reduction="sum") * 1e7,
                len(batch[0]) * 1e7,
            ),
        )
        losses = trainer.fit(20)["loss"]
        return trainer.num_skipped, losses[-1] < losses[0], trainer.digest()

    (one, other) = together(2, body)
    assert one[:2] == (1, True)
    assert one == other


class RankPort(FakePort):
    """In torch's default group."""

    def __init__(self, *until):
        super().__init__(*until)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()


def go(walker):
    """Train until told to stand."""
    for step in walker:
        if step is None:
            return
        train(step)


def broken_after_backward(trainer, at):
    """Have the next attempt at a step fail once its gradients have come."""
    exchange, pending = trainer._state.exchange, [at]
    backward = exchange.backward

    def breaks(*arguments, **named):
        summed = backward(*arguments, **named)
        if pending and trainer.step == at:
            pending.clear()
            raise GroupError("gone")
        return summed

    exchange.backward = breaks


@pytest.mark.parametrize("name", ["int8", "topk"])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_step_that_breaks_counts_once(together, name, who):
    """Repeated by all, or taken over by a rank that had sent its part and not heard of the others:
    parameters and residuals are those of a run to which nothing happens."""

    def body(rank):
        plain = make(name)
        plain.fit(10)
        trainer, port = make(name), RankPort(10)
        if who == "all" or rank == 1:
            broken_after_backward(trainer, at=5)
        elif rank == 0:
            port.go_until = 6
        walker = walk(trainer._state, port)
        go(walker)
        assert trainer.step == (6 if who == "one" and rank == 0 else 5)
        state = [trainer.pack()]
        dist.broadcast_object_list(state, 0)
        if who == "one" and rank == 1:
            trainer.unpack(state[0])
        port.go_until = 10
        go(walker)
        return (
            (trainer.digest(), left(trainer)),
            (plain.digest(), left(plain)),
            [what for what, _ in port.told],
        )

    stories = []
    for mine, expected, told in together(2, body):
        assert mine == expected
        assert mine[1] > 0
        stories.append("broken" in told)
    assert stories == [who == "all", True]


@pytest.mark.parametrize("name", FEEDBACK)
def test_alone_for_a_while(together, name):
    """What was left with others is applied when there are none, and the rank goes on with others
    from nothing."""

    def body(rank):
        trainer, port = make(name), RankPort(4)
        walker = walk(trainer._state, port)
        go(walker)
        before = left(trainer)
        if rank == 0:
            port.world_size, port.go_until = 1, 5
            go(walker)
            assert left(trainer) == 0
            port.world_size = 2
        state = [trainer.pack()]
        dist.broadcast_object_list(state, 0)
        if rank == 1:
            newcomer = make(name)
            newcomer.unpack(state[0])
            assert left(newcomer) == 0
            trainer.unpack(state[0])
        port.go_until = 9
        go(walker)
        return before, left(trainer), trainer.digest()

    answers = together(2, body)
    assert all(before > 0 and after > 0 for before, after, _ in answers)
    assert len({digest for *_, digest in answers}) == 1


def test_a_state_of_another_step_leaves_nothing(together):
    """A residual belongs to the parameters that it was made with."""

    def body(_):
        trainer = make("int8")
        trainer.fit(2)
        state = trainer.pack()
        trainer.fit(3)
        assert left(trainer) > 0
        trainer.unpack(state)
        return left(trainer)

    assert together(2, body) == [0, 0]


def test_parameters_that_only_some_ranks_use(together):
    """They are searched for, and all replicas are equal."""

    class Halting(nn.Module):
        def __init__(self, uses_side):
            super().__init__()
            self.inner, self.side, self.uses_side = mlp(48, 48), nn.Linear(1, 1), uses_side

        def forward(self, x):
            y = self.inner(x)
            return y + self.side(y) if self.uses_side else y

    def body(rank):
        digests = []
        for name in NAMES:
            strategy = DataParallel(compress=name, find_unused=True, bucket_mb=0.005)
            trainer = make(name, model=lambda: Halting(rank == 0), strategy=strategy)
            trainer.fit(4)
            digests.append(trainer.parameter_digest())
        return digests

    one, other = together(2, body)
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_types(together, dtype):
    """Codecs work in float32, whatever the parameters are."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.odd = mlp(48, 48), nn.Parameter(torch.ones(40, 40, dtype=dtype))

        def forward(self, x):
            return self.inner(x) + (self.odd.sum() / 1600 - 1).float()

    def body(_):
        answers = []
        for name in NAMES:
            trainer = make(name, model=Odd)
            losses = trainer.fit(12)["loss"]
            answers.append((trainer.parameter_digest(), bool(losses[-1] < losses[0])))
        return answers

    one, other = together(2, body)
    assert one == other
    assert all(is_less for _, is_less in one)


def test_complex_parameters():
    """torch does not hand out their gradients whole; the error says so before training begins."""
    with pytest.raises(ValueError, match=r"complex.*weight.*compress=None"):
        make("int8", model=lambda: nn.Linear(3, 3, dtype=torch.complex64))


@pytest.mark.parametrize("name", NAMES)
def test_a_language_model_learns_as_well(together, name):
    """The loss of a small GPT after 60 steps is within 0.1 of that of a run without compression."""

    def body(_):
        losses = []
        for compress in (None, name):
            trainer = Trainer(
                model=lambda: GPT(GPTConfig(num_layers=2, num_heads=2, width=96, context=32)),
                optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3),
                loss=next_token_loss,
                data=ByteText(pydoc_text(), context=32),
                global_batch=16,
                strategy=DataParallel(compress=compress),
            )
            losses.append(trainer.fit(60)["loss"])
        return losses, trainer.digest()

    answers = together(2, body)
    whole, small = answers[0][0]
    assert len({digest for _, digest in answers}) == 1
    assert whole[-10:].mean() < whole[0] - 1.5
    assert abs(small[-10:].mean() - whole[-10:].mean()) < 0.1
