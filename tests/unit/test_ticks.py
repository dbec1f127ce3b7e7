"""Round numbers along an axis."""

from __future__ import annotations

import pytest

from nbdist.views.ticks import tick_text, ticks


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.662, 5.96, ["1", "2", "3", "4", "5"]),
        (1.808e3, 3.812e3, ["2,000", "2,500", "3,000", "3,500"]),
        (0, 171, ["0", "50", "100", "150"]),
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (-0.03, 0.06, ["-0.02", "0", "0.02", "0.04", "0.06"]),
        (1.2e-7, 9.95e-7, ["2e-07", "4e-07", "6e-07", "8e-07"]),
        (0, 2.1e6, ["0", "500,000", "1,000,000", "1,500,000", "2,000,000"]),
        (3, 3, ["3"]),
    ],
)
def test_ticks_are_round(low, high, texts):
    """Whatever the values are: ones, twos and fives times a power of ten."""
    assert [tick_text(tick) for tick in ticks(low, high)] == texts


def test_there_are_neither_few_nor_many():
    """At least two, at most seven, of any range; between whole steps there is none."""
    for number in range(1, 400):
        low, high = number * 0.37, number * 0.37 + 1.013**number
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert low <= found[0] < found[-1] <= high
    assert ticks(0, 3, least=1.0) == [0, 1, 2, 3]
    assert ticks(0, 1, least=1.0) == [0, 1]
    assert ticks(0, 0.3) == [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
