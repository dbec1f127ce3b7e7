"""How far ranks are apart, from what they have told."""

import numpy as np
import pytest
from distant import AGES, DriftingRun, ServedRun
from stories import synthetic_story

from nbdist.protocol.telemetry import Kind
from nbdist.protocol.thinning import thin
from nbdist.views.distances import ages, counts, drifts, sentence
from nbdist.views.lanes import lanes


def table(kind, *values, slots=None):
    """One value after the other."""
    num = len(values)
    return {
        "distance": {
            "at": np.arange(num, dtype=float),
            "value": np.array(values, dtype=float),
            "slot": np.array(slots or [0] * num, dtype=float),
            "kind": np.full(num, kind, dtype=float),
        }
    }


def test_how_late_updates_came():
    """By how many others there were; half, and the latest of all, in words."""
    found = ages(table(Kind.STALENESS, *AGES))
    assert found == {0: 2, 1: 4, 2: 3, 3: 1, 7: 1}
    assert sentence(found, []) == (
        "Of 11 updates 18% came at once; half after at most 1 other that their worker had not "
        "seen, and none after more than 7."
    )


def test_old_ones_share_a_lane():
    """The last of those that there is room for; none is left out."""
    found = {0: 5, 2: 3, 30: 2}
    assert counts(found, 3) == [("0 between", 5), ("1 between", 0), ("2 and more between", 5)]
    assert counts({0: 5, 1: 1}, 3) == [("0 between", 5), ("1 between", 1)]


def test_how_far_replicas_drift():
    """The last time, and at most; who is farthest."""
    tables = table(Kind.DRIFT, 0.1, 0.3, 0.05, 0.02, slots=[0, 1, 0, 1])
    (one, other) = found = drifts(tables)
    assert (one.last, one.most, other.last, other.most) == (0.05, 0.1, 0.02, 0.3)
    assert sentence({}, found) == (
        "At the last outer step slot 0 was farthest from the mean of all, by 5.00% of the "
        "parameters' length; at most it was 30.00% for any."
    )


def test_of_many_updates_some_are_told_evenly():
    """How often each age comes is hardly another."""
    long = table(Kind.STALENESS, *(AGES * 500))["distance"]
    short = thin("distance", long, 400)
    assert len(short["at"]) == 400
    share = np.mean(short["value"] == 1)
    assert share == pytest.approx(4 / 11, abs=0.05)


@pytest.mark.parametrize(("run", "names"), [(ServedRun, 8), (DriftingRun, 4)])
def test_they_are_drawn(run, names):
    """A lane for each age, or for each slot."""
    drawn = lanes(synthetic_story(run(length_s=12.0)), "distance")
    assert len(drawn.names) == names
    assert max(bar.ended for bar in drawn.bars) > 1
