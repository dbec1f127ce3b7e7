"""Telemetry on real engines: from the ring to the record of a run, and back as a replay."""

from __future__ import annotations

import re

import pytest

from nbdist.protocol import runs as rn
from nbdist.protocol.telemetry import Kind
from nbdist.rundir import runtime_root
from nbdist.supervisor.replay import read

LIMIT_S = 60.0
"""Many times what it takes, for a machine that is busy."""
STEPS = 80
"""So many that memory is sampled in between, once a second."""
EMIT = """
from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
emit.begin_step(0, 1)
for number in range(3_000):
    emit.scalar(Kind.LOSS, number)
"""
TRAINER = """
import time
import numpy as np
from nbdist.engine import emit
from nbdist.protocol.telemetry import RECORD, Kind

def is_sent():
    return emit.RING._next > np.frombuffer(bytes(emit.RING._buffer), RECORD)["number"].max()

class Counts:
    '''Trains nothing: its steps only take time and emit.'''

    step = 0
    is_replicated = has_twin = True
    leaves_by = 0

    async def drive(self, port):
        while not port.is_over:
            if port.go_until is None or self.step >= port.go_until:
                port.hold(self.step)
                await port.wait_async()
                continue
            emit.begin_step(self.step, port.generation)
            t0_ns = time.perf_counter_ns()
            time.sleep(0.03)
            emit.span(Kind.STEP, t0_ns, time.perf_counter_ns())
            emit.scalar(Kind.LOSS, 1 / (self.step + 1))
            emit.scalar(Kind.TOKENS, 100)
            while self.step == LAST and not is_sent():  # the record is closed soon after that step
                time.sleep(0.01)
            world = port.generation, port.world_size
            port.committed((self.step, 0.5, 8, 0.03, *world, 0.1, time.monotonic()))
            self.step += 1

    pack = digest = parameter_digest = lambda self: b""
    unpack = lambda self, data: None
    owned = lambda self: []

trainer = Counts()
"""


def test_what_engines_write_is_sent(cluster, until):
    """Three thousand records of a cell are out in three batches, and none was dropped."""
    engines = cluster(2)
    engines.run(EMIT)

    def is_sent():
        return engines.run("emit.RING._next > 3_000").values == {0: True, 1: True}

    until(is_sent, LIMIT_S, "the rings are not empty")
    assert engines.run("emit.RING._num_dropped").values == {0: 0, 1: 0}


def test_a_run_is_recorded_and_replayed(cluster, until, tmp_path):
    """Every step, every rank's telemetry, the end: read again without engines, nothing missing."""
    engines = cluster(2, record=tmp_path / "runs")
    engines.run(f"LAST = {STEPS - 1}\n{TRAINER}")
    begun = engines._link.ask(rn.BeginRun(name="trainer", steps=STEPS), timeout=LIMIT_S)
    path = tmp_path / "runs" / f"{engines.id}-{begun.run}.jsonl"
    until(lambda: path.exists() and path.stat().st_size, LIMIT_S, "there is no record")
    until(lambda: read(path).ended, LIMIT_S, lambda: path.read_text()[-2_000:])
    replay = read(path)
    assert replay.ended.how == "finished"
    assert replay.notes == []
    assert replay.rows["step"].tolist() == list(range(STEPS))
    for slot in (0, 1):
        losses = replay.series.history(slot, Kind.LOSS).points()
        assert losses["step"].tolist() == list(range(STEPS))
        assert losses["value"] == pytest.approx([1 / (step + 1) for step in range(STEPS)])
        assert (replay.series.history(slot, Kind.STEP).points()["value"] > 0.029).all()
        assert Kind.MEMORY_RSS in replay.series.kinds(slot)
    assert sum(replay.tokens.values()) == 2 * 100 * STEPS
    (log,) = runtime_root().glob("*/logs/supervisor.log")
    assert not re.search("telemetry of slot|does not fit", log.read_text())
