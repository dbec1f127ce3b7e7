"""What pipelines are to do: as records, as a walk in forwards, as the supervisor's table."""

from __future__ import annotations

import numpy as np
import pytest
from piped import orders

from nbdist.protocol.plans import TAKES, Action, packed, unpacked, walk
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.supervisor.history import Budget
from nbdist.supervisor.planned import MAX_ACTIONS, PlanReader
from nbdist.supervisor.plans import NUM_KEPT, Plans
from nbdist.supervisor.series import Series

MB = 1_000_000


@pytest.mark.parametrize("kind", "FBIW")
def test_an_action_is_what_it_was_packed_from(kind):
    """Also with as many stages and micro-batches as anybody has."""
    for stage, num_stages, microbatch in ((0, 1, 0), (3, 4, 7), (511, 512, 65_535)):
        action = Action(stage, kind, microbatch)
        assert unpacked(packed(action, num_stages)) == (action, num_stages)


@pytest.mark.parametrize("value", [0.0, 3.0, 10_002_000_0003.0, 7.5e9])
def test_another_number_is_no_action(value):
    """A kind that is none, or a stage that there is not."""
    with pytest.raises(ValueError, match="no action of a pipeline"):
        unpacked(value)


@pytest.mark.parametrize(("ranks", "num"), [(2, 4), (4, 8), (3, 3)])
def test_a_walk_ends_when_the_formula_says(ranks, num):
    """1F1B: so many forwards and backwards, and as often as there are other ranks nothing."""
    walked = walk(orders(ranks, num), ranks)
    assert walked.makespan == 3 * (num + ranks - 1)
    assert set(walked.next_at.values()) == {2 * num}


def test_a_walk_stands_where_something_never_comes():
    """The last stage is missing."""
    actions = orders(3, 3)
    del actions[2]
    assert walk(actions, 3).next_at[1] < 6


# ---- what is kept


def tell(engine, listed, num_stages, *, generation=1, step=0):
    """As an engine does with its first batch."""
    engine.ring.begin_step(step, generation)
    for place, action in enumerate(listed):
        engine.put(Kind.PLANNED, ident=place, value=packed(action, num_stages))


@pytest.fixture
def told(made_up):
    """Series in which so many ranks have told their orders."""

    def make(ranks=3, *, without=(), **where):
        series, actions = Series(max_mb=4), orders(ranks, ranks)
        for rank in set(range(ranks)) - set(without):
            engine = made_up(rank)
            tell(engine, actions[rank], ranks, **where)
            series.add(rank, engine.records())
        return series

    return make


def test_a_plan_is_told_once_and_whole(told):
    """Each action of each slot with its earliest time; the second time there is nothing new."""
    reader, series = PlanReader(0.0), told()
    table = reader.read(series)
    assert len(table["slot"]) == 3 * 6
    assert (table["ended"] - table["began"]).tolist() == [
        TAKES[letter] for letter in ["F" if kind == 3 else "B" for kind in table["kind"]]
    ]
    assert table["began"].min() == 0
    assert table["ended"].max() == 3 * (3 + 2)
    assert len(reader.read(series)["slot"]) == 0


@pytest.mark.parametrize("rank", range(3))
def test_a_plan_of_which_a_rank_is_missing_is_none(told, rank):
    """The others may have told theirs already."""
    assert len(PlanReader(0.0).read(told(without=[rank]))["slot"]) == 0


def test_a_plan_of_which_a_record_is_missing_is_none(made_up):
    """It would look as if a rank had less to do."""
    actions = orders(2, 2)
    for lost in range(4):
        series = Series(max_mb=4)
        for rank in range(2):
            engine = made_up(rank)
            tell(engine, actions[rank], 2)
            records = engine.records()
            series.add(rank, np.delete(records, lost) if rank == 0 else records)
        assert len(PlanReader(0.0).read(series)["slot"]) == 0


def test_what_contradicts_itself_is_no_plan(made_up):
    """Stages that there are not, micro-batches that go forward only, a deadlock, no action."""
    forward, backward = Action(0, "F", 0), Action(0, "B", 0)
    for listed, values in (
        ([Action(1, "F", 0), Action(1, "B", 0)], None),
        ([forward], None),
        ([Action(0, "F", 1), Action(0, "I", 1)], None),
        ([forward, backward], [1.0, 2.0]),
    ):
        engine, series = made_up(0), Series(max_mb=4)
        tell(engine, listed, 2 if listed[0].stage else 1)
        records = engine.records().copy()
        if values is not None:
            records["value"] = values
        series.add(0, records)
        assert len(PlanReader(0.0).read(series)["slot"]) == 0


def test_a_plan_that_comes_to_no_end_is_none(made_up):
    """Each waits for the other."""
    series = Series(max_mb=4)
    first = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    second = [Action(1, "F", 1), Action(1, "B", 1), Action(1, "F", 0), Action(1, "B", 0)]
    for rank, listed in enumerate((first, second)):
        engine = made_up(rank)
        tell(engine, listed, 2)
        series.add(rank, engine.records())
    assert len(PlanReader(0.0).read(series)["slot"]) == 0


def test_of_a_generation_the_newest_order_counts(made_up):
    """Another run in the same group has another; the run before is none of the reader's."""
    series, engines = Series(max_mb=4), [made_up(rank) for rank in range(2)]
    for num, now_ns in ((2, 10 * 10**9), (3, 20 * 10**9)):
        for rank, engine in enumerate(engines):
            engine.now_ns = now_ns
            tell(engine, orders(2, num)[rank], 2)
            series.add(rank, engine.records())
    for since in (0.0, 15.0):
        assert PlanReader(since).read(series)["ident"].max() == 2
    assert len(PlanReader(25.0).read(series)["slot"]) == 0


def test_an_order_may_come_in_pieces(made_up):
    """A batch ends wherever it is full."""
    series, actions = Series(max_mb=4), orders(2, 4)
    for rank in range(2):
        engine = made_up(rank)
        tell(engine, actions[rank], 2)
        records = engine.records()
        for piece in (records[:3], records[3:]):
            series.add(rank, piece)
            assert series.plans(rank)
    assert len(PlanReader(0.0).read(series)["slot"]) == 16


def test_a_plan_that_is_too_large_is_not_told(told):
    """A frame has no room for it."""
    ranks = 40
    assert 2 * ranks * ranks > MAX_ACTIONS
    assert len(PlanReader(0.0).read(told(ranks))["slot"]) == 0


def test_of_several_plans_the_newest_have_room(made_up):
    """A snapshot may be asked for after many groups."""
    series, ranks = Series(max_mb=16), 20
    actions = orders(ranks, ranks)
    for rank in range(ranks):
        engine = made_up(rank)
        for generation in (1, 2, 3):
            tell(engine, actions[rank], ranks, generation=generation)
        series.add(rank, engine.records())
    table = PlanReader(0.0).read(series)
    assert len(table["slot"]) == 2 * 800
    assert table["generation"].tolist() == [2] * 800 + [3] * 800


def test_old_orders_are_forgotten_and_their_room_is_free(made_up):
    """However many groups there are."""
    budget = Budget(MB)
    plans, engine = Plans(budget), made_up(0)
    for generation in range(3 * NUM_KEPT):
        tell(engine, orders(2, 4)[0], 2, generation=generation)
        plans.add(engine.records())
    assert [int(records["generation"][0]) for records in plans.told] == list(
        range(2 * NUM_KEPT, 3 * NUM_KEPT)
    )
    assert budget.num_bytes == NUM_KEPT * 8 * RECORD.itemsize


def test_orders_without_room_are_counted(made_up):
    """And nothing is kept of them."""
    plans, engine = Plans(Budget(100)), made_up(0)
    tell(engine, orders(2, 4)[0], 2)
    plans.add(engine.records())
    assert (plans.told, plans.num_left_out) == ([], 8)
