"""A large push to four engines, and ipyparallel's own to four of its own.

Ours is of a tensor; ipyparallel gets the same numbers as a numpy array, with which it is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.bench.roundtrip import compare, peer

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

NUM_BYTES = 256 * 2**20
_NUM_PAIRS = 2


def measure(cluster: Cluster, samples: Samples) -> None:
    """Each push between two of ipyparallel's."""
    import torch  # noqa: PLC0415 - only this benchmark needs it here

    tensor = torch.arange(NUM_BYTES // 4, dtype=torch.float32)
    with peer(cluster.world_size) as view:

        def push_there() -> None:
            view.push({"pushed": tensor.numpy()}, block=True)

        def push() -> None:
            cluster.push(pushed=tensor)

        push_there()
        push()
        compare(samples, _NUM_PAIRS, **{"ipyparallel push": push_there, "push": push})
