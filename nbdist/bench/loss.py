"""Cells that a rank spoils for the others: it is killed, or it raises, while they wait for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nbdist.errors import CellFailed, EngineDied, NbdistError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.bench.figures import Samples
    from nbdist.session.cluster import Cluster

_KEEP = "kept = torch.arange(4.0)"
_LOOK = """
total = kept.clone()
dist.all_reduce(total)
total.tolist()
"""
_WAIT_FOR_ONE = """
import time
if rank == {victim}:
    time.sleep(60)
dist.all_reduce(torch.ones(1))
"""
_RAISE = """
if rank == 1:
    raise ValueError("on purpose")
dist.barrier()
"""
_POLL_S = 0.02
_WAITING_LIMIT_S = 10.0
_CELL_LIMIT_S = 30.0
_HEALTHY_LIMIT_S = 30.0


def lose(cluster: Cluster, victims: Iterable[int], samples: Samples) -> None:
    """SIGKILL ranks one after the other, each while all others wait for it in an all_reduce."""
    cluster.run(_KEEP)
    for victim in victims:
        _lose_one(cluster, victim, samples)
        _check_world(cluster)


def _lose_one(cluster: Cluster, victim: int, samples: Samples) -> None:
    size, generation = cluster.world_size, cluster.generation
    with ThreadPoolExecutor(1, thread_name_prefix="nbdist-bench-kill") as other_thread:
        killing = other_thread.submit(_kill_when_others_wait, cluster, victim)
        died: EngineDied | None = None
        try:
            code = _WAIT_FOR_ONE.format(victim=victim)
            cluster.run(code, timeout=_CELL_LIMIT_S, once=True)
        except EngineDied as error:
            died = error
        except CellFailed:  # the kill did not come; why, the other thread says
            pass
        ended_at = time.monotonic()
        killed_at = killing.result()
    cluster.wait_healthy(timeout=_HEALTHY_LIMIT_S, after=generation)
    healthy_at = time.monotonic()
    if died is None or (died.rank, died.signal) != (victim, "SIGKILL"):
        raise NbdistError(f"rank {victim} was killed, but the cell ended with {died!r}")
    samples.add(f"loss {size} cell", ended_at - killed_at)
    samples.add(f"loss {size} healthy", healthy_at - killed_at)
    for incident in cluster.incidents:
        if incident.generation_before < generation:
            continue
        if incident.kind == "lost":
            samples.add(f"loss {size} detect", incident.detect_s)
            samples.add(f"loss {size} regroup", incident.regroup_s)
        elif incident.kind == "joined":
            samples.add(f"loss {size} admit", incident.regroup_s)
            samples.add(f"loss {size} restore", incident.restore_s)


def _kill_when_others_wait(cluster: Cluster, victim: int) -> float:
    """In a thread of its own; returns when the signal was ordered."""
    others = set(range(cluster.world_size)) - {victim}
    deadline = time.monotonic() + _WAITING_LIMIT_S
    while True:
        activities = {seat.rank: seat.activity for seat in cluster.status()}
        if all("waits in all_reduce" in activities.get(rank, "") for rank in others):
            break
        if time.monotonic() > deadline:
            text = f"the others do not wait for rank {victim} after {_WAITING_LIMIT_S:g} s"
            raise NbdistError(f"{text}: {activities}")
        time.sleep(_POLL_S)
    killed_at = time.monotonic()
    cluster.kill(victim)
    return killed_at


def raise_before_barrier(cluster: Cluster, samples: Samples) -> None:
    """Rank 1 raises at once, the others go into a barrier."""
    size, generation = cluster.world_size, cluster.generation
    began = time.monotonic()
    try:
        cluster.run(_RAISE, timeout=_CELL_LIMIT_S, once=True)
    except CellFailed as error:
        samples.add("raise", time.monotonic() - began)
        if list(error.errors) != [1]:
            raise
    else:
        raise NbdistError("rank 1 raised, but the cell succeeded")
    cluster.wait_healthy(timeout=_HEALTHY_LIMIT_S, after=generation)
    if cluster.run("rank", timeout=_CELL_LIMIT_S, once=True).values.keys() != {*range(size)}:
        raise NbdistError(f"rank 1 raised, and the next cell did not run on all {size} ranks")


def _check_world(cluster: Cluster) -> None:
    """All are there again and have what was kept, or the figures mean nothing."""
    sums = cluster.run(_LOOK, timeout=_CELL_LIMIT_S, once=True).values
    size = len(cluster.status())
    wanted = [float(size * index) for index in range(4)]
    if sums != dict.fromkeys(range(size), wanted):
        raise NbdistError(f"an all_reduce over {size} ranks gave {sums}")
