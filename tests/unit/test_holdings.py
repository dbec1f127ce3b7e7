"""What engines hold in memory, as figures and sentences show it."""

from __future__ import annotations

import numpy as np
import pytest
from stories import synthetic_story

from nbdist.engine.probe import limit_bytes
from nbdist.protocol.telemetry import Kind
from nbdist.views.holdings import holdings, sentence
from nbdist.views.lanes import lanes

GIB = 2**30


def table(*rows):
    """(at, slot, kind, GiB)."""
    columns = zip(("at", "slot", "kind", "bytes"), zip(*rows, strict=True), strict=True)
    found = {name: np.array(values, dtype=np.float64) for name, values in columns}
    return {"memory": found | {"bytes": found["bytes"] * GIB}}


ONE = (
    (1, 0, Kind.MEMORY_RSS, 1.0),
    (1, 0, Kind.MEMORY_LIMIT, 8.0),
    (1, 0, Kind.MEMORY_PEAK, 1.5),
    (2, 0, Kind.MEMORY_RSS, 2.0),
    (1, 1, Kind.MEMORY_RSS, 1.5),
    (1, 1, Kind.MEMORY_LIMIT, 8.0),
)


def test_a_slots_last_values_count():
    """And how much it has grown since the first; rows may come in any order."""
    first, second = holdings(table(*reversed(ONE)))
    assert (first.now, first.peak, first.limit) == (2 * GIB, 1.5 * GIB, 8 * GIB)
    assert (first.growth, first.share) == (GIB, 0.25)
    assert (second.slot, second.growth) == (1, 0.0)
    assert np.isnan(second.peak)
    said = sentence([first, second])
    assert "Slot 0 holds most, 2.00 GiB of 8.00 GiB that it can have" in said
    assert "all together 3.50 GiB" in said
    assert "slot 0 has grown most, by 1.00 GiB" in said
    assert "close to the end" not in said


def test_a_gpu_that_is_nearly_full_is_told():
    """It is what grows, and nearer to its end than the host."""
    gpu = (
        (1, 0, Kind.MEMORY_DEVICE, 20.0),
        (2, 0, Kind.MEMORY_DEVICE, 38.0),
        (1, 0, Kind.MEMORY_DEVICE_LIMIT, 40.0),
    )
    (holding,) = holdings(table(*ONE[:4], *gpu))
    assert (holding.share, holding.growth) == (0.95, 18 * GIB)
    assert "close to the end" in sentence([holding])


def test_bars_are_what_is_resident_before_the_most_that_was():
    """In each slot's colour, as long as their bytes."""
    drawn = lanes(synthetic_story(), "memory")
    assert drawn.names == ("slot 0", "slot 1", "slot 2", "slot 3")
    most, now = (bar for bar in drawn.bars if bar.lane == 3)
    assert (most.what, most.ended) == ("most that was resident", pytest.approx(443))
    assert (now.what, now.ended) == ("resident", pytest.approx(431))
    assert "has grown most, by 30.0 MiB" in drawn.sentence


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("1048576\n", 1048576)])
def test_a_control_group_may_allow_less_than_the_host_has(tmp_path, text, limit):
    """By its file; where there is none, or no limit, all of the host's memory."""
    whole = limit_bytes(tmp_path)
    assert whole > GIB // 8
    (tmp_path / "memory.max").write_text(text)
    assert limit_bytes(tmp_path) == (limit or whole)
