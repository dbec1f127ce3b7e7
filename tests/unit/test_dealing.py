"""Who trains which step where a server deals them, and whose update may be applied."""

import random

import pytest

from nbdist.train import ParameterServer
from nbdist.train.strategies.dealing import Dealer, Dealt
from nbdist.train.strategies.roles import Roles


def play(seed, num_workers, staleness, until):
    """Workers of random speed; what was applied, and how old each update was."""
    draw, dealer = random.Random(seed), Dealer(staleness=staleness)
    applied, ages, done, waiting = [], [], [], set(range(num_workers))
    for _ in range(100_000):
        for worker in sorted(waiting):
            if dealer.deal(worker, until) is not None:
                waiting.remove(worker)
        while ready := [worker for worker in done if dealer.may_apply(worker)]:
            applied.append(dealer.has(ready[0]))
            ages.append(dealer.apply(ready[0]))
            done.remove(ready[0])
            waiting.add(ready[0])
        training = [w for w in range(num_workers) if w not in waiting and w not in done]
        if training:
            done.append(draw.choices(training, weights=[4**w for w in training])[0])
        elif len(waiting) == num_workers and dealer.low == until:
            return applied, ages
    raise AssertionError("they stand still")


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, None])
@pytest.mark.parametrize("num_workers", [1, 3, 6])
def test_each_step_is_applied_once_and_none_too_late(num_workers, staleness):
    """Whoever is how fast: no update is older than the bound, and nobody waits for ever."""
    for seed in range(20):
        applied, ages = play(seed, num_workers, staleness, 60)
        assert sorted(applied) == list(range(60))
        limit = num_workers * 60 if staleness is None else staleness
        assert max(ages) <= limit


def test_without_a_bound_a_slow_worker_keeps_nobody():
    """The others go on, as far as there are steps, and its update is as old as that."""
    dealer = Dealer()
    assert [dealer.deal(0, 5), dealer.deal(1, 5)] == [Dealt(0, 0), Dealt(1, 0)]
    ages = []
    for _ in range(4):
        ages.append(dealer.apply(1))
        dealer.deal(1, 5)
    assert (ages, dealer.low, dealer.version) == ([0] * 4, 0, 4)
    assert dealer.deal(2, 5) is None
    assert dealer.apply(0) == 4
    assert (dealer.low, dealer.is_even) == (5, True)


def test_what_a_lost_worker_had_is_dealt_again():
    """First of all; not if it says that it still has it, nor if it was applied."""
    dealer = Dealer(7)
    for worker in range(3):
        dealer.deal(worker, 100)
    dealer.apply(1)
    dealer.begin()
    dealer.keep(2, Dealt(9, 7))
    dealer.keep(1, Dealt(8, 7))
    assert (dealer.has(2), dealer.has(1)) == (9, None)
    assert not dealer.is_even
    assert [dealer.deal(0, 100), dealer.deal(1, 100)] == [Dealt(7, 8), Dealt(10, 8)]


def test_a_replica_hears_of_what_a_worker_kept():
    """That is applied as any other, and not dealt again by whoever takes over."""
    replica = Dealer(4)
    replica.keep(2, Dealt(5, 4))
    for ticket in (5, 4):
        replica.note(ticket)
    assert (replica.has(2), replica.low, replica.is_even) == (None, 6, True)


def test_a_replica_deals_on():
    """It knows what was applied, and learns from workers what was dealt beyond that."""
    replica = Dealer(4)
    replica.load(Dealer(5).packed())
    for ticket in (5, 8):
        replica.note(ticket)
    replica.begin()
    replica.keep(0, Dealt(9, 7))
    assert (replica.low, replica.version, replica.has(0)) == (6, 7, 9)
    tickets = [replica.deal(worker, 100) for worker in (1, 2, 3)]
    assert tickets == [Dealt(6, 7), Dealt(7, 7), Dealt(10, 7)]


@pytest.mark.parametrize(
    ("num", "server", "has_replica", "roles"),
    [
        (1, 0, True, Roles(0, None, ())),
        (2, 0, True, Roles(0, None, (1,))),
        (3, 0, True, Roles(0, 1, (2,))),
        (4, 3, True, Roles(3, 0, (1, 2))),
        (3, 7, False, Roles(2, None, (0, 1))),
    ],
)
def test_who_is_what(num, server, has_replica, roles):
    """Two ranks leave none for a replica."""
    assert Roles.of(num, server, has_replica=has_replica) == roles


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "k of n"}, "mode is 'k of n'; it must be one of"),
        ({"mode": "bounded"}, "mode is 'bounded' and staleness None"),
        ({"mode": "async", "staleness": 3}, "mode is 'async' and staleness 3"),
        ({"mode": "bounded", "staleness": -1}, "staleness is -1"),
        ({"quorum": 0}, "quorum is 0"),
        ({"mode": "async", "quorum": 2}, "mode is 'async' and quorum 2"),
        ({"server": 1.5}, "server is 1.5"),
    ],
)
def test_settings_that_do_not_fit(settings, words):
    """The message names them, and what may be."""
    with pytest.raises(ValueError, match=words):
        ParameterServer(**settings)


def test_what_it_does_is_said():
    """With the bound, and with what a replica costs."""
    said = ParameterServer("bounded", staleness=4).describe()
    assert "after at most 4 others" in said
    assert "copy of the server" in said
    assert "applied when 3 are there" in ParameterServer(quorum=3).describe()
    assert "copy" not in ParameterServer(replica=False, server=2).describe()
