"""Sums over two engines through shared memory, between those over gloo; kills and stops likewise.

`sum_both_ways` runs in the engines, called by a cell; the rest in the benchmark's own process.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from nbdist.bench import recovery
from nbdist.session.start import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.bench.figures import Samples

SIZES = ((1, 32), (25, 4))
"""In MiB, and how many sums are timed together, one after the other."""
_KILLED = (0, 1, 0, 1)
_GLOO, _SHARED = "DataParallel(shared_memory=False)", "DataParallel()"
_NUM_BLOCKS = 6
_CODE = "from nbdist.bench.sums import sum_both_ways; sum_both_ways({size}, {count})"


def reference_name(size_mb: int) -> str:
    """Of the samples of gloo's sums of so many MiB."""
    return f"gloo sum {size_mb}"


def value_name(size_mb: int) -> str:
    """Of ours."""
    return f"local sum {size_mb}"


def measure(samples: Samples) -> None:
    """All sizes, then losses; a sum has ended when it has on both ranks."""
    with start(2, threads_per_engine=1) as cluster:
        for size_mb, count in SIZES:
            code = _CODE.format(size=size_mb, count=count)
            times = cluster.run(code, once=True).values
            for number, at_ranks in enumerate(zip(*times.values(), strict=True)):
                before, ours, after = map(max, zip(*at_ranks, strict=True))
                samples.add_reference(reference_name(size_mb), before, after, number=number)
                samples.add(value_name(size_mb), ours)
    _disturb(samples)


def _disturb(samples: Samples) -> None:
    """Seconds for which a run of two ranks stands still, each loss between two of runs on gloo."""
    found = []
    for strategy in (_GLOO, _SHARED, _GLOO):
        moment = random.Random(len(_KILLED))  # noqa: S311 - moments of kills, the same each time
        _, incidents = recovery.disturb(2, _KILLED, moment, strategy)
        found.append(incidents)
    for kind in ("lost", "hung"):
        stalls_s = [[i.stall_s or 0.0 for i in its if i.kind == kind] for its in found]
        for number, (before, ours, after) in enumerate(zip(*stalls_s, strict=True)):
            samples.add_reference(f"gloo {kind}", before, after, number=number)
            samples.add(f"shared {kind}", ours)


def sum_both_ways(size_mb: int, count: int) -> list[tuple[float, float, float]]:
    """Seconds that a sum takes here: gloo, shared memory, gloo; the first block is not measured."""
    import torch  # noqa: PLC0415 - the benchmark's own process imports this module too
    import torch.distributed as dist  # noqa: PLC0415

    from nbdist.engine.local_sum import LOCAL_SUM  # noqa: PLC0415

    if not LOCAL_SUM.agree():
        raise RuntimeError("the engines share no memory; their logs say why")
    tensor = torch.zeros(size_mb * 2**18)

    def timed(function: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            function()
        return (time.perf_counter() - began) / count

    def on_gloo() -> float:
        return timed(lambda: dist.all_reduce(tensor))

    def here() -> float:
        return timed(lambda: LOCAL_SUM.sum_(tensor))

    return [(on_gloo(), here(), on_gloo()) for _ in range(_NUM_BLOCKS + 1)][1:]
