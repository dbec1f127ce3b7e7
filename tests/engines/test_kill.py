"""Engines that die or stand still: what the cell says, what the others keep, how the seat is
filled again."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest

import nbdist
from nbdist.processes import processes_by_rundir

RANKS = [0, 1, 2, 3]
CELL_ENDS_S = 4 * 0.3
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
STORE_KEYS = """
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
num_keys = store.num_keys()
del store
num_keys
"""


def check_death(loss, victim, pid):
    """The cell ended soon, with the signal, the seat, the process and a guess; the others were
    released."""
    error = loss.error
    assert loss.cell_ended_s <= CELL_ENDS_S, f"the cell ended {loss.cell_ended_s:.2f} s after"
    assert (error.rank, error.slot, error.pid) == (victim, victim, pid)
    assert (error.signal, error.exit_code) == ("SIGKILL", None)
    assert error.guess
    text = str(error)
    assert all(part in text for part in ("SIGKILL", f"rank {victim}", f"slot {victim}", str(pid)))
    released = {n.split(" was released")[0] for n in error.notes}
    assert released == {f"rank {r}" for r in range(loss.world_size) if r != victim}
    assert all("all_reduce" in note for note in error.notes)


@pytest.mark.parametrize("victim", RANKS)
def test_killed_while_all_wait(four, lose, heal, pids, victim):
    """ray PR#59989, PR#60820: whichever rank is killed in an all-reduce, rank 0 too, the cell ends
    at once and all heals."""
    four.run("x = rank * 11; weights = torch.arange(5.0)")
    before = pids(four)
    loss = lose(four, victim)
    check_death(loss, victim, before[victim])
    heal(four, loss)
    after = pids(four)
    assert {r: p for r, p in after.items() if r != victim} == {
        r: p for r, p in before.items() if r != victim
    }
    assert after[victim] != before[victim]
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert {r: w.tolist() for r, w in four.pull("weights").items()} == {
        r: [0.0, 1.0, 2.0, 3.0, 4.0] for r in RANKS
    }
    assert four.run("rank, slot, world_size").values == {r: (r, r, 4) for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    assert not any(s.not_restored for s in four.status())


def test_variables_of_the_others(cluster, lose):
    """ray PR#59989: while the seat is empty the survivors have new dense ranks, their variables,
    and a group of three."""
    engines = cluster(4, policy="shrink")
    engines.run("x = rank * 11; born = rank")
    loss = lose(engines, 0)
    assert loss.error.rank == 0
    values = engines.run("(x, born, rank, slot, world_size)").values
    assert values == {0: (11, 1, 0, 1, 3), 1: (22, 2, 1, 2, 3), 2: (33, 3, 2, 3, 3)}
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)
    with pytest.raises(nbdist.TargetError, match="0-2"):
        engines.run("rank", ranks=3)
    seats = {s.slot: (s.rank, s.state) for s in engines.status()}
    assert seats == {0: (None, "empty"), 1: (0, "member"), 2: (1, "member"), 3: (2, "member")}


def test_killed_by_the_user(four, pids):
    """`kill` returns when the exit is recorded; the incidents say who did it and how long each
    part took."""
    before, known, generation = pids(four), len(four.incidents), four.generation
    four.kill(3)
    assert not psutil.pid_exists(before[3])
    four.wait_healthy(after=generation)
    lost, joined = four.incidents[known:]
    assert (lost.kind, lost.slots, lost.ranks, lost.cause) == ("lost", (3,), (3,), "user")
    assert (joined.kind, joined.slots, joined.ranks) == ("joined", (3,), (3,))
    assert lost.generation_before == generation < lost.generation_after <= joined.generation_after
    assert joined.generation_after == four.generation
    for incident in (lost, joined):
        assert 0 <= incident.regroup_s < 6
        assert incident.not_restored == {}
    assert 0 <= lost.detect_s < CELL_ENDS_S


def test_killed_with_term(four, pids):
    """SIGTERM ends an engine too, at once, also in the midst of a cell, and is named."""
    before, generation = pids(four), four.generation
    with pytest.raises(nbdist.EngineDied) as died:
        four.run(
            "import os, signal, time\n"
            "if rank == 2:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(5)",
            once=True,
        )
    assert (died.value.signal, died.value.pid) == ("SIGTERM", before[2])
    four.wait_healthy(after=generation)


@pytest.mark.parametrize(
    ("death", "named", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", None),
        ("ctypes.string_at(0)", "SIGSEGV", None),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", None),
        ("os._exit(3)", None, 3),
        ("os.abort()", "SIGABRT", None),
    ],
)
def test_last_words(four, pids, death, named, code):
    """ipyparallel#695, #706, #322: how an engine ended is said, with pid, time, guess, and the last
    lines that it put out; and it is replaced."""
    before, generation = pids(four), four.generation
    cell = f"""
import ctypes, os, signal
print("the last line of rank", rank, flush=True)
if rank == 1:
    {death}
dist.barrier()
"""
    begun = time.monotonic()
    with pytest.raises(nbdist.EngineDied) as died:
        four.run(cell)
    assert time.monotonic() - begun <= CELL_ENDS_S + 1
    error = died.value
    assert (error.rank, error.slot, error.pid) == (1, 1, before[1])
    assert (error.signal, error.exit_code) == (named, code)
    assert named is None or error.guess
    assert named != "SIGKILL" or "out of memory" in error.guess
    assert re.search(r" at \d\d:\d\d:\d\d", str(error))
    assert any("the last line of rank 1" in line for line in error.last_lines), error.last_lines
    assert "the last line of rank 1" in str(error)
    assert sorted(error.errors) == [1]
    four.wait_healthy(after=generation)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_cell_that_comes_too_late(four, until, monkeypatch):
    """A rank that a cell reaches when the cell's group has broken does not begin it in the next
    group, and is not taken for one that failed."""
    execute, generation = four._client.execute, four.generation
    last = four._seen.membership.members[3].engine_id

    def send(engine_id, *args):
        if engine_id == last:
            until(lambda: four.generation > generation, 60, "the survivors form a group")
        return execute(engine_id, *args)

    monkeypatch.setattr(four._client, "execute", send)
    with pytest.raises(nbdist.EngineDied) as died:
        four.run("import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\nbegun = 1\ndist.barrier()")
    monkeypatch.undo()
    assert list(died.value.errors) == [1]
    four.wait_healthy(after=generation)
    begun = four.run("globals().pop('begun', 0)", once=True).values
    assert (begun[1], begun[3]) == (0, 0)  # of the others each may be late, too


OUT_OF_MEMORY = """
import resource
spare = 200_000_000
if rank == 1:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    {work}
dist.barrier()
"""


@pytest.mark.parametrize(
    ("work", "named"),
    [
        ("torch.ones(10_000_000_000)", "RuntimeError: .*allocate"),
        ("hoard = [bytes(1_000_000) for _ in range(10_000)]", "MemoryError"),
    ],
    ids=["tensor", "objects"],
)
def test_out_of_memory(four, pids, work, named):
    """ipyparallel#322: memory that is refused to a rank is an error of its cell; the others are
    released, and the engine lives on."""
    before = pids(four)
    with pytest.raises(nbdist.CellFailed, match=named) as failed:
        four.run(OUT_OF_MEMORY.format(work=work))
    assert list(failed.value.errors) == [1]
    assert sum("was released from barrier" in note for note in failed.value.notes) == 3
    four.run("resource.setrlimit(resource.RLIMIT_AS, limits)", ranks=1, once=True)
    assert pids(four) == before
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_killed_while_others_compute(four):
    """Survivors that are not in a collective are not disturbed: the cell ends, and the world heals
    when they are done."""
    known = len(four.incidents)
    code = "begun = time.monotonic()\nwhile time.monotonic() < begun + 1:\n    pass\ndone_by = rank"
    generation = four.generation
    died = (
        "import os, time\nif rank == 1:\n    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\n" + code
    )
    with pytest.raises(nbdist.EngineDied) as failed:
        four.run(died)
    assert failed.value.rank == 1
    assert sum("still runs" in note for note in failed.value.notes) == 3
    four.wait_healthy(after=generation)
    assert [i.kind for i in four.incidents[known:]] == ["lost", "joined"]
    assert four.pull("done_by", ranks=[0, 2, 3]) == {0: 0, 2: 2, 3: 3}


def test_killed_while_idle(four, pids):
    """An engine that is killed from outside between two cells is replaced, and the next cell waits
    for nothing else."""
    four.run("idle_name = rank")
    generation, before = four.generation, pids(four)
    os.kill(before[0], signal.SIGKILL)
    four.wait_healthy(after=generation, timeout=6)
    assert four.pull("idle_name") == {r: r for r in RANKS}


def measure(engines, running):
    """What must stay the same however many engines were lost: processes, and threads and
    descriptors of each kind."""
    path, own = engines._rundir.path, {s.pid for s in engines.status()}
    zygote, *children = running(path, "nbdist.supervisor.zygote")
    kinds = {
        "supervisor": running(path, "nbdist.supervisor"),
        "controller": running(path, "nbdist.supervisor.controller"),
        "zygote": [zygote],
        "store": [pid for pid in children if pid not in own],
        "engine": [pid for pid in children if pid in own],
        "all": [p.pid for p in processes_by_rundir()[path]],
    }
    seen = {kind: [psutil.Process(pid) for pid in pids] for kind, pids in kinds.items()}
    return {
        kind: {
            "processes": len(found),
            "threads": max(p.num_threads() for p in found),
            "descriptors": max(p.num_fds() for p in found),
        }
        for kind, found in seen.items()
    }


def grown(before, after):
    """What grew from one measurement to the other, beyond what may differ at any moment."""
    spare = {"processes": 0, "threads": 1, "descriptors": 4}
    return {
        (kind, what): (before.get(kind, {}).get(what), number)
        for kind, seen in after.items()
        for what, number in seen.items()
        if number > before.get(kind, {}).get(what, 0) + spare[what]
    }


def kill_in_a_row(engines, lose, heal, until, running, *, num_kills, after_which):
    """Kill every rank in turn; what was measured after some kills must not have grown after all of
    them."""
    size = engines.world_size
    engines.run("x = rank * 11")
    total = size * (size + 1) // 2
    before = keys = None
    for number in range(num_kills):
        victim = number % size
        loss = lose(engines, victim)
        assert (loss.error.rank, loss.error.signal) == (victim, "SIGKILL")
        assert loss.cell_ended_s <= CELL_ENDS_S
        heal(engines, loss)
        assert engines.run(SUM, once=True).values == dict.fromkeys(range(size), total)
        if number == after_which:
            before = measure(engines, running)
            keys = max(engines.run(STORE_KEYS, once=True).values.values())
    assert engines.pull("x") == {r: 11 * r for r in range(size)}
    assert before["engine"]["processes"] == size
    assert before["store"]["processes"] == before["zygote"]["processes"] == 1
    until(
        lambda: not grown(before, measure(engines, running)),
        5,
        lambda: grown(before, measure(engines, running)),
    )
    until(
        lambda: max(engines.run(STORE_KEYS, once=True).values.values()) <= keys + 2 * size,
        5,
        lambda: f"{keys} store keys then, {engines.run(STORE_KEYS, once=True).values} now",
    )
    kinds = [i.kind for i in engines.incidents]
    assert kinds.count("lost") == kinds.count("joined") == num_kills


def test_twenty_kills_in_a_row(cluster, lose, heal, until, running):
    """monarch#4002, #2835: 20 losses and refills later there is no process, thread, descriptor or
    store key more."""
    kill_in_a_row(cluster(4), lose, heal, until, running, num_kills=20, after_which=3)


def test_eight_engines(cluster, lose, heal):
    """A loss among eight engines, where most have no dead neighbour, ends as soon and heals as
    soon as among four."""
    engines = cluster(8)
    engines.run("x = rank * 11")
    loss = lose(engines, 5)
    assert loss.cell_ended_s <= CELL_ENDS_S
    assert len(loss.error.notes) == 7
    heal(engines, loss)
    assert engines.pull("x") == {r: 11 * r for r in range(8)}
    assert engines.run(SUM).values == dict.fromkeys(range(8), 36)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_among_eight(cluster, lose, heal, until, running):
    """Twenty losses among eight engines, each of them hit, leave nothing behind either."""
    kill_in_a_row(cluster(8), lose, heal, until, running, num_kills=20, after_which=3)


@pytest.mark.parametrize("victims", [(0, 1), (1, 3)])
def test_two_at_once(four, lose, heal, victims):
    """Two engines killed at once, neighbours and rank 0 among them: both are named, both seats are
    filled again."""
    four.run("x = rank * 11")
    loss = lose(four, *victims)
    assert loss.cell_ended_s <= CELL_ENDS_S
    assert {r: e.signal for r, e in loss.error.errors.items()} == dict.fromkeys(victims, "SIGKILL")
    heal(four, loss)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


# ---- during a refill


SLOW_REPLAY = """
import os, time
x = rank * 11
if os.path.exists({flag!r}):
    time.sleep(1)
"""


@pytest.fixture
def slow_replay(four, tmp_path):
    """For the length of a test, a newcomer takes a second to replay its cells."""
    flag = tmp_path / "slow"
    four.run(SLOW_REPLAY.format(flag=str(flag)))
    flag.touch()
    yield
    flag.unlink()


def seat_in(engines, slot, *states):
    """The pid of a seat's engine, once the seat is in one of these states."""
    seat = engines.status()[slot]
    return seat.pid if seat.state in states else None


@pytest.mark.usefixtures("slow_replay")
def test_newcomer_killed_in_mid_replay(four, until):
    """A newcomer that is killed while it replays is replaced by another one, which replays from
    the start."""
    generation = four.generation
    four.kill(1)
    newcomer = until(lambda: seat_in(four, 1, "replaying"), 60, four.status)
    os.kill(newcomer, signal.SIGKILL)
    four.wait_healthy(after=generation)
    assert four.status()[1].pid != newcomer
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


DIES_WHILE_FORMING = """
import os
from torch.distributed import distributed_c10d
if generation == 0 and not os.path.exists({flag!r}):  # in a replay, the first one only
    def die(*args, **kwargs):
        open({flag!r}, "w").close()
        os.kill(os.getpid(), 9)
    distributed_c10d._new_process_group_helper = die
"""


def test_newcomer_killed_while_the_group_forms(four, pids, tmp_path):
    """A newcomer that dies while it joins costs no survivor, and is replaced as any other."""
    four.run("x = rank * 11; born = rank")
    four.run(DIES_WHILE_FORMING.format(flag=str(tmp_path / "died")))
    before, generation = pids(four), four.generation
    four.kill(2)
    four.wait_healthy(after=generation)
    assert (tmp_path / "died").exists()
    after = pids(four)
    assert [after[r] for r in (0, 1, 3)] == [before[r] for r in (0, 1, 3)]
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


@pytest.mark.usefixtures("slow_replay")
def test_another_killed_during_a_refill(four, until):
    """ipyparallel's wait_for_engines: a second loss while a seat is being filled is healed too, and
    who waits is told of both."""
    generation = four.generation
    four.kill(3)
    until(lambda: seat_in(four, 3, "replaying"), 60, four.status)
    four.kill(1)
    with pytest.raises(TimeoutError, match=r"slot 1 is \w+; slot 3 is replaying"):
        four.wait_healthy(timeout=0.05, after=generation)
    four.wait_healthy(after=generation)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


@pytest.mark.usefixtures("slow_replay")
def test_waiting_for_too_short(four):
    """ipyparallel's wait_for_engines: where a seat is not filled in time, the message says which
    and what it is about."""
    generation = four.generation
    four.kill(1)
    with pytest.raises(TimeoutError, match=r"slot 1 is (starting|replaying|empty)"):
        four.wait_healthy(timeout=0.2, after=generation)
    four.wait_healthy(after=generation)


# ---- no way back


def test_all_of_them(cluster):
    """Nobody left holds the variables: that is said, everything still answers, and a new cluster
    can be started."""
    engines = cluster(3)
    engines.run("x = rank")
    engines.kill([0, 1, 2])
    with pytest.raises(nbdist.RecoveryFailed, match="dist_reset"):
        engines.wait_healthy(timeout=10)
    with pytest.raises(nbdist.RecoveryFailed):
        engines.run("rank")
    with pytest.raises(nbdist.RecoveryFailed):
        engines.pull("x")
    assert len(engines.status()) == 3
    path = engines._rundir.path
    engines.shutdown()
    assert path not in processes_by_rundir()
    assert cluster(2).run("rank").values == {0: 0, 1: 1}


def test_all_of_them_inside_a_cell(cluster):
    """All killed inside one cell: the cell ends with the first death, and `run` afterwards says
    that nobody is left."""
    engines = cluster(2)
    with pytest.raises(nbdist.EngineDied) as died:
        engines.run("import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)")  # both have begun
    assert sorted(died.value.errors) == [0, 1]
    with pytest.raises(nbdist.RecoveryFailed):
        engines.wait_healthy(timeout=10)


def test_seat_that_is_given_up(cluster):
    """An engine that dies whenever it replays is not started for ever: the seat is given up and it
    is said why."""
    engines = cluster(2, max_restarts=2)
    engines.run("import os, signal\nif rank == 1 and generation == 0:\n    os.kill(os.getpid(), 9)")
    generation = engines.generation
    engines.kill(1)
    with pytest.raises(nbdist.RecoveryFailed, match="slot 1"):
        engines.wait_healthy(after=generation)
    assert engines.run("rank, world_size").values == {0: (0, 1)}


def test_a_cell_that_kills_who_replays_it(cluster):
    """Newcomers are spared it after two have died of it: the seat is filled, and says what it
    lacks; names that all survivors hold alike are there."""
    engines = cluster(2)
    engines.run("y = 5")
    engines.run(
        "import os, signal\nx = 7\n"
        "if rank == 1 and generation == 0:\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        generation = engines.generation
        engines.kill(1)
        engines.wait_healthy(60, after=generation)
        assert engines.run("rank, x, y", once=True).values == {0: (0, 7, 5), 1: (1, 7, 5)}
        lacks = engines.status()[1].not_restored
        assert list(lacks) == ["cell 'import os, signal'"]
        assert "replayed no more" in lacks["cell 'import os, signal'"]


def test_the_last_words_are_those_of_the_engine_that_died(cluster):
    """A slot's log goes on with the next engine; what the one before said is not quoted."""
    engines = cluster(2)
    engines.run("print('the first')", ranks=1, once=True)
    generation = engines.generation
    engines.kill(1)
    engines.wait_healthy(60, after=generation)
    with pytest.raises(nbdist.EngineDied) as died:
        engines.run("print('the second')\nimport os\nos._exit(3)", ranks=1, once=True)
    text = "\n".join(died.value.last_lines)
    assert "the second" in text
    assert "the first" not in text
