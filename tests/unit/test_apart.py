"""Ranks that train apart: when they share what, who gives it to whom, and what one rank does."""

import functools

import pytest
import torch
from torch import nn
from trainers import FakePort, break_in, go, make

from nbdist.train import DataParallel, DiLoCo, LocalSGD, Trainer
from nbdist.train.strategies.meeting import Lack, Stand, giver, lack
from nbdist.train.strategies.outer import Calendar, cut


class Two(nn.Module):
    """Two numbers, of which an inner step takes 2; notes what they are at its beginning."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, x):
        self.seen.append((self.a.item(), self.b.item()))
        return x * 0 + self.a + self.b


def seen(**settings):
    """What the numbers of a run are, step by step."""
    model = Two()
    trainer = Trainer(
        model=model,
        optimizer=lambda named: torch.optim.SGD(named, lr=2.0),
        forward=lambda m, batch: (m(batch[0]).sum(), len(batch[0])),
        data=[(torch.zeros(1), 0)] * 4,
        global_batch=1,
        strategy=DiLoCo(
            **{"period": 6, "outer_lr": 2.0, "momentum": 0.0, "fragments": 2} | settings
        ),
    )
    trainer.fit(13)
    return tuple(list(numbers) for numbers in zip(*model.seen, strict=True))


def test_fragments_take_turns():
    """Both start at 1 and lose 2 a step; the outer rate is 2. One after the other goes twice as far
    as it has come since its last outer step."""
    a, b = seen()
    assert a == [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41]
    assert b == [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]


def test_fragments_may_be_mixed():
    """Half of it stays a rank's own, or all: then nothing jumps. The next outer step starts at what
    all have, not at what a rank has made of it."""
    a, _ = seen(mixing=0.5)
    assert (a[3], a[9]) == (-8, -24.5)
    a, b = seen(mixing=1.0)
    assert a == b == [1 - 2 * step for step in range(13)]


def test_fragments_may_be_late():
    """What was said a step before the outer step ends is what counts."""
    a, b = seen(delay=1)
    assert (a[2], a[3], b[5], b[6]) == (-3, -7, -9, -19)
    a, b = seen(delay=1, mixing=0.5)
    assert (a[3], b[6]) == (-6, -15)


def test_when_outer_steps_begin_and_end():
    """Every period / fragments steps one ends, which began `delay` steps before."""
    calendar = Calendar(12, 3, 2)
    assert [calendar.ends(number) for number in range(4)] == [4, 8, 12, 16]
    assert [calendar.begins(number) for number in range(4)] == [2, 6, 10, 14]
    assert [calendar.fragment(number) for number in range(4)] == [0, 1, 2, 0]
    assert [calendar.num_ended(step) for step in (0, 3, 4, 7, 12)] == [0, 0, 1, 1, 3]
    assert [calendar.oldest(number) for number in range(6)] == [0, 0, 0, 4, 8, 12]


def test_a_model_is_cut_evenly():
    """Whole parameters, in their order, each once; what is not trained is in none."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    module[0].requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    for num in (1, 2, 3, 5, 10):
        fragments = cut(module, num, None)
        assert len(fragments) == num
        assert [id(p) for f in fragments for p in f.parameters] == [id(p) for p in trained]
        sizes = [sum(p.numel() for p in fragment.parameters) for fragment in fragments]
        assert max(sizes) <= sum(sizes) / num + 64
    with pytest.raises(ValueError, match="fragments is 11, and the model has 10 parameters"):
        cut(module, 11, None)


def test_one_large_parameter_leaves_something_for_each_fragment():
    """However unequal they are."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(num)) for num in (1, 1, 1000, 1)])
    for num in (2, 3, 4):
        assert all(fragment.parameters for fragment in cut(module, num, None))


def test_who_lacks_what():
    """The end of an outer step, the last step, or everything."""
    top = Stand(1, 8, 2, has_begun=True)
    assert not lack(top, top)
    assert lack(Stand(2, 8, 1, has_begun=True), top) is Lack.END
    assert lack(Stand(2, 7, 2, has_begun=True), top) is Lack.STEP
    assert lack(Stand(2, 7, 1, has_begun=True), top) == Lack.STEP | Lack.END
    assert lack(Stand(2, 6, 2, has_begun=True), top) is Lack.ALL
    assert lack(Stand(2, 8, 2, has_begun=False), top) is Lack.ALL
    joins = Stand(3, 0, 0, has_begun=False)
    assert giver([joins, Stand(2, 7, 2, has_begun=True), top, top]) == 2
    assert giver([joins, Stand(2, 8, 1, has_begun=True), top]) == 2
    assert giver([joins, joins]) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"period": 0}, "period is 0"),
        ({"period": 6, "fragments": 4}, "period is 6 and fragments 4"),
        ({"period": 6, "fragments": 2, "delay": 3}, "delay is 3; it must be less than"),
        ({"period": 6, "momentum": 1}, "momentum is 1; .* less than 1"),
        ({"period": 6, "mixing": 1.5}, "mixing is 1.5; .* at most 1"),
        ({"period": 6, "outer_lr": 0}, "outer_lr is 0"),
        ({"period": 6, "compress": "int4"}, "compress is 'int4'"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    """Said with name and value."""
    with pytest.raises(ValueError, match=words):
        DiLoCo(**settings)


def test_they_say_what_they_cost():
    """Bytes of a step, in the units of the parameters."""
    assert "sends 0.2(n−1)/n times the parameters' bytes a step" in LocalSGD(10).describe()
    said = DiLoCo(10, fragments=2, delay=1, compress="bf16").describe()
    assert "sends 0.1(n−1)/n times the parameters' bytes a step" in said
    assert "in 2 parts" in said
    assert "while 1 steps are trained" in said


STRATEGIES = [LocalSGD(4), DiLoCo(4), DiLoCo(4, fragments=2, delay=1, mixing=0.25)]


@functools.cache
def undisturbed(strategy):
    """The state after seven steps to which nothing happens."""
    trainer = make(strategy=strategy)
    trainer.fit(7)
    return trainer.digest()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("phase", "step"), [("data", 3), ("backward", 4), ("vote", 5)])
def test_a_broken_step_is_repeated_as_if_nothing_had_been(strategy, phase, step):
    """Around an outer step, too: before, after, and while one is under way."""
    trainer, port = make(strategy=strategy), FakePort(7, 7)
    break_in(trainer, phase, step)
    go(trainer, port)
    assert ("broken", step) in port.told
    assert (trainer.step, trainer.num_lost_steps) == (7, 0)
    assert trainer.digest() == undisturbed(strategy)


def test_a_rank_alone_takes_its_own_mean():
    """Without others and without an outer optimizer an outer step changes no bit."""
    plain, apart = make(strategy=DataParallel()), make(strategy=LocalSGD(3))
    assert plain.fit(5)["loss"].tolist() == apart.fit(5)["loss"].tolist()
    assert plain.digest() == apart.digest()
