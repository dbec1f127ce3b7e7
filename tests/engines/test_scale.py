"""The world grows and shrinks on purpose: who keeps what, who is where, and again and again."""

from __future__ import annotations

import time

import pytest

import nbdist

CYCLE_S = 4 * 2.0
"""Four times what a death, a smaller world and the former one take together, at most."""
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
TOTAL = {1: 1, 2: 3, 3: 6, 4: 10, 5: 15}


def check_world(engines, size):
    assert engines.world_size == size
    assert [s.slot for s in engines.status()] == list(range(size))
    assert engines.run(SUM, once=True).values == dict.fromkeys(range(size), TOTAL[size])
    assert engines.run("(rank, world_size)", once=True).values == {
        r: (r, size) for r in range(size)
    }


def test_down_and_up(four, pids):
    """pytorch#91943, #111646, kubeflow/trainer#1509: those who stay keep process and variables;
    those who come have what all others have."""
    known, before = len(four.incidents), pids(four)
    four.run("x = rank * 11")
    four.push(lr=0.5)
    four.scale(2)
    check_world(four, 2)
    assert pids(four) == {r: before[r] for r in (0, 1)}
    assert four.pull("x") == {0: 0, 1: 11}
    for use in (lambda: four.run("rank", ranks=[3]), lambda: four.pull("x", ranks=2)):
        with pytest.raises(nbdist.TargetError, match="0-1"):
            use()
    with pytest.raises(nbdist.TargetError, match="0-1"):
        four.kill(3)
    four.run("while_two = rank + 100")
    four.scale(4)
    check_world(four, 4)
    assert {r: p for r, p in pids(four).items() if r < 2} == {r: before[r] for r in (0, 1)}
    assert four.pull("x") == {r: 11 * r for r in range(4)}
    assert four.pull("while_two") == {r: 100 + r for r in range(4)}
    assert four.pull("lr") == dict.fromkeys(range(4), 0.5)
    assert "lost" not in {i.kind for i in four.incidents[known:]}


def test_beyond_the_first_size(four, pids):
    """Growing beyond the first size starts new seats beside the old ones, which are refilled as any
    other; a CPU host is warned of too many, not refused."""
    four.run("x = rank * 11")
    before = pids(four)
    four.scale(5)
    check_world(four, 5)
    assert any("5 engines" in text for text in four.warnings)
    assert {r: p for r, p in pids(four).items() if r < 4} == before
    assert four.pull("x") == {r: 11 * r for r in range(5)}
    generation = four.generation
    four.kill(4)
    four.wait_healthy(after=generation)
    check_world(four, 5)
    four.scale(4)
    check_world(four, 4)


def test_from_two_to_three(four):
    """Two ranks become three."""
    four.scale(2)
    four.run("y = rank + 7")
    four.scale(3)
    check_world(four, 3)
    assert four.pull("y") == {0: 7, 1: 8, 2: 9}
    four.scale(4)


def test_to_the_present_size(four):
    """Scaling to the size that is there changes nothing, and to nothing is refused."""
    generation = four.generation
    four.scale(4)
    assert four.generation == generation
    with pytest.raises(ValueError, match="size=0"):
        four.scale(0)


def test_to_one_and_back(four):
    """One engine alone is a world too."""
    four.run("x = rank")
    four.scale(1)
    check_world(four, 1)
    four.scale(4)
    check_world(four, 4)
    assert four.pull("x") == {r: r for r in range(4)}


def test_while_a_cell_runs(four, background, until):
    """Scaling waits for the cell that runs: it finishes on all its ranks, in its own world."""
    code = "import time; time.sleep(0.7); dist.barrier(); (rank, world_size)"
    cell = background(four.run, code, once=True)
    until(lambda: all("runs" in s.activity for s in four.status()), 60, four.status)
    scaled = background(four.scale, 3)
    assert cell.result(60).values == {r: (r, 4) for r in range(4)}
    scaled.result(60)
    check_world(four, 3)
    four.scale(4)


def test_killed_while_growing(four, background, until):
    """ipyparallel's wait_for_engines: a loss among those that are there does not keep the world
    from growing."""
    four.run("x = rank * 11")
    scaled = background(four.scale, 5)
    until(lambda: any(s.slot == 4 and s.pid for s in four.status()), 60, four.status)
    four.kill(1)
    scaled.result(60)
    four.wait_healthy()
    check_world(four, 5)
    assert four.pull("x") == {r: 11 * r for r in range(5)}
    four.scale(4)


def test_ten_times(cluster, lose, pids):
    """pytorch#30371, #151159, #132696: ten times rank 3 dies in a collective, the survivors form a
    group of three, and one of four with a newcomer; each time right, and soon."""
    engines = cluster(4, policy="shrink")
    engines.run("x = rank * 11")
    before, generation = pids(engines), engines.generation
    for _ in range(10):
        begun = time.monotonic()
        lose(engines, 3)
        assert engines.run(SUM, once=True).values == dict.fromkeys(range(3), TOTAL[3])
        engines.scale(4)
        check_world(engines, 4)
        assert time.monotonic() - begun < CYCLE_S
        assert engines.generation > generation
        generation = engines.generation
    assert {r: p for r, p in pids(engines).items() if r < 3} == {r: before[r] for r in (0, 1, 2)}
    assert engines.pull("x") == {r: 11 * r for r in range(4)}
