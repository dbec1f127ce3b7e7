"""The world grows and shrinks on purpose: who keeps what, who is where, and that it can be done
again and again."""

from __future__ import annotations

import pytest

import nbdist

SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
TOTAL = {1: 1, 2: 3, 3: 6, 4: 10}


def check_world(engines, size):
    assert engines.world_size == size
    assert [s.slot for s in engines.status()] == list(range(size))
    assert engines.run(SUM, once=True).values == dict.fromkeys(range(size), TOTAL[size])
    assert engines.run("(rank, world_size)", once=True).values == {
        r: (r, size) for r in range(size)
    }


def test_down_and_up(cluster, pids):
    """pytorch#91943, #111646: those who stay keep process and variables; those who come have what
    all others have."""
    engines = cluster(4)
    engines.run("x = rank * 11; born_in = world_size")
    engines.push(lr=0.5)
    before = pids(engines)
    engines.scale(2)
    check_world(engines, 2)
    assert pids(engines) == {r: before[r] for r in (0, 1)}
    assert engines.pull("x") == {0: 0, 1: 11}
    with pytest.raises(nbdist.TargetError, match="0-1"):
        engines.run("rank", ranks=[3])
    engines.run("while_two = rank + 100")
    engines.scale(4)
    check_world(engines, 4)
    assert {r: p for r, p in pids(engines).items() if r < 2} == {r: before[r] for r in (0, 1)}
    assert engines.pull("x") == {r: 11 * r for r in range(4)}
    assert engines.pull("while_two") == {r: 100 + r for r in range(4)}
    assert engines.pull("lr") == dict.fromkeys(range(4), 0.5)
    kinds = {i.kind for i in engines.incidents}
    assert "lost" not in kinds


def test_up(cluster, pids):
    """Growing beyond the first size starts new seats beside the old ones; a CPU host is warned,
    not refused."""
    engines = cluster(2)
    engines.run("x = rank * 11")
    before = pids(engines)
    engines.scale(3)
    check_world(engines, 3)
    assert {r: p for r, p in pids(engines).items() if r < 2} == before
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    generation = engines.generation
    engines.kill(2)
    engines.wait_healthy(after=generation)
    check_world(engines, 3)


def test_to_the_present_size(cluster):
    """Scaling to the size that is there changes nothing."""
    engines = cluster(2)
    generation = engines.generation
    engines.scale(2)
    assert engines.generation == generation
    with pytest.raises(ValueError, match="size=0"):
        engines.scale(0)


def test_to_one_and_back(cluster):
    """One engine alone is a world too."""
    engines = cluster(2)
    engines.run("x = rank")
    engines.scale(1)
    check_world(engines, 1)
    engines.scale(2)
    check_world(engines, 2)
    assert engines.pull("x") == {0: 0, 1: 1}


def test_while_a_cell_runs(cluster, background):
    """Scaling waits for the cell that runs: it finishes on all its ranks, in its own world."""
    engines = cluster(3)
    cell = background(
        engines.run, "import time; time.sleep(0.7); dist.barrier(); (rank, world_size)"
    )
    scaled = background(engines.scale, 2)
    assert cell.result(20).values in (
        {r: (r, 3) for r in range(3)},
        {r: (r, 2) for r in range(2)},
    )
    scaled.result(20)
    check_world(engines, 2)


@pytest.mark.timeout(120)
def test_ten_times(cluster, pids):
    """pytorch#30371, #151159, #132696: ten times torn down to three and formed again with four,
    each time right."""
    engines = cluster(4)
    engines.run("x = rank * 11")
    before = pids(engines)
    for _ in range(10):
        engines.scale(3)
        check_world(engines, 3)
        engines.scale(4)
        check_world(engines, 4)
    assert {r: p for r, p in pids(engines).items() if r < 3} == {r: before[r] for r in (0, 1, 2)}
    assert engines.pull("x") == {r: 11 * r for r in range(4)}
