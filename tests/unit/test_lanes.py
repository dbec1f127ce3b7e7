"""A step's gradient sync as bars: which step is shown, and where each bar stands."""

from __future__ import annotations

import numpy as np

from nbdist.views.lanes import bucket_rows, newest_sync, row_edges, stacked

NAN = float("nan")


def table(*rows, **columns):
    """A table of (step, slot) and more columns; the first generation, the first attempt."""
    steps, slots = (np.array(column, float) for column in zip(*rows, strict=True))
    once = np.ones(len(rows))
    return {"step": steps, "slot": slots, "generation": once, "attempt": once * 0} | {
        name: np.array(values, float) for name, values in columns.items()
    }


def test_the_newest_step_is_one_that_all_its_slots_have_summed():
    """Of a run that was stopped the last step may not be told whole."""
    spans = table((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    buckets = table((1, 0), (1, 1), (2, 0), (3, 0), (3, 1), done_at=[5, 5, 6, 7, NAN])
    step, its_buckets, its_spans = newest_sync(buckets, spans)
    assert step == 1
    assert its_buckets["slot"].tolist() == its_spans["slot"].tolist() == [0, 1]


def test_where_no_step_is_whole_the_newest_is_taken():
    """Something is better than nothing; spans may be missing altogether."""
    buckets = table((1, 0), (2, 0), done_at=[NAN, NAN])
    step, its_buckets, its_spans = newest_sync(buckets, {})
    assert (step, len(its_buckets["step"]), its_spans) == (2, 1, {})


def test_none_is_drawn_over_another():
    """What overlaps stands in rows of its own; a row is used again when it is free."""
    assert stacked([(0, 4), (1, 2), (1.5, 5), (2, 3), (4, 6)]) == [0, 1, 2, 1, 0]
    assert stacked([(3, 4), (0, 9)]) == [1, 0]
    assert stacked([]) == []


def test_buckets_that_wait_for_slower_slots_stand_below_one_another():
    """All lanes have as many rows, also one whose own buckets do not overlap."""
    buckets = table((1, 0), (1, 0), (1, 1), (1, 1), launch_at=[0, 1, 4, 6], done_at=[5, 7, 5, NAN])
    rows, num = bucket_rows(buckets)
    assert (rows.tolist(), num) == ([0, 1, 0, 0], 2)
    assert row_edges((0.5, 0.9), 1, num) == (0.7, 0.9)
