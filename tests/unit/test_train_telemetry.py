"""What a trainer tells as telemetry, and how a vote travels with gradients."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from trainers import FakePort, Samples, break_in, go, make

from nbdist.engine.emit import RING
from nbdist.engine.port import Port
from nbdist.protocol.runs import RunSpec
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import Evaluate, Trainer
from nbdist.train import step as module
from nbdist.train.vote import join, split


def drain():
    records = np.frombuffer(RING.drain(4096).records, RECORD)
    return records[np.isin(records["kind"], sorted(Kind))]


def trained(trainer, port):
    drain()
    go(trainer, port)
    return drain()


def of(records, kind):
    return records[records["kind"] == kind]


def test_each_step_tells_its_parts():
    """Every part once for each step, micro-batches numbered, none outside its step."""
    records = trained(make(accumulate=2, clip_norm=1.0), FakePort(3))
    num = {kind: len(of(records, kind)) for kind in Kind if len(of(records, kind))}
    each = [Kind.STEP, Kind.COMPUTE, Kind.VOTE, Kind.OPTIMIZER]
    each += [Kind.SAMPLES, Kind.LOSS, Kind.GRAD_NORM]
    per_batch = [Kind.DATA, Kind.FORWARD, Kind.BACKWARD]
    assert num == dict.fromkeys(each, 3) | dict.fromkeys(per_batch, 6)
    assert of(records, Kind.FORWARD)["ident"].tolist() == [0, 1] * 3
    assert records["generation"].tolist() == [1] * len(records)
    for span in of(records, Kind.STEP):
        mine = records[records["step"] == span["step"]]
        assert mine["t0_ns"].min() == span["t0_ns"]
        spans = mine[~np.isin(mine["kind"], [Kind.SAMPLES, Kind.LOSS])]
        assert spans["t1_ns"].max() == span["t1_ns"]


def test_compute_is_forward_and_backward():
    """What was waited for, data or other ranks, is not in it."""
    records = trained(make(accumulate=2), FakePort(2))
    for step in range(2):
        mine = records[records["step"] == step]
        lasted = {k: int((of(mine, k)["t1_ns"] - of(mine, k)["t0_ns"]).sum()) for k in Kind}
        assert lasted[Kind.COMPUTE] == lasted[Kind.FORWARD] + lasted[Kind.BACKWARD] > 0
        assert of(mine, Kind.COMPUTE)["t1_ns"][0] == of(mine, Kind.BACKWARD)["t1_ns"][-1]


def rest(monkeypatch, wake):
    """Time for a step that passes only where it sleeps; `wake` is told each nap."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds
        wake(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr("nbdist.train.stamps.Stamps.slept", lambda *_: None)


def test_a_rank_that_was_made_slow_sleeps_in_its_compute(monkeypatch):
    """So many times the compute of the step before; of what it has slept nothing grows."""
    trainer, port = make(accumulate=2), FakePort(4)
    naps = dict.fromkeys(range(4), 0.0)

    def wake(seconds):
        naps[trainer.step] += seconds

    rest(monkeypatch, wake)
    port.slow_factor = 3.0
    records = trained(trainer, port)
    lasted = of(records, Kind.COMPUTE)
    own = (lasted["t1_ns"] - lasted["t0_ns"]) * 1e-9
    assert naps[0] == 0.0
    np.testing.assert_allclose(list(naps.values())[1:], 2 * own[:-1], rtol=0.1)


def test_a_rest_ends_when_the_factor_is_set_back(monkeypatch):
    """It looks many times a second, and rests no longer than the factor of now wants."""
    naps, port = [], FakePort(2)

    def wake(seconds):
        naps.append(seconds)
        port.slow_factor = 1.0 if len(naps) == 3 else port.slow_factor

    rest(monkeypatch, wake)
    port.slow_factor = 1e9
    trained(make(), port)
    assert naps == [module.NAP_S] * 3
    assert len(port.rows) == 2


@pytest.mark.parametrize(("cut", "factor"), [(0, 50.0), (3, 50.0), (4, 1.0)])
def test_nobody_rests_in_a_group_that_is_cut(cut, factor):
    """The others wait for it to leave, and not for its share."""
    groups = SimpleNamespace(generation=4, cut_generation=cut)
    port = Port(SimpleNamespace(groups=groups, slow_factor=50.0), RunSpec(run="r", name="t"), None)
    assert port.slow_factor == factor


def test_the_loss_told_is_that_of_the_share():
    """With one rank it is the one in the history."""
    port = FakePort(3)
    records = trained(make(), port)
    assert of(records, Kind.LOSS)["value"].tolist() == pytest.approx([r[1] for r in port.rows])
    assert of(records, Kind.SAMPLES)["value"].tolist() == [8.0] * 3


def test_a_broken_attempt_is_told():
    """Its parts carry the attempt, and it says that it was given up; it commits nothing."""
    trainer = make()
    break_in(trainer, "forward", 1)
    records = trained(trainer, FakePort(2, 2))
    assert of(records, Kind.STEP_BROKEN)[["step", "attempt"]].tolist() == [(1, 0)]
    told = of(records, Kind.STEP)[["step", "attempt", "generation"]].tolist()
    assert told == [(0, 0, 1), (1, 0, 1), (1, 1, 2)]
    assert of(records, Kind.LOSS)[["step", "attempt"]].tolist() == [(0, 0), (1, 1)]


def test_an_evaluation_is_told():
    """A span of the step that follows it."""
    records = trained(make(evaluate=Evaluate(Samples(), every=2)), FakePort(2))
    assert of(records, Kind.EVALUATE)["step"].tolist() == [2]


def test_a_trainer_alone_tells_too():
    """The loop does not ask who listens."""
    drain()
    Trainer(
        model=nn.Linear(4, 1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        loss=nn.functional.mse_loss,
        data=Samples(),
        global_batch=8,
    ).fit(1)
    assert len(of(drain(), Kind.STEP)) == 1


# ---- votes


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_sums_of_votes_are_exact_enough(ranks):
    """Whole numbers to 16 million exactly, others to 7 digits."""
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 16_000_000 // ranks, ranks)
    losses = generator.normal(size=ranks) * 1e5
    votes = [[float(loss), float(count), 1.0] for loss, count in zip(losses, counts, strict=True)]
    together = sum(split(vote) for vote in votes).flatten().tolist()
    loss, count, hold = join(together)
    assert (count, hold) == (counts.sum(), ranks)
    assert loss == pytest.approx(losses.sum(), rel=1e-6, abs=1e-6 * abs(losses).max())


def test_one_vote_is_kept_to_14_digits():
    """Two halves hold 48 bits of a number."""
    values = [math.pi * 1e6, 1 / 3, 2.0**40 + 1]
    assert join(split(values).flatten().tolist()) == pytest.approx(values, rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_not_finite_stays_so(bad):
    """Nobody takes a step for good whose loss was not finite on one rank."""
    together = split([bad, 1.0]) + split([2.0, 1.0])
    loss, count = join(together.flatten().tolist())
    assert not math.isfinite(loss)
    assert count == 2
