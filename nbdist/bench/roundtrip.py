"""An empty cell on four engines, and ipyparallel's own blocking `execute` on four of its own."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

_CODE = "pass"
_NUM_WARM_UP = 5
_START_LIMIT_S = 60.0


def measure(cluster: Cluster, num_pairs: int, samples: Samples) -> None:
    """Each cell between two executes."""
    with peer(cluster.world_size) as view:

        def execute() -> None:
            view.execute(_CODE, block=True)

        def run_cell() -> None:
            cluster.run(_CODE)

        for _ in range(_NUM_WARM_UP):
            execute()
            run_cell()
        compare(samples, num_pairs, execute=execute, cell=run_cell)


def compare(samples: Samples, num_pairs: int, **calls: Callable[[], None]) -> None:
    """Time a call between two of the one that it is compared with.

    Args:
        samples: gets the seconds.
        num_pairs: so many times.
        calls: by the names of their samples: first the reference, then ours.
    """
    (reference, theirs), (value, ours) = calls.items()
    for number in range(num_pairs):
        before, between, after = _timed(theirs), _timed(ours), _timed(theirs)
        samples.add_reference(reference, before, after, number=number)
        samples.add(value, between)


def _timed(function: Callable[[], None]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


@contextmanager
def peer(num_engines: int) -> Iterator[Any]:
    """A view of all engines of an ipyparallel cluster as it comes, with a profile of its own."""
    import ipyparallel  # noqa: PLC0415 - only this benchmark needs it here

    with tempfile.TemporaryDirectory(prefix="nbdist-bench-", ignore_cleanup_errors=True) as folder:
        peer = ipyparallel.Cluster(
            n=num_engines,
            profile_dir=folder,
            engine_timeout=_START_LIMIT_S,
            log_level=logging.ERROR,
        )
        try:
            peer.start_cluster_sync()
            client = peer.connect_client_sync()
            try:
                client.wait_for_engines(num_engines, timeout=_START_LIMIT_S, interactive=False)
                yield client[:]
            finally:
                client.close()
        finally:
            peer.stop_cluster_sync()
