"""Frames: packing, reading, thinning."""

from __future__ import annotations

import numpy as np
import pytest
from made_frames import HEADER
from msgspec.structs import replace

from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.protocol.events import Incident
from nbdist.protocol.ids import Generation, Slot
from nbdist.protocol.thinning import NUM_LAST, extremes, thin


def phases(num: int) -> tb.Table:
    """A table of so many rows."""
    return {column: np.arange(num) * 1.5 for column in tb.TABLES["phases"]}


def test_a_frame_is_read_as_it_was_packed() -> None:
    """Header and columns come back, each column at a multiple of 8 bytes."""
    lost = Incident(
        kind="lost", slots=(Slot(1),), ranks=(1,), cause="SIGKILL", generation_before=Generation(1)
    )
    told = (fr.Numbered(number=3, incident=lost),)
    given = replace(HEADER, incidents=told)
    data = fr.pack(given, {"phases": phases(3)})
    header, tables = fr.unpack(data)
    assert header.incidents == told
    assert header.clock_s == 5.5
    assert [column.name for column in header.columns] == [
        f"phases.{c}" for c in tb.TABLES["phases"]
    ]
    start = len(data) - sum(-(-int(c.type[1]) * c.num // 8) * 8 for c in header.columns)
    assert start % 8 == 0
    assert all(column.offset % 8 == 0 for column in header.columns)
    for column, values in phases(3).items():
        assert np.array_equal(tables["phases"][column], values)


def test_a_table_without_rows_takes_no_room() -> None:
    """No column of an empty table is named."""
    header, tables = fr.unpack(fr.pack(HEADER, {"phases": phases(0)}))
    assert header.columns == ()
    assert tables == {}


def test_a_column_is_a_list_in_json() -> None:
    """The page finds name, type, offset and number in this order."""
    data = fr.pack(HEADER, {"phases": phases(2)})
    assert b'["phases.at","f8",0,2],["phases.phase","f4",16,2]' in data


@pytest.mark.parametrize("damage", [b"", b"\x00", b"\xff\xff\xff\x7f{}"])
def test_what_is_no_frame_is_refused(damage: bytes) -> None:
    """Other bytes raise FrameError, and nothing else."""
    with pytest.raises(fr.FrameError):
        fr.unpack(damage)


def test_a_cut_frame_is_refused() -> None:
    """A column that is not whole raises FrameError."""
    data = fr.pack(HEADER, {"phases": phases(2)})
    with pytest.raises(fr.FrameError):
        fr.unpack(data[:-8])


def test_another_schema_is_refused() -> None:
    """A frame of a later version is not misread."""
    later = replace(HEADER, schema=fr.SCHEMA + 1)
    with pytest.raises(fr.FrameError, match=f"schema {fr.SCHEMA + 1}"):
        fr.unpack(fr.pack(later, {}))


def test_thinning_keeps_the_extremes() -> None:
    """A single peak among many values is still there, the ends too."""
    values = np.zeros(10_000)
    values[4_321], values[7_000] = 5.0, np.nan
    places = extremes(values, 50)
    assert len(places) <= 102
    assert {0, 4_321, 9_999} <= set(places.tolist())
    assert np.array_equal(places, np.unique(places))


def test_the_last_rows_are_whole() -> None:
    """Of a table that is thinned out the end is exact: medians of the last steps come from it."""
    num = 5_000
    table = {column: np.zeros(num) for column in tb.TABLES["rows"]} | {"step": np.arange(num)}
    table["loss"], table["seconds"] = np.random.default_rng(1).random((2, num))
    steps = thin("rows", table, 400)["step"]
    assert len(steps) <= 410
    assert steps[0] == 0
    assert steps[-NUM_LAST:].tolist() == list(range(num - NUM_LAST, num))
    few = thin("rows", table, 20)["step"]
    assert len(few) <= 30
    assert few[-10:].tolist() == list(range(num - 10, num))


def test_few_values_are_not_thinned() -> None:
    """What has room is kept whole."""
    assert extremes(np.zeros(100), 50).tolist() == list(range(100))


def test_each_view_has_known_tables() -> None:
    """A view names tables that there are, and each table is in some view."""
    named = {table for tables in tb.TABLES_OF.values() for table in tables}
    assert named == set(tb.TABLES)
