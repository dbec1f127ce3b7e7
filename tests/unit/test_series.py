"""Series: new values as they were, older ones summed up, and never more than so many bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from nbdist.protocol.telemetry import MAX_BATCH_RECORDS, RECORD, TIMELINE, Kind
from nbdist.supervisor.history import (
    CAPACITY,
    FIRST_POINTS,
    POINT,
    RESERVE,
    SUMMARY,
    Budget,
    History,
    Window,
)
from nbdist.supervisor.series import MAX_WAITING, Series
from nbdist.supervisor.timeline import MAX_RECORDS, NUM_LAST, NUM_WORST, Key, Timelines

PLENTY = 10_000_000


def points(first, num):
    """Values that equal their time and step."""
    out = np.zeros(num, POINT)
    out["at"] = out["value"] = out["step"] = np.arange(first, first + num)
    return out


def records(num, **fields):
    out = np.zeros(num, RECORD)
    out["number"] = np.arange(1, num + 1)
    for name, value in fields.items():
        out[name] = value
    return out


# ---- windows


@pytest.mark.parametrize("part", [1, 7, 99, 250])
def test_a_window_holds_the_last_values(part):
    """In their order, however many come at a time."""
    window = Window(POINT, Budget(PLENTY), capacity=100)
    for first in range(0, 1_000, part):
        window.add(points(first, part))
    last = first + part
    assert window.values()["at"].tolist() == list(range(last - 100, last))


def test_a_window_grows_with_what_comes():
    """A short series takes little memory, and no more than its capacity is ever taken."""
    budget = Budget(PLENTY)
    window = Window(POINT, budget)
    window.add(points(0, 3))
    assert budget.num_bytes == FIRST_POINTS * POINT.itemsize
    for first in range(3, 3 * CAPACITY, 100):
        window.add(points(first, 100))
    assert budget.num_bytes == CAPACITY * POINT.itemsize


def test_a_window_that_may_not_grow_forgets_sooner():
    """Nothing is refused; the newest are there."""
    window = Window(POINT, Budget(200 * POINT.itemsize))
    for first in range(0, 1_000, 10):
        assert window.add(points(first, 10)) == 0
    assert window.values()["at"].tolist() == list(range(1_000 - len(window.values()), 1_000))
    assert FIRST_POINTS <= len(window.values()) <= 200


def test_without_any_room_values_are_refused():
    """And counted."""
    window = Window(POINT, Budget(10))
    assert window.add(points(0, 5)) == 5
    assert len(window.values()) == 0


def test_those_that_begin_find_room_where_others_may_not_grow():
    """A newcomer's series are seen though the others have used up all that they may."""
    budget = Budget(100_000)
    assert budget.take(int(100_000 * (1 - RESERVE)))
    assert not budget.take(1)
    assert Window(POINT, budget).add(points(0, 5)) == 0


# ---- histories


def test_a_history_is_complete_at_three_levels():
    """The last values are there themselves, those before as means of ten, then of a hundred."""
    history = History(Budget(PLENTY))
    num = 30_000
    for first in range(0, num, 500):
        history.add(points(first, 500))
    assert history.points()["at"].tolist() == list(range(num - CAPACITY, num))
    summaries = history.summaries()
    assert (np.diff(summaries["at"]) > 0).all()
    tens = summaries[summaries["high"] - summaries["low"] == 9]
    hundreds = summaries[summaries["high"] - summaries["low"] == 99]
    assert len(tens) + len(hundreds) == len(summaries)
    assert (tens["mean"] == tens["high"] - 4.5).all()
    assert (hundreds["mean"] == hundreds["high"] - 49.5).all()
    assert (summaries["at"] == summaries["high"]).all()
    assert (summaries["step"] == summaries["high"]).all()
    assert hundreds["low"][0] == 0
    x, y = history.curve()
    assert (np.diff(x) > 0).all()
    assert len(x) == len(y) == len(summaries) + CAPACITY


def test_a_loss_that_is_no_number_is_kept_as_it_is():
    """Nan and infinite values neither raise nor warn, and show in the summary."""
    history = History(Budget(PLENTY))
    values = points(0, 30)
    values["value"][[3, 14, 15]] = [float("nan"), float("inf"), float("-inf")]
    history.add(values)
    history.summaries()  # what waits is summed up
    tens = history._by_ten.values()
    assert np.isnan(tens["mean"]).tolist() == [True, True, False]
    assert tens["high"][1] == float("inf")


def test_an_empty_history_is_no_curve():
    """Nothing came, nothing is shown."""
    history = History(Budget(PLENTY))
    assert [len(axis) for axis in history.curve()] == [0, 0]
    assert history.summaries().dtype == SUMMARY


# ---- timelines of steps


def test_the_last_steps_are_kept_whole(made_up):
    """Each attempt at a step with all its spans and bucket events, and no other."""
    engine, timelines = made_up(), Timelines(Budget(PLENTY))
    for step in range(NUM_LAST + 5):
        engine.step(step)
        timelines.add(engine.records())
    engine.step(step, attempt=1, generation=2)
    timelines.add(engine.records())
    keys = [one.key for one in timelines.last]
    assert keys[-1] == Key(generation=2, step=step, attempt=1)
    assert [key.step for key in keys[:-1]] == list(range(6, NUM_LAST + 5))
    kinds = timelines.last[0].records["kind"].tolist()
    assert set(kinds) <= TIMELINE
    assert kinds.count(Kind.BUCKET_DONE) == 2


def test_a_step_may_come_in_parts(made_up):
    """Cut anywhere, and with records of its neighbour between its own."""
    engine, timelines = made_up(), Timelines(Budget(PLENTY))
    engine.step(0)
    engine.step(1)
    whole = engine.records()
    mixed = np.concatenate([whole[0::2], whole[1::2]])
    for part in np.array_split(mixed, 7):
        timelines.add(part)
    assert [one.key.step for one in timelines.last] == [0, 1]
    assert (
        sum(len(one.records) for one in timelines.last)
        == np.isin(whole["kind"], sorted(TIMELINE)).sum()
    )


def test_the_worst_steps_are_kept_longer(made_up):
    """Those with most communication after the last bucket was ready, the worst first."""
    engine, timelines = made_up(), Timelines(Budget(PLENTY))
    for step in range(200):
        engine.step(step, tail_ms=1 + (step * 37 % 101))
        timelines.add(engine.records())
    tails = [one.tail_ns() for one in timelines.worst]
    expected = sorted((1 + (s * 37 % 101) for s in range(200 - NUM_LAST)), reverse=True)
    assert tails == [ms * 1_000_000 for ms in expected[:NUM_WORST]]


def test_steps_without_communication_are_not_worst(made_up):
    """One rank alone has no buckets."""
    engine, timelines = made_up(), Timelines(Budget(PLENTY))
    for step in range(2 * NUM_LAST):
        engine.step(step, num_buckets=0)
        timelines.add(engine.records())
    assert timelines.worst == []
    assert len(timelines.last) == NUM_LAST


def test_a_step_has_so_many_records_at_most():
    """The others are counted."""
    timelines = Timelines(Budget(PLENTY))
    for _ in range(2):
        timelines.add(records(MAX_RECORDS - 10, kind=Kind.FORWARD))
    assert len(timelines.last[0].records) == MAX_RECORDS
    assert timelines.num_left_out == MAX_RECORDS - 20


def test_bytes_of_steps_that_go_are_free_again(made_up):
    """The budget holds exactly what is kept."""
    budget = Budget(40_000)
    engine, timelines = made_up(), Timelines(budget)
    for step in range(300):
        engine.step(step, num_buckets=3, tail_ms=step)
        timelines.add(engine.records())
        kept = timelines.last + timelines.worst
        assert budget.num_bytes == sum(one.num_bytes for one in kept) <= 40_000
    assert timelines.last[-1].key.step == 299
    assert timelines.num_left_out == 0


# ---- series


def test_series_of_each_slot_and_kind(made_up):
    """Durations of spans in seconds, values of scalars, by name; slots do not mix."""
    series = Series(max_mb=10)
    for slot in (0, 2):
        engine = made_up(slot)
        for step in range(5):
            engine.step(step, loss=2.0 - step + slot)
        series.add(slot, engine.records())
    assert series.slots == [0, 2]
    x, y = series.curves(2)["loss"]
    assert y.tolist() == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert (np.diff(x) > 0).all()
    _, forward = series.curves(0)["forward_s"]
    np.testing.assert_allclose(forward, 0.003)
    assert series.history(0, Kind.LOSS).points()["step"].tolist() == [0, 1, 2, 3, 4]
    assert [one.key.step for one in series.last_steps(2)] == [0, 1, 2, 3, 4]
    assert series.worst_steps(2) == []
    assert series.history(1, Kind.LOSS) is None
    assert series.last_steps(1) == series.worst_steps(1) == []
    assert series.curves(1) == {}


def test_memory_is_flat_under_a_flood():
    """Whatever comes, for as long as it comes: the cap holds, and what has no room is counted."""
    max_bytes = 500_000
    series = Series(max_bytes / 1e6)
    kinds = sorted(Kind)
    flood = records(MAX_BATCH_RECORDS, kind=np.resize(kinds, MAX_BATCH_RECORDS))
    sizes = []
    for number in range(60):
        flood["step"] += 1
        flood["t0_ns"] = flood["t1_ns"] = number * 1_000_000_000
        series.add(number % 6, flood)
        sizes.append(series.num_bytes)
    assert max(sizes) <= max_bytes
    assert sizes[-1] > max_bytes * 0.8
    assert sizes[30:] == sorted(sizes[30:])
    assert sizes[-1] - sizes[30] < max_bytes * 0.05
    assert series.num_refused + series.num_left_out > 0
    newest = series.history(5, Kind.LOSS)
    assert newest is None or newest.points()["at"][-1] == pytest.approx(59.0)


def test_bytes_are_those_that_are_really_taken():
    """The count is not a guess: it equals the sizes of the arrays that are kept."""
    series = Series(max_mb=1)
    for step in range(300):
        series.add(0, records(20, kind=Kind.FORWARD, step=step, t1_ns=step))
    assert series.kinds(0) == [Kind.FORWARD]
    histories = series._histories.values()
    windows = [w for h in histories for w in (h._points, h._by_ten, h._by_hundred)]
    steps = series.last_steps(0) + series.worst_steps(0)
    taken = sum(w._kept.nbytes for w in windows) + sum(s.records.nbytes for s in steps)
    taken += MAX_WAITING * RECORD.itemsize
    assert series.num_bytes == taken


def test_another_run_in_the_same_group_has_steps_of_its_own(made_up):
    """They have the numbers of those before, which are over."""
    engine, series = made_up(0), Series(max_mb=4)
    for _ in range(2):
        for step in range(2):
            engine.step(step)
        series.add(0, engine.records())
    steps = series.last_steps(0)
    assert [timeline.key.step for timeline in steps] == [0, 1, 0, 1]
    assert len({len(timeline.records) for timeline in steps}) == 1
    for first, second in pairwise(steps):
        assert first.records["t1_ns"].max() <= second.records["t0_ns"].min()
