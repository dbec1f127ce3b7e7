"""The processes behind the engines are killed: the supervisor, the zygote, the store, the
controller."""

from __future__ import annotations

import os
import signal
import time

import pytest

import nbdist
from nbdist.processes import processes_by_rundir

REPLACED_S = 10.0
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"


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


def test_replaced_unnoticed(running, cluster, replaced, pids):
    """A supervisor that is killed is replaced; the group it formed goes on, generation and engines
    are the same."""
    engines = cluster(2)
    engines.run("x = rank + 1")
    before = pids(engines)
    for _ in range(2):
        seats = replaced(engines)
        assert [s.state for s in seats] == ["member"] * 2
        assert (engines.generation, engines.incidents, pids(engines)) == (1, [], before)
        assert engines.run(SUM).values == {0: 3, 1: 3}
    assert engines.pull("x") == {0: 1, 1: 2}
    assert len(running(engines._rundir.path, "nbdist.supervisor")) == 1
    assert len(running(engines._rundir.path, "nbdist.supervisor.zygote")) == 4


def test_cell_goes_on(cluster, replaced, background, until):
    """A cell that runs meanwhile is not disturbed, in Python or in a collective, and its result
    arrives."""
    engines = cluster(2)
    code = """
import time
if rank == 0:
    time.sleep(4)
t = torch.tensor([rank + 1])
dist.all_reduce(t)
int(t), rank
"""
    cell = background(engines.run, code)
    until(lambda: "waits in" in engines.status()[1].activity, 10, engines.status)
    replaced(engines)
    assert not cell.done()
    assert cell.result(15).values == {0: (3, 0), 1: (3, 1)}
    assert (engines.generation, engines.incidents) == (1, [])


def test_journal_is_taken_over(cluster, replaced):
    """Cells that ran before the supervisor was replaced are replayed to engines that join after
    it."""
    engines = cluster(3)
    engines.run("x = rank * 11")
    engines.push(lr=0.5)
    replaced(engines)
    engines.run("y = rank + 100")
    generation = engines.generation
    engines.kill(1)
    engines.wait_healthy(after=generation)
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    assert engines.pull("y") == {0: 100, 1: 101, 2: 102}
    assert engines.pull("lr") == dict.fromkeys(range(3), 0.5)
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)


def test_loss_while_nobody_is_there(cluster, replaced, pids):
    """An engine that dies while the supervisor is dead is noticed by the next one, with its
    signal, and replaced."""
    engines = cluster(3)
    engines.run("x = rank * 11")
    generation, victim = engines.generation, pids(engines)[1]
    replaced(engines, meanwhile=lambda: os.kill(victim, signal.SIGKILL))
    engines.wait_healthy(after=generation)
    lost = [i for i in engines.incidents if i.kind == "lost"]
    assert [(i.slots, i.cause) for i in lost] == [((1,), "SIGKILL")]
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}


def test_loss_inside_a_cell_while_nobody_is_there(cluster, replaced, pids, background, until):
    """As above inside a collective: the others are released, and the cell ends with that death."""
    engines = cluster(3)
    generation, victim = engines.generation, pids(engines)[1]
    code = "import time\nwhile rank == 1:\n    time.sleep(0.01)\ndist.barrier()"
    cell = background(engines.run, code)
    until(lambda: sum("waits in" in s.activity for s in engines.status()) == 2, 10, engines.status)
    replaced(engines, meanwhile=lambda: os.kill(victim, signal.SIGKILL))
    with pytest.raises(nbdist.EngineDied) as died:
        cell.result(15)
    assert (died.value.rank, died.value.pid, died.value.signal) == (1, victim, "SIGKILL")
    engines.wait_healthy(after=generation)
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)


def test_replaced_during_a_refill(running, cluster, replaced, until):
    """A supervisor that is killed while a newcomer replays: the next one takes it from there,
    nothing is started twice."""
    engines = cluster(3)
    engines.run("import time; time.sleep(1.5); x = rank * 11")
    generation = engines.generation
    engines.kill(1)
    until(lambda: engines.status()[1].state == "replaying", 5, engines.status)
    replaced(engines)
    engines.wait_healthy(after=generation)
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)
    assert len(running(engines._rundir.path, "nbdist.supervisor.zygote")) == 5


def test_replaced_while_the_group_breaks(cluster, pids):
    """An engine and the supervisor are killed in the same moment, inside a collective: all of it
    heals."""
    engines = cluster(3)
    engines.run("x = rank * 11")
    generation, victim = engines.generation, pids(engines)[2]
    os.kill(victim, signal.SIGKILL)
    os.kill(engines._link._supervisor.pid, signal.SIGKILL)
    engines.wait_healthy(after=generation)
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)


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
def test_silent_supervisor(cluster, replaced):
    """A supervisor that is stopped answers nothing: it is ended and replaced."""
    engines = cluster(2)
    seats = replaced(engines, number=signal.SIGSTOP, within=20)
    assert [s.state for s in seats] == ["member"] * 2
    assert engines.run(SUM).values == {0: 3, 1: 3}


def test_killed_zygote(running, cluster, pids):
    """Engines go on without the zygote that forked them; deaths are noticed and seats filled all
    the same."""
    engines = cluster(3)
    engines.run("x = rank * 11")
    before, generation = pids(engines), engines.generation
    old = running(engines._rundir.path, "nbdist.supervisor.zygote")[0]
    os.kill(old, signal.SIGKILL)
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)
    assert pids(engines) == before
    os.kill(before[1], signal.SIGKILL)
    engines.wait_healthy(after=generation)
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)


def test_killed_store(cluster, store_pid):
    """Formed groups do not need the store; when it was killed, the next group is formed with
    another one."""
    engines = cluster(3)
    engines.run("x = rank * 11")
    generation, old = engines.generation, store_pid(engines)
    os.kill(old, signal.SIGKILL)
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)
    engines.kill(1)
    engines.wait_healthy(after=generation)
    assert store_pid(engines) != old
    assert engines.pull("x") == {0: 0, 1: 11, 2: 22}
    assert engines.run(SUM).values == dict.fromkeys(range(3), 6)
    engines.run("sub = dist.new_group([0, 1, 2]); dist.barrier(sub)")


def test_killed_controller(running, cluster, until):
    """Without ipyparallel's controller no cell can be sent: that is said, and the notebook is free
    to start anew."""
    engines = cluster(2)
    os.kill(running(engines._rundir.path, "nbdist.supervisor.controller")[0], signal.SIGKILL)
    with pytest.raises(nbdist.RecoveryFailed, match="controller"):
        until(lambda: engines.wait_healthy(timeout=1), 10, "the loss of the controller is said")
    with pytest.raises(nbdist.RecoveryFailed, match="controller"):
        engines.run("rank", timeout=5)
    engines.shutdown()
    assert cluster(1).run("rank").values == {0: 0}


def test_killed_controller_inside_a_cell(running, cluster, background, until):
    """A cell that runs when the controller is killed ends too, and does not wait for ever."""
    engines = cluster(2)
    cell = background(engines.run, "import time; time.sleep(1)")
    until(lambda: all("runs" in s.activity for s in engines.status()), 10, engines.status)
    os.kill(running(engines._rundir.path, "nbdist.supervisor.controller")[0], signal.SIGKILL)
    with pytest.raises(nbdist.NbdistError, match="controller"):
        cell.result(10)
