"""The committed steps of a run, from the reports of its members."""

from __future__ import annotations

import numpy as np
import pytest

from nbdist.protocol.story import ROWS, is_known
from nbdist.supervisor import progress as module
from nbdist.supervisor.progress import Progress


def rows(*steps, generation=1, seconds=0.1):
    data = [(s, s / 10, 60, seconds, generation, 2, 0.1, float(s)) for s in steps]
    return np.array(data, ROWS).tobytes()


def steps_of(progress):
    return progress.rows["step"].tolist()


def test_the_first_report_of_a_step_counts():
    """Others of the same generation are duplicates; what is new is returned."""
    progress = Progress(3)
    assert len(progress.add(0, rows(3, 4))) == 2
    assert progress.add(1, rows(3, 4, 5))["step"].tolist() == [5]
    assert steps_of(progress) == [3, 4, 5]
    assert (progress.step, progress.num_replaced) == (6, 0)


def test_a_step_whose_holders_all_died_is_replaced():
    """The later row stands, what came after it is gone; a late report of the old one is not new."""
    progress = Progress(0)
    progress.add(0, rows(0, 1, 2))
    assert len(progress.add(1, rows(1, generation=2))) == 1
    assert steps_of(progress) == [0, 1]
    assert progress.rows["generation"].tolist() == [1, 2]
    assert progress.num_replaced == 2
    assert (progress.replaced_in(2), progress.replaced_in(1)) == (range(1, 3), range(0))
    assert len(progress.add(0, rows(1))) == 0
    assert progress.durable([0]) == 1


def test_a_step_that_nobody_reported_stands_as_unknown_until_it_is():
    """Later steps are not refused for it; the row comes in its place, and replaces nothing."""
    progress = Progress(0)
    progress.add(0, rows(0, 3))
    assert steps_of(progress) == [0, 1, 2, 3]
    assert is_known(progress.rows).tolist() == [True, False, False, True]
    assert np.isnan(progress.rows["loss"][1])
    assert progress.usual_s() == pytest.approx(0.1)
    assert len(progress.add(1, rows(1))) == 1
    assert steps_of(progress) == [0, 1, 2, 3]
    assert is_known(progress.rows).tolist() == [True, True, False, True]
    assert progress.num_replaced == 0


def test_a_row_from_far_away_is_no_step_of_the_run():
    """A row that was torn in a file does not fill the memory."""
    progress = Progress(0)
    assert len(progress.add(0, rows(10**15))) == 0
    assert progress.step == 0


def test_durable_is_what_every_member_has():
    """A newcomer that copied the state has it too; one that never spoke has nothing."""
    progress = Progress(2)
    progress.add(0, rows(2, 3, 4))
    progress.add(1, rows(2, 3))
    assert progress.durable([0, 1]) == 4
    assert progress.durable([0, 1, 2]) == 2
    progress.acknowledge(2, 5)
    assert progress.durable([0, 1, 2]) == 4
    assert progress.durable([]) == 0


def test_old_rows_are_dropped_and_counted(monkeypatch):
    """Memory is bounded; steps and what is dropped are still right."""
    monkeypatch.setattr(module, "MAX_ROWS", 100)
    progress = Progress(0)
    progress.add(0, rows(*range(250)))
    assert len(progress.rows) <= 100
    assert progress.step == 250
    assert progress.num_dropped == progress.first == 250 - len(progress.rows)
    assert steps_of(progress) == list(range(progress.first, 250))
    assert len(progress.add(1, rows(5))) == 0


def test_the_usual_duration_is_a_median_of_the_last():
    """A stall does not change it; before the first step it is 0."""
    progress = Progress(0)
    assert progress.usual_s() == 0.0
    progress.add(0, rows(0, seconds=9.0) + rows(*range(1, 100)))
    assert progress.usual_s() == pytest.approx(0.1)


def test_what_is_no_row_is_refused():
    """Half a row says nothing."""
    with pytest.raises(ValueError, match="buffer"):
        Progress(0).add(0, b"abc")
