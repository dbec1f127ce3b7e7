"""Ranks that train apart: what they come to, what they send, and what a lost rank takes along."""

import numpy as np
import pytest
import regression
import saving
import torch
import torch.distributed as dist
from regression import mlp
from torch.utils.data import Subset
from trainers import FakePort, GroupError

from nbdist.data import ByteText, pydoc_text
from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import (
    GPT,
    DataParallel,
    DiLoCo,
    Evaluate,
    GPTConfig,
    LocalSGD,
    Trainer,
    next_token_loss,
)
from nbdist.train.loop import train, walk
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.data_parallel import sum_on_backend
from nbdist.train.strategies.flight import Flight


def make(strategy, **changes):
    return regression.make(**{"strategy": strategy} | changes)


def sgd(**settings):
    return lambda named: torch.optim.SGD(named, lr=0.05, **settings)


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-2)


def values(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy()


def after(together, num, steps, strategy, **changes):
    """Parameters of rank 0 after so many steps."""

    def body(_):
        trainer = make(strategy, **changes)
        trainer.fit(steps)
        return values(trainer)

    return together(num, body)[0]


@pytest.mark.parametrize("num", [2, 3])
def test_with_an_outer_step_every_step_it_is_synchronous_sgd(together, num):
    """Shares that differ weigh by their samples; so does an outer rate of 1, with or without
    Nesterov's momentum."""
    usual = {"global_batch": 61, "accumulate": 2}
    whole = after(together, 1, 8, DataParallel(), optimizer=sgd(), **usual)
    for strategy in (LocalSGD(1), DiLoCo(1, outer_lr=1, momentum=0)):
        apart = after(together, num, 8, strategy, optimizer=sgd(), **usual)
        np.testing.assert_allclose(apart, whole, rtol=0, atol=1e-6)
    nesterov = sgd(momentum=0.9, nesterov=True)
    whole = after(together, 1, 8, DataParallel(), optimizer=nesterov, **usual)
    apart = after(together, num, 8, DiLoCo(1, outer_lr=1), optimizer=sgd(), **usual)
    np.testing.assert_allclose(apart, whole, rtol=0, atol=1e-6)


def test_an_inner_optimizer_of_its_own_comes_elsewhere(together):
    """AdamW on each rank is not AdamW on the mean gradient: ranks do train apart."""
    whole = after(together, 1, 8, DataParallel(), optimizer=adamw)
    apart = after(together, 2, 8, DiLoCo(1, outer_lr=1, momentum=0), optimizer=adamw)
    assert np.abs(apart - whole).max() > 1e-3


@pytest.mark.parametrize("num", [2, 4])
def test_the_same_data_everywhere_is_one_worker(together, num):
    """Bit by bit: each rank has the samples that one alone would have."""

    def body(_, times=num):
        digests = []
        for optimizer in (sgd(momentum=0.9), adamw):
            trainer = make(LocalSGD(4), optimizer=optimizer, global_batch=10)
            batch = trainer._state.sampling.batch
            trainer._state.sampling.batch = lambda step, batch=batch: np.tile(batch(step), times)
            trainer.fit(10)
            digests.append(trainer.digest())
        return digests

    assert together(num, body) == [together(1, lambda rank: body(rank, times=1))[0]] * num


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        (LocalSGD(4), 1),
        (DiLoCo(4), 1),
        (DiLoCo(4, fragments=2), 1),
        (DiLoCo(4, compress="bf16"), 0.5),
        (DiLoCo(4, fragments=2, delay=1, compress="int8"), 0.301),  # 0.25, scales, whole blocks
    ],
)
def test_what_is_sent(together, strategy, share):
    """The parameters' bytes once in a period; between outer steps the ranks' models differ."""

    def body(_):
        trainer = make(strategy, model=lambda: mlp(48, 48))
        trainer.fit(6)
        between = trainer.parameter_digest()
        trainer.fit(2)
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        done = records[records["kind"] == Kind.BUCKET_DONE]
        mine = done[(done["step"] > 4) & (done["step"] <= 8)]
        num_bytes = sum(p.nbytes for p in trainer.model.parameters())
        return between, trainer.parameter_digest(), mine["value"].sum() / num_bytes

    between, end, shares = zip(*together(2, body), strict=True)
    assert between[0] != between[1]
    assert (end[0] == end[1]) == (getattr(strategy, "fragments", 1) == 1)
    assert shares == pytest.approx((share, share), abs=0.005)


@pytest.mark.parametrize(
    "strategy",
    [
        LocalSGD(5),
        DiLoCo(5),
        DiLoCo(6, fragments=3, delay=1, mixing=0.5),
        DiLoCo(5, compress="fp16"),
        DiLoCo(6, fragments=2, delay=1, compress="int8"),
    ],
)
def test_it_learns(together, strategy):
    """As well as ranks that sum their gradients in each step, or nearly."""

    def body(_, its=strategy):
        return make(its).fit(60)["loss"]

    one, other = together(2, body)
    whole = together(1, lambda rank: body(rank, DataParallel()))[0]
    np.testing.assert_array_equal(one, other)
    assert one[0] == pytest.approx(whole[0], rel=1e-6)
    assert one[-10:].mean() < one[0] / 3


@pytest.mark.parametrize("strategy", [LocalSGD(4), DiLoCo(4)])
def test_how_far_a_replica_has_drifted_is_told(together, strategy):
    """At each outer step: how far from the mean of all, as a share of where they had begun."""

    def body(_):
        trainer = make(strategy)
        trainer.fit(3)
        began = values(make(strategy))
        before = []
        exchange = trainer._state.exchange
        settle = exchange.settle
        exchange.settle = lambda keeper: (before.append(values(trainer)), settle(keeper))[1]
        trainer.fit(1)
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        told = records[records["kind"] == Kind.DRIFT]["value"]
        return began, before[-1], told.tolist()

    outcomes = together(2, body)
    mean = np.mean([before for _, before, _ in outcomes], axis=0)
    for began, before, told in outcomes:
        length = np.linalg.norm(before - mean) / np.linalg.norm(began)
        assert told == pytest.approx([length], rel=1e-4)
        assert length > 0


def test_a_gradient_that_is_not_finite_is_its_ranks_own(together):
    """It leaves out that step; the others do not, and nothing of it is in the mean."""

    def body(rank):
        trainer = make(LocalSGD(4))
        if rank == 1:
            weight = trainer.model[0].weight
            weight.register_hook(lambda g: g * float("nan") if trainer.step == 5 else g)
        trainer.fit(8)
        return (
            trainer.num_skipped,
            bool(np.isfinite(values(trainer)).all()),
            trainer.parameter_digest(),
        )

    (*one, digest), (*other, its) = together(2, body)
    assert (one, other) == ([0, True], [1, True])
    assert digest == its


@pytest.mark.parametrize(
    "strategy", [LocalSGD(4), DiLoCo(4, compress="fp16"), DiLoCo(4, compress="int8")]
)
def test_an_outer_step_that_is_not_finite_leaves_all_where_they_were(together, strategy):
    """At the one before; what was trained since then counts as lost, and training goes on."""

    def body(rank):
        trainer = make(strategy)
        trainer.fit(8)
        before = trainer.parameter_digest()
        trainer.fit(3)
        with torch.no_grad():
            trainer.model[0].weight[0, 0] += float("inf") if rank else 0
        trainer.fit(1)
        return before == trainer.parameter_digest(), trainer.num_skipped, trainer.num_lost_steps

    assert together(2, body) == [(True, 1, 8)] * 2


def test_a_language_model_learns_as_well(together):
    """Of a small GPT after 60 steps: four ranks that take their mean every ten are within 0.15 of a
    run that sums gradients, by the loss on windows of which all have seen as little."""

    def body(_, strategy):
        text = ByteText(pydoc_text(), context=32)
        trainer = Trainer(
            model=lambda: GPT(GPTConfig(num_layers=2, num_heads=2, width=64, context=32)),
            optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3),
            loss=next_token_loss,
            data=text,
            global_batch=16,
            evaluate=Evaluate(Subset(text, range(0, len(text), len(text) // 200)), every=60),
            strategy=strategy,
        )
        first = trainer.fit(60)["loss"][0]
        return first, trainer.evaluations[-1].metrics["loss"], trainer.parameter_digest()

    first, whole, _ = together(1, lambda rank: body(rank, DataParallel()))[0]
    strategy = DiLoCo(10, outer_lr=1, momentum=0)
    _, losses, digests = zip(*together(4, lambda rank: body(rank, strategy)), strict=True)
    assert len(set(digests)) == 1
    assert whole < first - 1.5
    assert abs(losses[0] - whole) < 0.15


@pytest.mark.parametrize("num", [2, 3])
def test_what_codes_leave_out_is_said_later(together, num):
    """All that was said is the sum of what was heard and of what is left: as often as it is the
    same, the mean of what was heard comes as near to it as 1 to that number."""

    def body(rank):
        generator = torch.Generator().manual_seed(rank)
        said = [torch.randn(700, generator=generator) ** 3, torch.randn(30, generator=generator)]
        place, wanted, heard, unsent, errors = Place(rank, num), None, None, [], []
        for times in range(1, 21):
            flight = Flight(said, 1.0, unsent)
            flight.send(sum_on_backend, "int8", 0, place)
            means = flight.received()
            unsent = flight.unsent()
            if wanted is None:
                exact = Flight(said, 1.0)
                exact.send(sum_on_backend, None, 0, place)
                wanted = torch.cat(exact.received())
            now = torch.cat(means)
            heard = now if heard is None else heard + now
            errors.append(float((heard / times - wanted).norm()))
        return errors, heard.tolist()

    outcomes = together(num, body)
    assert outcomes == outcomes[:1] * num
    errors, _ = outcomes[0]
    assert errors[0] > 0
    assert errors[-1] < 1.5 * errors[0] / len(errors)


class RankPort(FakePort):
    """In torch's default group."""

    def __init__(self, *until):
        super().__init__(*until)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()


def go(trainer, port):
    """Train until told to stand, or broken."""
    walker = walk(trainer._state, port)
    for step in walker:
        if step is None:
            return walker
        train(step)
    return walker


def on(walker, port, until):
    """Go on."""
    port.go_until = until
    for step in walker:
        if step is None:
            return
        train(step)


def fail_once(owner, name, when, *, is_after):
    """Have a method fail the first time that a condition holds."""
    method, pending = getattr(owner, name), [1]

    def fails(*arguments, **named):
        is_due = bool(pending) and when()
        if is_due:
            pending.clear()
        if is_due and not is_after:
            raise GroupError("gone")
        returned = method(*arguments, **named)
        if is_due:
            raise GroupError("gone")
        return returned

    setattr(owner, name, fails)


STRATEGIES = [
    LocalSGD(4),
    DiLoCo(4),
    DiLoCo(4, fragments=2, delay=1, mixing=0.25),
]
CODED = DiLoCo(4, fragments=2, delay=1, compress="int8")


def shared(trainer):
    """Anchors and momenta."""
    told = trainer._state.exchange._shared()["fragments"]
    return [t.flatten().tolist() for its in told for ts in its.values() for t in ts]


@pytest.mark.parametrize("strategy", [*STRATEGIES, CODED])
def test_who_joins_begins_with_the_last_outer_step(together, strategy):
    """Rank 1 is another one from step 6 on; what it had trained since the last outer step is lost,
    and counted on both."""

    def body(rank):
        trainer, port = make(strategy), RankPort(6)
        walker = go(trainer, port)
        if rank == 1:
            walker.close()
            trainer, port = make(strategy), RankPort(None)
            walker = go(trainer, port)
        port.generation = 2
        on(walker, port, 7)
        lost = trainer.num_lost_steps
        on(walker, port, 12)
        return trainer.step, lost, trainer.num_lost_steps, shared(trainer)

    one, other = together(2, body)
    assert one == other
    assert one[:3] == (12, 2, 2)


@pytest.mark.parametrize("strategy", [*STRATEGIES, CODED])
def test_an_outer_step_that_breaks_on_one_rank_is_made_up_for(together, strategy):
    """One had ended it, the other had not: nothing is lost, and every bit is as if nothing had
    been."""

    def body(rank):
        plain, trainer, port = make(strategy), make(strategy), RankPort(9)
        plain.fit(9)
        exchange = trainer._state.exchange

        def is_due():
            return trainer.step == 4

        if rank == 0:
            fail_once(exchange, "backward", is_due, is_after=False)
        else:
            for fragment in exchange._fragments:
                fail_once(fragment, "go", is_due, is_after=False)
        walker = go(trainer, port)
        stood = trainer.step, exchange._num_ended
        on(walker, port, 9)
        same = trainer.digest() == plain.digest() and shared(trainer) == shared(plain)
        return stood, trainer.step, trainer.num_lost_steps, same

    one, other = together(2, body)
    assert one[0][1] == other[0][1] + 1
    assert one[1:] == other[1:] == (9, 0, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_has_not_heard_of_a_step_loses_that_one(together, strategy):
    """The others had all votes. It keeps what it has trained before, and all is counted."""

    def body(rank):
        trainer, port = make(strategy), RankPort(9)
        exchange = trainer._state.exchange
        if rank == 0:
            fail_once(exchange, "backward", lambda: trainer.step == 6, is_after=False)
        else:
            fail_once(exchange, "_sum_vote", lambda: trainer.step == 5, is_after=True)
        walker = go(trainer, port)
        stood = trainer.step
        on(walker, port, 12)
        return stood, trainer.step, trainer.num_lost_steps, shared(trainer)

    one, other = together(2, body)
    assert (one[0], other[0]) == (6, 5)
    assert one[1:] == other[1:]
    assert one[1:3] == (12, 1)


def momenta(trainer):
    """Of the outer optimizer."""
    return [t.tolist() for its in trainer._state.exchange._fragments for t in its.momenta]


def save(together, path, strategy, step):
    """Save as two ranks; of each what it then held, the momenta, and its digest six steps on."""

    def then(trainer):
        now = values(trainer), momenta(trainer)
        trainer.fit(6)
        return *now, (trainer.digest(), shared(trainer))

    return saving.save(
        together, path, 2, step, make=lambda: make(strategy, optimizer=adamw), then=then
    )


def load(path, strategy):
    """A trainer that has loaded it, and what was said."""
    trainer = make(strategy, optimizer=adamw)
    return trainer, trainer.load(path)


@pytest.mark.parametrize("strategy", [*STRATEGIES, CODED])
def test_a_checkpoint_has_what_each_rank_has_come_to(together, tmp_path, strategy):
    """As many ranks go on bit by bit, an outer step under way included."""
    saved = save(together, tmp_path, strategy, 5)

    def body(_):
        trainer, notes = load(tmp_path, strategy)
        trainer.fit(6)
        return notes, (trainer.digest(), shared(trainer))

    assert together(2, body) == [([], after) for _, _, after in saved]


@pytest.mark.parametrize("strategy", [*STRATEGIES, CODED])
def test_others_read_the_mean(together, tmp_path, strategy):
    """One rank that sums gradients, or three that train apart; the outer momentum goes on."""
    (one, its_momenta, _), (other, _, _) = save(together, tmp_path, strategy, 5)
    trainer, notes = load(tmp_path, DataParallel())
    assert "had trained apart" in notes[0]
    np.testing.assert_allclose(values(trainer), (one + other) / 2, rtol=0, atol=1e-6)
    trainer.fit(1)

    def body(_):
        trainer, notes = load(tmp_path, strategy)
        now = len(notes), values(trainer).tolist(), momenta(trainer)
        trainer.fit(7)
        return now, (trainer.step, trainer.num_lost_steps, shared(trainer))

    starts, ends = zip(*together(3, body), strict=True)
    assert ends == ends[:1] * 3
    assert ends[0][:2] == (12, 0)
    assert starts == starts[:1] * 3
    assert starts[0][::2] == (1, its_momenta)


def test_of_what_all_have_alike_the_mean_is_that(together, tmp_path):
    """Bit by bit, just after they have taken it."""
    (one, _, _), (other, _, _) = save(together, tmp_path, LocalSGD(4), 4)
    trainer, _ = load(tmp_path, DataParallel())
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(values(trainer), one)
