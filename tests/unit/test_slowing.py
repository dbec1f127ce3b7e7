"""How slow ranks are made, and what may come of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nbdist.session.slowing import risk_of, slow_factor


@pytest.mark.parametrize(
    ("given", "factor"),
    [(1, 1.0), (2.5, 2.5), (1e9, 1e9), (np.int64(3), 3.0), (np.float32(1.5), 1.5)],
)
def test_a_factor_is_any_number_of_at_least_1(given, factor):
    """Python's or numpy's; what is sent is Python's own."""
    assert slow_factor(given) == factor
    assert type(slow_factor(given)) is float


@pytest.mark.parametrize(
    "given", [0, 0.5, -1, True, "3", b"3", None, [2], float("nan"), float("inf"), 10**400]
)
def test_what_is_no_factor_is_named(given):
    """Nothing is sent."""
    with pytest.raises(ValueError, match=r"factor=.*: a finite number, at least 1; 1 ends it"):
        slow_factor(given)


def seats(*factors):
    return [SimpleNamespace(slow_factor=factor) for factor in factors]


@pytest.mark.parametrize(
    ("factor", "now", "usual_s", "is_risky"),
    [
        (100.0, (1.0, 1.0), 0.2, True),
        (100.0, (1.0, 1.0), 0.05, False),
        (100.0, (1.0, 10.0), 0.5, False),
        (100.0, (1.0, 2.0), 0.5, True),
        (1e9, (1.0, 1.0), None, False),
        (1.0, (1.0, 900.0), 20.0, False),
        (100.0, (), 0.2, True),
    ],
)
def test_a_rest_that_will_be_taken_for_a_hang_is_warned_of(factor, now, usual_s, is_risky):
    """As far as the duration of a step is known, less what it is slowed already."""
    risk = risk_of(factor, seats(*now), usual_s, 10.0)
    assert len(risk) == is_risky
    assert all("100 times that is more than hang_timeout_s=10" in text for text in risk)
