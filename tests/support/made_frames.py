"""Headers of frames that are made up."""

from __future__ import annotations

from nbdist.protocol.frames import NO_COUNTERS, Header, World

WORLD = World(
    phase="running", generation=2, world_size=0, size=0, healthy=True, reason="", seats=()
)
HEADER = Header(
    seq=1,
    kind="snapshot",
    clock_s=5.5,
    cluster="c",
    run=None,
    is_live=True,
    world=WORLD,
    incidents=(),
    evaluations=(),
    counters=NO_COUNTERS,
)
