"""The collector: what engines send is kept, what is missing is counted, nonsense harms nothing."""

from __future__ import annotations

import logging

import msgspec
import pytest

from nbdist.protocol.telemetry import Kind
from nbdist.supervisor import collector as module
from nbdist.supervisor.collector import Collector, Received
from nbdist.supervisor.series import Series


@pytest.fixture
def collector():
    return Collector(Series(max_mb=5))


def changed(batch, **fields):
    return msgspec.structs.replace(batch, **fields)


def test_a_batch_is_kept_and_recorded(collector, made_up):
    """In the series, and by whoever records a run."""
    written = []

    class Recorder:
        def telemetry(self, event, records, *, num_late):
            written.append((event.slot, len(records), num_late))

    collector.recorder = Recorder()
    engine = made_up(slot=3)
    engine.step(0)
    batch = engine.batch()
    collector.take(batch, 1)
    num = len(batch.records) // 56
    assert collector.received(3, engine.pid) == Received(num_records=num)
    assert written == [(3, num, 0)]
    assert collector.series.history(3, Kind.LOSS).points()["value"].tolist() == [2.0]


def test_missing_numbers_are_counted(collector, made_up):
    """Within a batch, and where a whole batch is lost; what the engine knows of is told apart."""
    engine = made_up()
    for step in range(3):
        engine.step(step)
        batch = engine.batch()
        if step != 1:
            collector.take(batch, 1)
    num = len(batch.records) // 56
    assert collector.total == Received(num_records=2 * num, num_missing=num)
    for step in range(400):  # more than the ring holds
        engine.step(step)
    dropped = engine.batch()
    collector.take(dropped, 1)
    assert collector.total.num_dropped == dropped.num_dropped > 0
    assert collector.total.num_missing == num + dropped.num_dropped


def test_what_came_before_the_supervisor_is_not_missing(collector, made_up):
    """One that takes over begins where it is."""
    engine = made_up()
    for step in range(2):
        engine.step(step)
        batch = engine.batch()
    collector.take(batch, 1)
    assert collector.total.num_missing == 0


def test_a_newcomer_on_a_slot_counts_from_one_again(collector, made_up):
    """Another process, other numbers; what its predecessor sent may come later."""
    old, new = made_up(pid=1), made_up(pid=2)
    for engine in (old, new, old, new):
        engine.step(0)
        collector.take(engine.batch(), 1)
    assert collector.total.num_missing == collector.total.num_malformed == 0
    assert len(collector.series.history(0, Kind.LOSS).points()) == 4


def test_records_of_a_generation_that_is_over_are_marked(collector, made_up):
    """They are kept, with their generation, and counted as late."""
    engine = made_up()
    engine.step(0, generation=1)
    engine.step(0, generation=2, attempt=1)
    batch = engine.batch(generation=2)
    collector.take(batch, 2)
    assert collector.total.num_late * 2 == collector.total.num_records
    points = collector.series.history(0, Kind.LOSS).points()
    assert points["generation"].tolist() == [1, 2]
    assert points["attempt"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"records": b"nonsense"},
        {"records": b""},
        {"layout": 99},
        {"first": 77},
        {"records": bytes(56)},
    ],
)
def test_a_malformed_batch_is_logged_and_counted(collector, made_up, caplog, fields):
    """It harms nothing: the next one is taken, and the records of this one are missing."""
    engine = made_up(slot=1)
    collector.take(_stepped(engine), 1)
    bad = _stepped(engine)
    with caplog.at_level(logging.WARNING):
        collector.take(changed(bad, **fields), 1)
        collector.take(_stepped(engine), 1)
    assert f"slot 1 (pid {engine.pid})" in caplog.text
    total = collector.total
    assert (total.num_malformed, total.num_missing) == (1, len(bad.records) // 56)
    assert len(collector.series.history(1, Kind.LOSS).points()) == 2


def _stepped(engine):
    engine.step(0)
    return engine.batch()


def test_a_batch_that_comes_twice_counts_once(collector, made_up):
    """Numbers that went by are refused."""
    engine = made_up()
    batch = _stepped(engine)
    for _ in range(2):
        collector.take(batch, 1)
    assert collector.total.num_malformed == 1
    assert len(collector.series.history(0, Kind.LOSS).points()) == 1


def test_a_flood_of_nonsense_fills_no_log(collector, made_up, caplog):
    """After some it is counted only."""
    batch = changed(_stepped(made_up()), layout=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            collector.take(batch, 1)
    assert len(caplog.records) == module.MAX_LOGGED
    assert collector.total.num_malformed == 100


def test_engines_that_are_gone_are_summed_up(collector, made_up, monkeypatch):
    """The counts of all are kept, the memory for them is bounded."""
    monkeypatch.setattr(module, "MAX_SOURCES", 3)
    for pid in range(10):
        collector.take(_stepped(made_up(pid=pid)), 1)
    assert len(collector._sources) == 3
    one = collector.received(0, 9).num_records
    assert collector.total.num_records == 10 * one
    assert collector.received(0, 1) == Received()
