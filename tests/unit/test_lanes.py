"""A step's gradient sync as bars: which step is shown."""

from __future__ import annotations

import numpy as np

from nbdist.views.lanes import newest_sync

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
