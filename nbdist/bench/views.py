"""Training steps on four engines while all live views are fed, between as many without."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from nbdist.bench.steps import TRAINER, train
from nbdist.protocol.tables import View
from nbdist.session.start import start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.bench.figures import Samples
    from nbdist.protocol.feed import Frame
    from nbdist.session.cluster import Cluster
    from nbdist.session.feed import Feed

_NUM_RANKS = 4
_NUM_STEPS = 1_000
"""Measured together: some seconds, so that many frames come."""
_WIDTH = 1_000
"""Of the widest chart, in pixels."""


def measure(num_blocks: int, samples: Samples) -> None:
    """Seconds a step, each block with views on between two without."""
    with start(_NUM_RANKS, threads_per_engine=1) as cluster:
        cluster.run(TRAINER)
        train(cluster, _NUM_STEPS)  # once unmeasured
        before = train(cluster, _NUM_STEPS)
        for number in range(num_blocks):
            with _all_views(cluster):
                samples.add("seen step", train(cluster, _NUM_STEPS))
            after = train(cluster, _NUM_STEPS)
            samples.add_reference("unseen step", before, after, number=number)
            before = after


@contextmanager
def _all_views(cluster: Cluster) -> Iterator[None]:
    """A client of every view that takes frames as quickly as a page can, and acknowledges them."""

    def take(feed: Feed, frame: Frame) -> None:
        feed.acknowledge(frame.seq)

    feed = cluster.feeds.open(take, views=get_args(View), width=_WIDTH)
    try:
        yield
    finally:
        cluster.feeds.close(feed)
