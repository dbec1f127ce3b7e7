"""From `nbdist.start` to the first cell: how long it takes, and what the engines then have."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

import nbdist

FIRST_CELL_FACTOR = 4 * 3
"""Four times the bound, in imports of torch."""
DDP_S = 4 * 0.1
RANKS = [0, 1, 2, 3]

FIRST_CELL = """
import time
begun = time.perf_counter()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
seconds = time.perf_counter() - begun
seconds, model(torch.ones(1, 8)).shape[1]
"""


def import_torch_s():
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begun


def test_first_cell(cluster):
    """A first cell with torch answers within a few imports of torch, and a DDP model in it costs
    little more."""
    before = import_torch_s()
    begun = time.monotonic()
    engines = cluster(4)
    values = engines.run(FIRST_CELL).values
    seconds = time.monotonic() - begun
    imports_s = (before + import_torch_s()) / 2
    assert [values[r][1] for r in RANKS] == [8] * 4
    assert seconds <= FIRST_CELL_FACTOR * imports_s, f"{seconds:.2f} s; a torch {imports_s:.2f} s"
    assert max(v[0] for v in values.values()) <= DDP_S


def test_second_start_is_refused(four):
    """There is one current cluster in a kernel: a second start says how to end the first."""
    with pytest.raises(nbdist.WrongState, match=r"shutdown\(\)"):
        nbdist.start(2)
    assert four.world_size == 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_engines": 0}, "num_engines=0"),
        ({"num_engines": 2, "policy": "sometimes"}, "policy='sometimes'"),
        ({"num_engines": 2, "lease": 3}, "'lease'"),
        ({"num_engines": 2, "devices": [0]}, "devices"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_settings_that_make_no_sense(settings, text):
    """A wrong setting is refused by name and value before anything is started."""
    with pytest.raises(ValueError, match=text):
        nbdist.start(**settings)


def test_seats(four):
    """The table of seats says who sits where: slots and ranks alike, four living processes on this
    host's CPU."""
    seats = four.status()
    assert [s.slot for s in seats] == [s.rank for s in seats] == RANKS
    assert {s.state for s in seats} == {"member"}
    assert {s.device for s in seats} == {"cpu"}
    assert {s.host for s in seats} == {socket.gethostname()}
    assert {s.generation for s in seats} == {four.generation}
    assert four.run("import os; os.getpid()").values == {s.rank: s.pid for s in seats}
    assert all(s.memory_bytes > 1_000_000 for s in seats)
    assert not any(s.not_restored for s in seats)


def test_names_of_an_engine(four):
    """An engine's namespace has what a distributed cell needs, without an import."""
    modules = four.run("torch.__name__, dist.__name__").values
    values = four.run("(rank, world_size, local_rank, slot, str(device), generation)").values
    generation = four.generation
    assert modules == dict.fromkeys(RANKS, ("torch", "torch.distributed"))
    assert values == {r: (r, 4, r, r, "cpu", generation) for r in RANKS}
    assert four.run("dist.get_rank(), dist.get_world_size()").values == {r: (r, 4) for r in RANKS}


def test_collective(four):
    """The default group is up before the first cell, and right."""
    values = four.run("t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)").values
    assert values == dict.fromkeys(RANKS, 10)


def test_timeout_of_groups_is_torchs_own(four):
    """One rank may prepare data for longer than it takes to form a group: what users see has
    torch's 30 minutes (pytorch#165422)."""
    minutes = (
        "[g._get_backend(device).options._timeout.total_seconds() for g in (dist.group.WORLD, sub)]"
    )
    assert four.run(f"sub = dist.new_group([0, 1, 2, 3]); {minutes}").values == {
        r: [1800.0, 1800.0] for r in RANKS
    }
    late = "import time\nif rank == 0:\n    time.sleep(3.5)\ndist.barrier()"
    four.run(late, once=True)
    assert not four.incidents


def test_kernel_never_imports_torch(kernel):
    """nbdist's code in the kernel works without torch: start, cells and plain values load nothing
    of it."""
    notebook = kernel()
    notebook.start(2)
    notebook.do("import sys; r = c.run('x = rank + 5; x'); pulled = c.pull('x'); c.push(y=3)")
    assert notebook.ask("[r.values, pulled]") == [{"0": 5, "1": 6}] * 2
    assert notebook.ask("'torch' in sys.modules") is False
    notebook.do("t = c.pull('torch.ones(1)' and 'x'); c.scale(1); c.status(); c.shutdown()")
    assert notebook.ask("'torch' in sys.modules") is False


def test_torch_threads_in_the_kernel(kernel):
    """accelerate#182, #940, #1751, #2216, #3925, lightning#16136: what torch has started in the
    kernel, threads above all, does not matter."""
    notebook = kernel()
    notebook.do("import torch; a = torch.rand(400, 400); total = float((a @ a).sum())")
    assert notebook.ask("len(__import__('os').listdir('/proc/self/task'))") > 1
    notebook.start(2)
    notebook.do("r = c.run('b = torch.rand(300, 300); float((b @ b).sum()) > 0')")
    assert notebook.ask("list(r.values.values())") == [True, True]


def test_without_fork(cluster, monkeypatch):
    """Where the zygote must not fork, engines start as fresh processes, it is said why, and a seat
    is refilled alike."""
    monkeypatch.setenv("NBDIST_NO_FORK", "1")
    engines = cluster(2)
    assert any("NBDIST_NO_FORK" in text for text in engines.warnings), engines.warnings
    engines.run("x = rank + 1")
    generation = engines.generation
    engines.kill(1)
    engines.wait_healthy(after=generation, timeout=30)
    assert engines.pull("x") == {0: 1, 1: 2}
    assert engines.run("t = torch.ones(1); dist.all_reduce(t); int(t)").values == {0: 2, 1: 2}
    assert [i.cause for i in engines.incidents if i.kind == "lost"] == ["user"]


@pytest.mark.usefixtures("alone")
def test_start_that_fails():
    """A start that comes to nothing says which part did not come up, shows its log, and leaves
    nothing behind."""
    with pytest.raises(nbdist.StartFailed) as failed:
        nbdist.start(2, start_timeout_s=0.01, max_restarts=1)
    assert "slot" in str(failed.value)
    with pytest.raises(nbdist.NotStarted):
        nbdist.session.start.current()


@pytest.mark.usefixtures("alone")
def test_context_manager():
    """Leaving the `with` block shuts the cluster down; whatever is asked of it afterwards, it says
    that it is shut down, and a second shutdown does nothing."""
    with nbdist.start(1) as engines:
        assert engines.run("rank").values == {0: 0}
    engines.shutdown()
    for use in (
        lambda: engines.run("rank"),
        lambda: engines.pull("x"),
        lambda: engines.push(x=1),
        lambda: engines.kill(0),
        lambda: engines.scale(2),
        engines.wait_healthy,
        engines.status,
        engines.sync,
    ):
        with pytest.raises(nbdist.NotStarted, match="shut down"):
            use()
    assert "shut down" in repr(engines)
