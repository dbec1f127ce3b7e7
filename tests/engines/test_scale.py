"""The world grows and shrinks on purpose: who keeps what, who is where, and again and again."""

from __future__ import annotations

import pytest

import nbdist

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
    """pytorch#91943, #111646: those who stay keep process and variables; those who come have what
    all others have."""
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
    until(lambda: all("runs" in s.activity for s in four.status()), 5, four.status)
    scaled = background(four.scale, 3)
    assert cell.result(20).values == {r: (r, 4) for r in range(4)}
    scaled.result(20)
    check_world(four, 3)
    four.scale(4)


@pytest.mark.timeout(120)
def test_ten_times(four, pids):
    """pytorch#30371, #151159, #132696: ten times torn down to three and formed again with four,
    each time right."""
    four.run("x = rank * 11")
    before = pids(four)
    for _ in range(10):
        four.scale(3)
        check_world(four, 3)
        four.scale(4)
        check_world(four, 4)
    assert {r: p for r, p in pids(four).items() if r < 3} == {r: before[r] for r in (0, 1, 2)}
    assert four.pull("x") == {r: 11 * r for r in range(4)}
