"""Batches of records: what an engine sends is read, anything else is refused with a reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.protocol.telemetry import (
    LAYOUT,
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    RECORD,
    SERIES,
    SPANS,
    TIMELINE,
    BatchError,
    Kind,
    decode_records,
)


def records(num=3):
    out = np.zeros(num, RECORD)
    out["number"], out["kind"] = np.arange(1, num + 1), Kind.LOSS
    return out


def test_a_batch_is_read():
    """Bytes of the layout are the records, as they were."""
    assert (decode_records(LAYOUT, records().tobytes()) == records()).all()
    assert len(records(MAX_BATCH_RECORDS).tobytes()) <= MAX_BATCH_BYTES


@pytest.mark.parametrize(
    ("change", "layout", "says"),
    [
        ({}, LAYOUT + 1, f"layout {LAYOUT + 1}, expected {LAYOUT}"),
        ({"kind": 999}, LAYOUT, "kind that is not known"),
        ({"number": [1, 3, 2]}, LAYOUT, "do not rise"),
        ({"number": [1, 1, 2]}, LAYOUT, "do not rise"),
        ({"number": [0, 1, 2]}, LAYOUT, "do not rise"),
        ({"t0_ns": 5}, LAYOUT, "ends before it begins"),
    ],
)
def test_what_no_engine_sends_is_refused(change, layout, says):
    """With the reason."""
    batch = records()
    for name, value in change.items():
        batch[name] = value
    with pytest.raises(BatchError, match=says):
        decode_records(layout, batch.tobytes())


@pytest.mark.parametrize("data", [b"", b"x", bytes(57), bytes(RECORD.itemsize * 1_171)])
def test_a_batch_of_another_size_is_refused(data):
    """Nothing, parts of records, too many."""
    with pytest.raises(BatchError, match=f"{len(data)} bytes"):
        decode_records(LAYOUT, data)


@given(st.binary(max_size=6 * RECORD.itemsize))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_whatever_comes_is_a_batch_or_a_batch_error(data):
    """No bytes raise anything else."""
    for part in (data, data[: len(data) // RECORD.itemsize * RECORD.itemsize]):
        try:
            decode_records(LAYOUT, part)
        except BatchError:
            continue


def test_every_kind_is_drawn_somewhere():
    """As a series, within a step, as a mark, a plan or a look; names say their unit."""
    assert set(Kind) == set(SERIES) | TIMELINE | {Kind.STEP_BROKEN, Kind.PLANNED, Kind.DIGEST}
    assert len(set(SERIES.values())) == len(SERIES)
    assert all(SERIES[kind].endswith("_s") for kind in SPANS)
    assert all(kind <= np.iinfo(np.uint16).max for kind in Kind)
