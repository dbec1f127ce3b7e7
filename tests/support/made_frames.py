"""Headers of frames that are made up."""

from __future__ import annotations

from nbdist.protocol.frames import Counters, Header, World

NOTHING = Counters(
    records=0,
    missing=0,
    dropped=0,
    late=0,
    malformed=0,
    no_room=0,
    rows_dropped=0,
    incidents_left_out=0,
    delayed=0,
)
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
    counters=NOTHING,
)
