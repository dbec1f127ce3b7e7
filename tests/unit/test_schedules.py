"""Schedules of pipelines: those by name, and a user's own, checked before it runs."""

import pytest

from nbdist.train import DataParallel, Pipeline
from nbdist.train.strategies import actions, schedules

TWO = {0: ["0F0", "0F1", "0B0", "0B1"], 1: [None, "1F0", "1B0", "1F1", "1B1"]}


def checked(order, num_stages=2, num_microbatches=2):
    return actions.check(actions.parse(order), num_stages, num_microbatches)


def changed(rank, *listed):
    return TWO | {rank: list(listed)}


def test_a_good_schedule_passes():
    """Stages are where their actions are; split backward passes count as whole ones."""
    assert checked(TWO) == (0, 1)
    assert checked(changed(1, "1F0", "1I0", "1F1", "1I1", "1W1", "1W0")) == (0, 1)
    v = {0: ["0F0", "3F0", "3B0", "0B0"], 1: ["1F0", "2F0", "2B0", "1B0"]}
    assert checked(v, 4, 1) == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([], "must be a name, or a dict"),
        ({1: ["0F0"]}, "must be a name, or a dict"),
        (changed(0, "0F0", 3), r"rank 0, position 1: 3 is no action"),
        (changed(0, "0X0"), r"rank 0, position 0: '0X0' is no action"),
        ({0: "0F0"}, r"schedule\[0\]"),
    ],
)
def test_what_is_no_schedule_is_named(order, says):
    """Rank and position of what cannot be read stand in the message."""
    with pytest.raises((TypeError, ValueError), match=says):
        checked(order)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (changed(0, "0F0", "2F1"), "rank 0, position 1: 2F1 is out of range"),
        (changed(0, "0F0", "0F2"), "rank 0, position 1: 0F2 is out of range"),
        (changed(0, "0F0", "1F1"), "rank 1, position 0: 1F0 is on another rank than stage 1 at"),
        (changed(0, "0F0", "0F0"), "rank 0, position 1: 0F0 doubles 0F0 at rank 0, position 0"),
        (changed(0, "0F0", "0B0", "0I0"), "rank 0, position 2: 0I0 doubles 0B0"),
        (changed(0, "0F0", "0B0", "0W0"), "rank 0, position 2: 0W0 doubles 0B0"),
        (changed(0, "0B0", "0F0"), "rank 0, position 0: 0B0 comes before 0F0"),
        (changed(0, "0F0", "0W0"), "rank 0, position 1: 0W0 comes before 0I0"),
        (changed(0, "0F0", "0F1", "0B0"), "rank 0, position 3: the list ends, and 0B1 is missing"),
        (changed(0, "0F0", "0B0"), "rank 0, position 2: the list ends, and 0F1 is missing"),
        (changed(0, "0F0", "0F1", "0I0", "0B1"), "position 4: the list ends, and 0W0 is missing"),
        ({0: ["0F0", "0B0"]}, "no rank has stage 1"),
        ({0: ["0F0", "1F0"], 1: []}, "rank 1: it has no action"),
    ],
)
def test_a_bad_schedule_is_named(order, says):
    """Missing, doubled and misplaced actions are named with rank and position."""
    with pytest.raises(ValueError, match=says):
        checked(order)


def test_a_deadlock_is_named():
    """Every rank that waits for ever is named, where it waits, and for what."""
    order = changed(0, "0F0", "0B0", "0F1", "0B1") | {1: ["1F0", "1F1", "1B0", "1B1"]}
    with pytest.raises(ValueError, match="deadlock") as raised:
        checked(order)
    assert "rank 0, position 1: 0B0 waits for 1B0" in str(raised.value)
    assert "rank 1, position 1: 1F1 waits for 0F1" in str(raised.value)


def test_where_stages_lie():
    """In a loop, or in a V whose turn is on the last rank."""
    assert schedules.owners("gpipe", 3, 3) == (0, 1, 2)
    assert schedules.owners("interleaved", 6, 3) == (0, 1, 2, 0, 1, 2)
    assert schedules.owners("zbv", 6, 3) == (0, 1, 2, 2, 1, 0)
    for name, stages, ranks in [("1f1b", 4, 2), ("zbv", 2, 2), ("interleaved", 5, 2)]:
        with pytest.raises(ValueError, match="on each rank, the same number on all: give stages="):
            schedules.owners(name, stages, ranks)


def test_counts_that_do_not_fit():
    """A schedule that cannot do with the number of micro-batches says what it needs."""
    for name in schedules.SCHEDULES:
        schedules.check_counts(name, 4, 2, 8)
    with pytest.raises(ValueError, match="at least one micro-batch for each stage"):
        schedules.check_counts("1f1b", 4, 4, 3)
    with pytest.raises(ValueError, match="give a multiple of 4"):
        schedules.check_counts("interleaved", 8, 4, 9)
    with pytest.raises(ValueError, match=r"schedule is 'chimera'; it must be one of \['gpipe'"):
        schedules.named("chimera")
    assert [schedules.default_microbatches(4, n) for n in (100, 16, 15, 3)] == [16, 16, 12, 1]


@pytest.mark.parametrize(
    ("name", "counts", "share"),
    [("gpipe", (4, 1, 8), 3 / 11), ("interleaved", (4, 2, 8), 3 / 19), ("zbv", (2, 2, 4), 1 / 25)],
)
def test_idle_shares_are_those_of_the_formula_sheet(name, counts, share):
    """p ranks, v stages on each, m micro-batches."""
    assert schedules.named(name).idle_share(*counts) == pytest.approx(share)


def test_one_forward_one_backward():
    """The first rank runs ahead by as many micro-batches as there are ranks, the last by one."""
    orders = {rank: schedules.one_by_one(rank, 3, 4) for rank in range(3)}
    assert checked(orders, 3, 4) == (0, 1, 2)
    assert orders[0] == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"]
    assert orders[2] == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]


def test_the_idle_share_of_a_schedule_of_ones_own():
    """Of the time from the first action to the last, over all ranks."""
    orders = {rank: schedules.one_by_one(rank, 4, 8) for rank in range(4)}
    share = actions.idle_share(actions.parse(orders), 4)
    assert share == pytest.approx(schedules.named("1f1b").idle_share(4, 1, 8))


def test_a_pipeline_says_what_it_costs():
    """One sentence, with the formula and its value."""
    assert "waits for (p−1)/(v·m+p−1) = 27% of a step" in Pipeline(4, "1f1b", 8).describe()
    assert "(interleaved)" in Pipeline(4, "interleaved", 8).describe()
    assert (
        "waits for 20% of a step"
        in Pipeline(2, {r: schedules.one_by_one(r, 2, 4) for r in range(2)}, 4).describe()
    )
    assert "2(n−1)/n" in DataParallel().describe()
    assert "0.13(n−1) times" in DataParallel(compress="topk").describe()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stages": 0}, "stages is 0"),
        ({"stages": 2, "microbatches": 0}, "microbatches is 0"),
        ({"stages": 2, "schedule": "best"}, "schedule is 'best'"),
        ({"stages": 2, "schedule": 3}, "schedule is 3; it must be a name"),
        ({"stages": 2, "schedule": TWO}, "say microbatches="),
        ({"stages": 2, "schedule": TWO, "microbatches": 3}, "0F2 is missing"),
        ({"stages": 2, "split": "even"}, "split is 'even'"),
        ({"stages": 2, "copy_every": -1}, "copy_every is -1"),
    ],
)
def test_settings_that_cannot_be(arguments, says):
    """They are refused where they are written."""
    with pytest.raises((TypeError, ValueError), match=says):
        Pipeline(**arguments)
