"""What a telemetry event costs in the hot path, while another thread empties the ring."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from nbdist.engine.emit import RING, begin_step, instant, scalar, span
from nbdist.protocol.telemetry import MAX_BATCH_RECORDS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.bench.figures import Samples

_EMPTY_PERIOD_S = 0.1
"""As an engine's agent does."""
_NUM_EVENTS = 2_000
_NUM_REPEATS = 50
"""The fastest of so many, each shorter than a turn that another process may get: whatever else runs
here makes an event slower, never faster."""


def measure(samples: Samples) -> None:
    """Each of the three ways to write one, in seconds an event."""
    events: tuple[Callable[[], None], ...] = (
        lambda: span(Kind.BUCKET_DONE, 1_000, 2_000, ident=3, value=25e6),
        lambda: scalar(Kind.LOSS, 2.5),
        lambda: instant(Kind.BUCKET_READY, 3),
    )
    begin_step(7, 3)
    is_over = threading.Event()
    agent = threading.Thread(target=_empty, args=(is_over,), name="nbdist-bench-agent")
    agent.start()
    try:
        for event in events:
            samples.add("event", min(_time(event) for _ in range(_NUM_REPEATS)))
    finally:
        is_over.set()
        agent.join()


def _time(event: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(_NUM_EVENTS):
        event()
    return (time.perf_counter() - began) / _NUM_EVENTS


def _empty(is_over: threading.Event) -> None:
    while not is_over.wait(_EMPTY_PERIOD_S):
        RING.drain(MAX_BATCH_RECORDS)
