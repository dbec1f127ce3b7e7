"""The processes behind the engines are killed: the supervisor, the zygote, the store, the
controller."""

from __future__ import annotations

import os
import signal
import time

import pytest

import nbdist
from nbdist.processes import processes_by_rundir

RANKS = [0, 1, 2, 3]
REPLACED_S = 10.0
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
SLOW_REPLAY = """
import os, time
x = rank * 11
if os.path.exists({flag!r}):
    time.sleep(1.5)
"""


@pytest.fixture
def replaced(until):
    """`replaced(cluster, number)`: end the supervisor, and wait until there is another one that
    answers."""

    def end_and_wait(engines, number=signal.SIGKILL, within=REPLACED_S, meanwhile=lambda: None):
        old, begun = engines._link._supervisor.pid, time.monotonic()
        os.kill(old, number)
        meanwhile()
        until(lambda: engines._link._supervisor.pid != old, within, "another supervisor")
        seats = engines.status()
        assert time.monotonic() - begun <= within
        return seats

    return end_and_wait


@pytest.fixture
def store_pid(running):
    """`store_pid(cluster)`: the pid of the zygote's first child."""

    def find(engines):
        own = {s.pid for s in engines.status()}
        _, *children = running(engines._rundir.path, "nbdist.supervisor.zygote")
        return next(pid for pid in children if pid not in own)

    return find


def test_replaced_unnoticed(running, four, replaced, pids):
    """A supervisor that is killed is replaced; the group it formed goes on, generation and four
    are the same."""
    four.run("x = rank + 1")
    before, generation, known = pids(four), four.generation, four.incidents
    for _ in range(2):
        seats = replaced(four)
        assert [s.state for s in seats] == ["member"] * 4
        now = (four.generation, four.incidents, pids(four))
        assert now == (generation, known, before)
        assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    assert four.pull("x") == {r: r + 1 for r in RANKS}
    assert len(running(four._rundir.path, "nbdist.supervisor")) == 1
    assert len(running(four._rundir.path, "nbdist.supervisor.zygote")) == 6


def test_cell_goes_on(four, replaced, background, until):
    """A cell that runs meanwhile is not disturbed, in Python or in a collective, and its result
    arrives."""
    generation, known = four.generation, four.incidents
    code = """
import time
if rank == 0:
    time.sleep(3)
t = torch.tensor([rank + 1])
dist.all_reduce(t)
int(t), rank
"""
    cell = background(four.run, code)
    until(lambda: "waits in" in four.status()[1].activity, 60, four.status)
    replaced(four)
    assert not cell.done()
    assert cell.result(60).values == {r: (10, r) for r in RANKS}
    assert (four.generation, four.incidents) == (generation, known)


def test_journal_is_taken_over(four, replaced):
    """Cells that ran before the supervisor was replaced are replayed to four that join after
    it."""
    four.run("x = rank * 11")
    four.push(lr=0.5)
    replaced(four)
    four.run("y = rank + 100")
    generation = four.generation
    four.kill(1)
    four.wait_healthy(after=generation)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.pull("y") == {r: 100 + r for r in RANKS}
    assert four.pull("lr") == dict.fromkeys(RANKS, 0.5)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_loss_while_nobody_is_there(four, replaced, pids):
    """An engine that dies while the supervisor is dead is noticed by the next one, with its
    signal, and replaced."""
    known = len(four.incidents)
    four.run("x = rank * 11")
    generation, victim = four.generation, pids(four)[1]
    replaced(four, meanwhile=lambda: os.kill(victim, signal.SIGKILL))
    four.wait_healthy(after=generation)
    lost = [i for i in four.incidents[known:] if i.kind == "lost"]
    assert [(i.slots, i.cause) for i in lost] == [((1,), "SIGKILL")]
    assert four.pull("x") == {r: 11 * r for r in RANKS}


def test_loss_inside_a_cell_while_nobody_is_there(four, replaced, pids, background, until):
    """As above inside a collective: the others are released, and the cell ends with that death."""
    generation, victim = four.generation, pids(four)[1]
    code = "import time\nwhile rank == 1:\n    time.sleep(0.01)\ndist.barrier()"
    cell = background(four.run, code)
    until(lambda: sum("waits in" in s.activity for s in four.status()) == 3, 60, four.status)
    replaced(four, meanwhile=lambda: os.kill(victim, signal.SIGKILL))
    with pytest.raises(nbdist.EngineDied) as died:
        cell.result(60)
    assert (died.value.rank, died.value.pid, died.value.signal) == (1, victim, "SIGKILL")
    four.wait_healthy(after=generation)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_replaced_during_a_refill(running, four, replaced, until, tmp_path):
    """A supervisor that is killed while a newcomer replays: the next one takes it from there,
    nothing is started twice."""
    four.run(SLOW_REPLAY.format(flag=str(tmp_path / "slow")))
    (tmp_path / "slow").touch()
    generation = four.generation
    four.kill(1)
    until(lambda: four.status()[1].state == "replaying", 60, four.status)
    replaced(four)
    four.wait_healthy(after=generation)
    (tmp_path / "slow").unlink()
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    assert len(running(four._rundir.path, "nbdist.supervisor.zygote")) == 6


def test_replaced_while_the_group_breaks(four, pids):
    """An engine and the supervisor are killed in the same moment, inside a collective: all of it
    heals."""
    four.run("x = rank * 11")
    generation, victim = four.generation, pids(four)[2]
    os.kill(victim, signal.SIGKILL)
    os.kill(four._link._supervisor.pid, signal.SIGKILL)
    four.wait_healthy(after=generation)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_shutdown_without_a_supervisor(cluster):
    """`shutdown` right after the supervisor was killed leaves nothing behind."""
    engines = cluster(2)
    path = engines._rundir.path
    os.kill(engines._link._supervisor.pid, signal.SIGKILL)
    begun = time.monotonic()
    engines.shutdown()
    assert time.monotonic() - begun <= 10
    assert path not in processes_by_rundir()
    assert not path.exists()


@pytest.mark.slow
def test_silent_supervisor(four, replaced):
    """A supervisor that is stopped answers nothing: it is ended and replaced."""
    seats = replaced(four, number=signal.SIGSTOP, within=20)
    assert [s.state for s in seats] == ["member"] * 4
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_killed_zygote(running, four, pids):
    """Engines go on without the zygote that forked them; deaths are noticed and seats filled all
    the same."""
    four.run("x = rank * 11")
    before, generation = pids(four), four.generation
    old = running(four._rundir.path, "nbdist.supervisor.zygote")[0]
    os.kill(old, signal.SIGKILL)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    assert pids(four) == before
    os.kill(before[1], signal.SIGKILL)
    four.wait_healthy(after=generation)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_killed_zygote_and_engine(running, four, pids):
    """Where an engine and the zygote are killed in the same moment, nobody can say how the engine
    ended; its seat is filled all the same."""
    four.run("x = rank * 11")
    generation, victim = four.generation, pids(four)[2]
    os.kill(running(four._rundir.path, "nbdist.supervisor.zygote")[0], signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    four.wait_healthy(after=generation)
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_kill_right_after_the_zygote_was_killed(running, four):
    """An order to kill is carried out though the zygote, which would do it, has just died."""
    generation = four.generation
    os.kill(running(four._rundir.path, "nbdist.supervisor.zygote")[0], signal.SIGKILL)
    four.kill(1)
    four.wait_healthy(after=generation)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_killed_store(four, store_pid):
    """Formed groups do not need the store; when it was killed, the next group is formed with
    another one."""
    four.run("x = rank * 11")
    generation, old = four.generation, store_pid(four)
    os.kill(old, signal.SIGKILL)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    four.kill(1)
    four.wait_healthy(after=generation)
    assert store_pid(four) != old
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    four.run("sub = dist.new_group([0, 1, 2, 3]); dist.barrier(sub)")


def test_killed_controller(running, cluster, until):
    """Without ipyparallel's controller no cell can be sent: that is said, and the notebook is free
    to start anew."""
    engines = cluster(2)
    os.kill(running(engines._rundir.path, "nbdist.supervisor.controller")[0], signal.SIGKILL)
    with pytest.raises(nbdist.RecoveryFailed, match="controller"):
        until(lambda: engines.wait_healthy(timeout=1), 60, "the loss of the controller is said")
    with pytest.raises(nbdist.RecoveryFailed, match="controller"):
        engines.run("rank", timeout=5)
    engines.shutdown()
    assert cluster(1).run("rank").values == {0: 0}


def test_killed_controller_inside_a_cell(running, cluster, background, until):
    """A cell that runs when the controller is killed ends too, and does not wait for ever."""
    engines = cluster(2)
    cell = background(engines.run, "import time; time.sleep(1)")
    until(lambda: all("runs" in s.activity for s in engines.status()), 60, engines.status)
    os.kill(running(engines._rundir.path, "nbdist.supervisor.controller")[0], signal.SIGKILL)
    with pytest.raises(nbdist.NbdistError, match="controller"):
        cell.result(60)
