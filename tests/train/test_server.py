"""A parameter server and its workers: what they come to, what they send, and losses."""

import time
from collections import Counter

import numpy as np
import pytest
import regression
import saving
import torch
from regression import mlp
from torch import nn

from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import DataParallel, Evaluate, ParameterServer

SYNC, ASYNC = ParameterServer(), ParameterServer("async")


def make(strategy, **changes):
    return regression.make(**{"strategy": strategy} | changes)


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-2)


def normed():
    """With buffers."""
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


def values(trainer):
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    return torch.cat([t.detach().flatten().double() for t in tensors]).numpy()


def after(together, num, steps, strategy, **changes):
    """What each rank has after so many steps."""

    def body(_):
        trainer = make(strategy, **changes)
        history = trainer.fit(steps)
        return values(trainer), trainer.step, history["step"].tolist(), dict(trainer.staleness)

    return together(num, body)


@pytest.mark.parametrize(
    ("num", "optimizer", "strategy"),
    [(2, adamw, SYNC), (4, adamw, SYNC), (4, None, SYNC), (5, adamw, ParameterServer(quorum=3))],
)
def test_with_all_of_them_it_is_a_step_of_all(together, num, optimizer, strategy):
    """Shares that differ weigh by their samples; the norm is that of the whole gradient."""
    changes = {"global_batch": 61, "accumulate": 2, "clip_norm": 0.5}
    changes |= {"optimizer": optimizer} if optimizer else {}
    whole = after(together, 1, 8, DataParallel(), **changes)[0][0]
    for mine, step, _, _ in after(together, num, 8, strategy, **changes):
        np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6)
        assert step == 8


@pytest.mark.parametrize(
    ("num", "strategy"),
    [(1, ASYNC), (2, ASYNC), (3, ASYNC), (3, ParameterServer("bounded", staleness=0)), (3, SYNC)],
)
def test_one_worker_is_one_worker(together, num, strategy):
    """Bit by bit what one rank alone comes to, buffers included; so is the replica."""
    changes = {"optimizer": adamw, "model": normed, "clip_norm": 0.7}
    whole, _, steps, _ = after(together, 1, 9, DataParallel(), **changes)[0]
    outcomes = after(together, num, 9, strategy, **changes)
    for mine, step, _, _ in outcomes:
        np.testing.assert_array_equal(mine, whole)
        assert step == 9
    for _, _, history, ages in outcomes[: max(1, num - 1)]:
        assert (history, ages) == (steps, {0: 9})


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [(ASYNC, None), (ParameterServer("bounded", staleness=1), 1), (SYNC, 0)],
)
def test_each_step_is_applied_once_however_fast_its_worker(together, strategy, bound):
    """Server and replica have applied the same in the same order, none older than the bound."""

    def body(rank):
        trainer = make(strategy, optimizer=adamw)
        if rank == 3:
            trainer.model.register_forward_hook(lambda *_: time.sleep(0.02))
        history = trainer.fit(40)
        return values(trainer), history["step"].tolist(), dict(trainer.staleness), trainer.step

    outcomes = together(5, body)
    for mine, _, _, step in outcomes:
        np.testing.assert_array_equal(mine, outcomes[0][0])
        assert step == 40
    (_, steps, ages, _), (_, others, its, _) = outcomes[:2]
    assert sorted(steps) == list(range(40))
    assert (steps, ages) == (others, its)
    assert sum(ages.values()) == 40
    assert bound is None or max(ages) <= bound
    assert all(history == [] for _, history, _, _ in outcomes[2:])


def counted(trainer):
    """What each step's samples weigh in what the server applies; is added to as it trains."""
    parcels = trainer._state.exchange._parcels
    mean, weights = parcels.mean, Counter()

    def counting(pushes):
        for push in pushes:
            weights[int(push.asked.number)] += push.asked.weight
        return mean(pushes)

    parcels.mean = counting
    return weights


@pytest.mark.parametrize("scales", [False, True])
def test_a_quorum_does_not_wait_and_loses_nothing(together, tmp_path, scales):
    """A worker is stuck in the first step until others are in the third: its part goes into a later
    one. Each sample is applied once; server and replica are equal, buffers included."""
    go_on = tmp_path / "on"

    def body(rank):
        strategy = ParameterServer(quorum=2, scale_lr=scales)
        trainer = make(strategy, optimizer=adamw, model=normed)

        def wait(*_):
            number = trainer.step
            if rank == 2 and number >= 2:
                go_on.touch()
            while rank == 4 and number == 0 and not go_on.exists():
                time.sleep(0.01)

        trainer.model.register_forward_hook(wait)
        weights = counted(trainer)
        history = trainer.fit(12)
        steps = history["step"].tolist()
        return values(trainer).tolist(), steps, weights, trainer.late_parts, trainer.step

    outcomes = together(5, body)
    assert all((mine, step) == (outcomes[0][0], 12) for mine, _, _, _, step in outcomes)
    (_, steps, weights, late, _), (_, others, _, its, _) = outcomes[:2]
    assert steps == others == list(range(12))
    assert weights == dict.fromkeys(range(12), 60)
    assert late == its
    assert set(late) == {"applied"}


def test_late_updates_may_count_less(together):
    """With a rate divided by one more than what came between."""

    def body(rank):
        strategy = ParameterServer("async", scale_lr=True, replica=False)
        trainer = make(strategy, optimizer=lambda named: torch.optim.SGD(named, lr=0.5))
        if rank == 2:
            trainer.model.register_forward_hook(lambda *_: time.sleep(0.05))
        history = trainer.fit(12)
        return dict(trainer.staleness), history["lr"].tolist()

    ages, rates = together(3, body)[0]
    assert sum(ages.values()) == 12
    expected = sorted(0.5 / (1 + age) for age, num in ages.items() for _ in range(num))
    assert sorted(rates) == pytest.approx(expected)


def test_evaluations_are_of_all_and_of_one_state(together):
    """All stand for them, with everything applied that was dealt."""

    def body(_, strategy):
        data = regression.dataset(64)
        trainer = make(strategy, evaluate=Evaluate(data, every=4))
        trainer.fit(10)
        return [(e.step, e.metrics["loss"]) for e in trainer.evaluations]

    one, *others = together(4, lambda rank: body(rank, ASYNC))
    assert [step for step, _ in one] == [4, 8]
    assert others == [one] * 3
    whole = together(1, lambda rank: body(rank, DataParallel()))[0]
    synced = together(3, lambda rank: body(rank, SYNC))[0]
    assert [loss for _, loss in synced] == pytest.approx([loss for _, loss in whole], rel=1e-5)


def test_what_is_sent(together):
    """For each batch the gradients' bytes, and the parameters' bytes back; each update's staleness
    is told by the server."""

    def body(_):
        trainer = make(ASYNC, model=lambda: mlp(48, 48))
        trainer.fit(6)
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        done = records[records["kind"] == Kind.BUCKET_DONE]["value"]
        ages = records[records["kind"] == Kind.STALENESS]["value"]
        num_bytes = sum(p.nbytes for p in trainer.model.parameters())
        return sorted((done / num_bytes).tolist()), ages.tolist()

    server, worker = together(2, body)
    assert server == ([], [0] * 6)
    assert worker == ([1, *[2] * 6], [])  # it is given the first ones


@pytest.mark.parametrize("strategy", [SYNC, ASYNC])
def test_it_learns(together, strategy):
    """Three workers, as well as one rank or nearly."""

    def body(_):
        return make(strategy, optimizer=adamw).fit(80)["loss"]

    losses = together(5, body)[0]
    assert losses[-10:].mean() < losses[0] / 3


def now_and_later(trainer):
    """What it has, and four steps later."""
    now = values(trainer)
    trainer.fit(4)
    return now, values(trainer)


RESUMED = {
    "optimizer": adamw,
    "model": normed,
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
}
ONE = ParameterServer("async", server=2)


@pytest.mark.parametrize(
    ("there", "here"),
    [((3, ONE), (3, ONE)), ((3, ONE), (1, DataParallel())), ((1, DataParallel()), (3, ASYNC))],
)
def test_a_checkpoint_is_the_server_s(together, tmp_path, there, here):
    """Any other strategy goes on from it bit by bit, with its optimizer and its scheduler."""
    num, strategy = there
    now, later = saving.save(
        together, tmp_path, num, 5, make=lambda: make(strategy, **RESUMED), then=now_and_later
    )[0]
    num, its = here

    def body(_):
        trainer = make(its, **RESUMED)
        assert trainer.load(tmp_path) == []
        return *now_and_later(trainer), trainer.step

    for loaded, end, step in together(num, body):
        np.testing.assert_array_equal(loaded, now)
        np.testing.assert_array_equal(end, later)
        assert step == 9


@pytest.mark.parametrize("strategy", [SYNC, ASYNC])
def test_what_is_not_finite_is_left_out(together, strategy):
    """By the server and its replica alike: the step is committed, and counted as skipped."""

    def body(_):
        def loss(output, target):
            bad = (target == regression.dataset()[7][1]).any()
            return nn.functional.mse_loss(output, target) * (float("nan") if bad else 1.0)

        trainer = make(strategy, loss=loss, model=normed)
        trainer.fit(4)  # an epoch: one of its batches has this sample
        return values(trainer).tolist(), trainer.num_skipped, trainer.step

    outcomes = together(4, body)
    assert outcomes == [outcomes[0]] * 4
    assert np.isfinite(outcomes[0][0]).all()
    assert outcomes[0][1:] == (1, 4)


def test_a_loop_of_one_s_own_trains_where_workers_are(together):
    """The server goes through none of its steps, and all come to the same end."""

    def body(_):
        trainer, numbers = make(ASYNC), []
        for step in trainer.steps(10):
            numbers.append(step.number)
            with step:
                for x, y in step.batches():
                    loss = nn.functional.mse_loss(trainer.model(x), y)
                    step.backward(loss, count=len(x))
        return numbers, trainer.step, values(trainer).tolist()

    (none, end, server), (no, _, replica), *workers = together(4, body)
    assert (none, no, end) == ([], [], 10)
    assert sorted(number for its, _, _ in workers for number in its) == list(range(10))
    assert all((step, its) == (10, server) for _, step, its in workers)
    assert replica == server
