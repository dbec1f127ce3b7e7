"""What a newcomer has: names made by the replay, names copied from the others, and what is said
about the rest."""

from __future__ import annotations

import pytest

RANKS = [0, 1, 2, 3]


@pytest.fixture
def refill(four):
    """`refill(rank)`: kill one engine and wait until its seat is filled; what could not be
    restored."""

    def kill_and_wait(rank=2):
        generation = four.generation
        four.kill(rank)
        four.wait_healthy(after=generation)
        return four.status()[rank].not_restored

    return kill_and_wait


def test_own_values_are_made_again(four, refill):
    """ipyparallel#94: a name that differs by rank is what this rank had: the same rank, another
    process."""
    four.run("import os; x = rank; name = f'rank {rank} of {world_size}'")
    pids = four.run("os.getpid()").values
    assert "x" not in refill()
    assert four.pull("x") == {r: r for r in RANKS}
    assert four.pull("name") == {r: f"rank {r} of 4" for r in RANKS}
    again = four.run("os.getpid()").values
    assert [r for r in RANKS if pids[r] != again[r]] == [2]


def test_pushed_values_come_too(four, refill):
    """What was pushed is there on a newcomer, also where it was pushed to its rank alone."""
    four.push(lr=0.125)
    four.push(ranks=[2], own="two")
    refill()
    assert four.pull("lr") == dict.fromkeys(RANKS, 0.125)
    assert four.pull("own", ranks=2) == {2: "two"}


def test_once_is_not_replayed(four, refill):
    """A cell marked `once` does not run again: a name of it that differs by rank is missing, and
    that is said."""
    four.run("import os\nran_once_in = os.getpid()", once=True)
    assert "ran_once_in" in refill()
    assert four.run("'ran_once_in' in globals()").values == {0: True, 1: True, 2: False, 3: True}
    four.run("globals().pop('ran_once_in', None)", once=True)


def test_cells_of_other_ranks_are_not_replayed(four, refill):
    """A cell for some ranks is replayed to their seats only."""
    four.run("import os\nwhere = os.getpid()", ranks=[0])
    refill(2)
    assert four.run("'where' in globals()").values == {r: r == 0 for r in RANKS}
    before = four.pull("where", ranks=0)
    refill(0)
    assert four.run("where == os.getpid()", ranks=0).values == {0: True}
    assert four.pull("where", ranks=0) != before


def test_failed_cells_are_not_replayed(four, refill):
    """A cell that failed does not run again on a newcomer."""
    with pytest.raises(Exception, match="no use"):
        four.run("import os\nfailed_in = os.getpid()\nraise ValueError('no use')")
    refill()
    assert four.run("'failed_in' in globals()").values == {r: r != 2 for r in RANKS}


def test_values_of_collectives_are_copied(four, refill):
    """In a replay a collective does nothing; what is equal on all others is copied from them."""
    four.run("total = torch.tensor([rank + 1.0]); dist.all_reduce(total)")
    four.run("everybody = [None] * 4; dist.all_gather_object(everybody, rank * 3)")
    missing = refill()
    assert {r: t.item() for r, t in four.pull("total").items()} == dict.fromkeys(RANKS, 10.0)
    assert four.pull("everybody") == {r: [0, 3, 6, 9] for r in RANKS}
    assert not {"total", "everybody"} & set(missing)


def test_model_and_optimizer_are_copied(four, refill):
    """A model and its momentum, trained by hand, are the others' on the newcomer, and belong to
    one another."""
    four.run("""
with torch.random.fork_rng():
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
def step():
    opt.zero_grad()
    net(torch.full((1, 4), rank + 1.0)).sum().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    opt.step()
def digest():
    parts = [p.detach().flatten() for p in net.parameters()]
    parts += [s["momentum_buffer"].flatten() for s in opt.state.values()]
    return torch.cat(parts).tolist()
""")
    four.run("for _ in range(3): step()")
    before = four.run("digest()").values
    assert not {"net", "opt"} & set(refill())
    after = four.run("digest()").values
    assert after == before
    four.run("for _ in range(2): step()")
    values = four.run("digest()").values
    assert all(v == values[0] for v in values.values())
    assert values != before


def test_what_cannot_be_copied_is_listed(four, refill):
    """A name that can neither be made again nor copied is listed for its rank, with the reason,
    and in the incident."""
    four.run("handle = open('/dev/null', 'w'); numbers = (i for i in range(3))", once=True)
    missing = refill()
    assert {"handle", "numbers"} <= set(missing)
    assert all(missing[name] for name in ("handle", "numbers"))
    assert {"handle", "numbers"} <= set(four.incidents[-1].not_restored)
    assert four.run("'handle' in globals()").values == {r: r != 2 for r in RANKS}
    four.run("globals().pop('handle', None), globals().pop('numbers', None)", once=True)
    assert not {"handle", "numbers"} & set(refill())


def test_replay_is_mute(four, refill):
    """What replayed cells print is in the slot's log, and not in the output of any cell."""
    four.run("print('said once, rank', rank)\n'a result'")
    refill()
    assert four.run("print('now')").outputs == dict.fromkeys(RANKS, "now\n")
    log = (four.logs / "slot-2.log").read_text()
    assert log.count("said once, rank 2") >= 2
    assert log.rstrip().endswith("now")


def test_seeds_differ(four, refill):
    """Ranks draw different random numbers unless they are seeded alike, newcomers too."""
    refill()
    drawn = four.run("import random; (random.random(), float(torch.rand(1)))").values
    assert len({v[0] for v in drawn.values()}) == len({v[1] for v in drawn.values()}) == 4


def test_functions_and_imports(four, refill):
    """Functions, classes and imports of earlier cells are there."""
    four.run(
        "import math as m\nclass Point:\n    x = 3\ndef area(r):\n    return m.floor(m.pi * r)"
    )
    refill()
    assert four.run("area(10) + Point().x").values == dict.fromkeys(RANKS, 34)


def test_cells_that_ran_while_it_came_up(four):
    """Cells that run on the survivors while a seat is empty are replayed before the newcomer
    joins."""
    generation = four.generation
    four.kill(2)
    values = four.run("late = slot * 5; world_size").values
    four.wait_healthy(after=generation)
    assert set(values.values()) <= {3, 4}
    assert four.pull("late") == {r: 5 * r for r in RANKS}


def test_long_cells_are_not_replayed(cluster):
    """A cell that ran longer than the limit is not replayed, though what it left equal everywhere
    is copied."""
    engines = cluster(3, replay_limit_s=0.3)
    engines.run("import os, time; time.sleep(0.5); made_in = os.getpid(); answer = 42")
    generation = engines.generation
    engines.kill(1)
    engines.wait_healthy(after=generation)
    assert engines.run("'made_in' in globals()").values == {0: True, 1: False, 2: True}
    assert engines.pull("answer") == dict.fromkeys(range(3), 42)
    assert "made_in" in engines.status()[1].not_restored


def test_replayed_cell_that_fails(four, refill, tmp_path):
    """A cell that succeeded once and fails in the replay is named for the newcomer; the later ones
    are replayed."""
    flag = tmp_path / "there"
    flag.touch()
    four.run(f"text = open({str(flag)!r}).read(); from_file = rank")
    four.run("after = rank + 1")
    flag.unlink()
    missing = refill()
    assert four.pull("after") == {r: r + 1 for r in RANKS}
    assert any("FileNotFoundError" in k + v for k, v in missing.items())


def test_only_survivor(cluster):
    """With one survivor "equal on all survivors" says nothing: plain values stay as the replay
    made them."""
    engines = cluster(2)
    engines.run("x = rank; total = torch.tensor([rank + 1.0]); dist.all_reduce(total)")
    engines.run("net = torch.nn.Linear(2, 2)\nfor p in net.parameters(): dist.broadcast(p.data, 0)")
    generation = engines.generation
    engines.kill(0)
    engines.wait_healthy(after=generation)
    assert engines.pull("x") == {0: 0, 1: 1}
    weights = engines.run("net.weight.tolist()").values
    assert weights[0] == weights[1]
    assert "total" in engines.status()[0].not_restored
