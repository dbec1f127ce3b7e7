"""Telemetry on real engines: what they write is sent, and the supervisor reads all of it."""

from __future__ import annotations

from nbdist.rundir import runtime_root

SENT_S = 2.0
"""Four times what it takes, with room for a machine that is busy."""
EMIT = """
from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
emit.begin_step(0, 1)
for number in range(3_000):
    emit.scalar(Kind.LOSS, number)
"""


def test_what_engines_write_is_sent(cluster, until):
    """Three thousand records of a cell are out in three batches, and none was dropped."""
    engines = cluster(2)
    engines.run(EMIT)
    until(lambda: _is_sent(engines), SENT_S, "the rings are not empty")
    assert engines.run("emit.RING._num_dropped").values == {0: 0, 1: 0}
    (log,) = runtime_root().glob("*/logs/supervisor.log")
    assert "telemetry of slot" not in log.read_text()


def _is_sent(engines):
    return engines.run("emit.RING._next > 3_000").values == {0: True, 1: True}
