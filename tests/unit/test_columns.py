"""Arrays as columns: they come back as they were, and nothing else is taken."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbdist.protocol.columns import from_columns, to_columns

PAIRS = np.dtype([("step", "i4"), ("loss", "f8")])


def array(*pairs):
    return np.array(list(pairs), PAIRS)


@pytest.mark.parametrize(
    "given",
    [
        array(),
        array((1, 2.5)),
        array((1, 2.5), (1, 0.1)),
        array((1, float("nan")), (2, float("inf")), (3, float("-inf")), (4, 1e-300)),
        array((1, float("inf")), (2, float("inf"))),
    ],
)
def test_an_array_comes_back(given):
    """Through JSON too, numbers that it lacks included."""
    columns = json.loads(json.dumps(to_columns(given), allow_nan=False))
    back = from_columns(columns, PAIRS, len(given))
    np.testing.assert_array_equal(back["step"], given["step"])
    np.testing.assert_array_equal(back["loss"], given["loss"])


def test_equal_values_stand_once():
    """A file is shorter for it."""
    assert to_columns(array((7, 0.5), (7, 0.25)))["step"] == [7]


@pytest.mark.parametrize(
    ("columns", "num", "says"),
    [
        ({"step": [1]}, 1, "columns"),
        ({"step": [1], "loss": [1.0], "more": [1]}, 1, "columns"),
        ({"step": [1, 2], "loss": [1.0]}, 3, "column 'step' has 2 values, expected 3"),
        ({"step": [1 << 40], "loss": [1.0]}, 1, "step"),
        ({"step": ["x"], "loss": [1.0]}, 1, "x"),
        ({"step": [1], "loss": ["x"]}, 1, "x"),
        ({"step": [1], "loss": [1.0]}, -1, "-1 entries"),
        ({"step": [1], "loss": [1.0]}, 10**15, "entries"),
    ],
)
def test_columns_of_something_else_are_refused(columns, num, says):
    """With the reason; a made-up number of entries takes no memory."""
    with pytest.raises(ValueError, match=says):
        from_columns(columns, PAIRS, num)
