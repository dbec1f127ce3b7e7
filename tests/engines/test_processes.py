"""The kernel and the processes of its cluster: signals that reach only the kernel, its death, two
kernels at once."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from jupyter_client.manager import KernelManager

from nbdist.cli import main
from nbdist.processes import processes_by_rundir
from nbdist.rundir import runtime_root

LEASE_S = 3
GONE_S = 4 * LEASE_S
"""Four times what the lease allows."""


@pytest.fixture
def gone(until):
    """`gone(path, processes, within)`: wait until a cluster has no process and no folder, so no
    socket either."""

    def wait(path, processes, within, *, with_folder=True):
        assert len(processes) >= 6
        until(
            lambda: not any(map(is_alive, processes)) and not (with_folder and path.exists()),
            within,
            lambda: f"{path} is there: {path.exists()}; alive: {[*filter(is_alive, processes)]}",
        )
        assert path not in processes_by_rundir()
        assert not with_folder or not list(runtime_root().iterdir())

    return wait


def is_alive(process):
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def of(path):
    return processes_by_rundir()[path]


def test_sessions(four):
    """Every process of a cluster has a session other than the kernel's, and every engine one of
    its own."""
    own = os.getsid(0)
    sessions = {p.pid: os.getsid(p.pid) for p in of(four._rundir.path)}
    assert own not in sessions.values()
    for seat in four.status():
        assert sessions[seat.pid] == seat.pid


def test_all_processes_are_found(four):
    """What belongs to a cluster is found by its directory: four engines, and at least supervisor,
    controller, zygote."""
    found = {p.pid for p in of(four._rundir.path)}
    assert {s.pid for s in four.status()} < found
    assert four._link._supervisor.pid in found
    assert len(found) >= 8


def test_interrupt_of_the_process_group(kernel):
    """Stop in a notebook signals the kernel's whole process group: engines and variables are not
    touched."""
    notebook = kernel()
    path = notebook.start(2)
    notebook.do("c.run('x = rank + 1')")
    pids = notebook.ask("[s.pid for s in c.status()]")
    for _ in range(3):
        notebook.interrupt()
        assert notebook.ask("1 + 1") == 2
    assert notebook.ask("c.pull('x')") == {"0": 1, "1": 2}
    assert notebook.ask("[s.pid for s in c.status()]") == pids
    assert notebook.ask("[c.generation, len(c.incidents)]") == [1, 0]
    assert len(of(path)) >= 6


def test_kernel_that_ends(kernel, gone):
    """A kernel that ends as programs do takes its cluster along."""
    notebook = kernel()
    path = notebook.start(2)
    processes = of(path)
    notebook.process.stdin.close()
    notebook.process.wait(60)
    gone(path, processes, 2)


@pytest.mark.parametrize("group", [False, True], ids=["kernel", "process-group"])
def test_killed_kernel(kernel, gone, group):
    """monarch#712, lightning#9303, lightly-train#92, ultralytics#8232: a kernel that is killed
    leaves no process, socket or folder behind."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S)
    processes = of(path)
    if group:
        os.killpg(notebook.pid, signal.SIGKILL)
    else:
        os.kill(notebook.pid, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, GONE_S)


@pytest.fixture
def notebook_kernel(alone, leaks):  # noqa: ARG001 - ends before the look for leaks
    """A kernel as JupyterLab starts it, and a client of it."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=30)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    manager.context.destroy(linger=0)


BUSY = """
if rank == 0:
    dist.barrier()
open({flag!r}, "w").close()
while True:
    pass
"""


@pytest.mark.parametrize("is_busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_restarted_kernel(notebook_kernel, gone, until, tmp_path, is_busy):
    """ultralytics#8232, ipyrad#95, #333, slide2vec PR#131: Restart in JupyterLab, in the midst of a
    cell or not, ends the kernel's cluster."""
    manager, client = notebook_kernel
    start = f"import nbdist; c = nbdist.start(2, lease_s={LEASE_S}); c.run('rank')"
    reply = client.execute_interactive(start, timeout=30, output_hook=lambda _: None)
    assert reply["content"]["status"] == "ok", reply["content"]
    (path,) = runtime_root().iterdir()
    processes = of(path)
    if is_busy:
        flag = tmp_path / "busy"
        client.execute(f"c.run({BUSY.format(flag=str(flag))!r})")
        until(flag.exists, 60, "the cell runs")
    manager.restart_kernel()
    gone(path, processes, GONE_S)
    client.wait_for_ready(timeout=30)


def test_killed_kernel_in_a_cell(kernel, gone):
    """Also while ranks wait in a collective, or compute and never look up."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S)
    processes = of(path)
    notebook.do(
        "import threading\n"
        "code = 'if rank == 0: dist.barrier()\\nwhile True: pass'\n"
        "threading.Thread(target=c.run, args=(code,), daemon=True).start()"
    )
    os.kill(notebook.pid, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, GONE_S)


def test_killed_kernel_and_supervisor(kernel, gone, running):
    """Where the supervisor is killed too, everything else ends by itself when its lease has run
    out."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S)
    processes = of(path)
    supervisor = running(path, "nbdist.supervisor")[0]
    os.killpg(notebook.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, GONE_S)


@pytest.mark.slow
def test_stopped_engine_of_a_killed_kernel(kernel, gone, running):
    """An engine that is stopped and cannot look at its lease does not outlive the others."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S)
    processes = of(path)
    supervisor = running(path, "nbdist.supervisor")[0]
    os.kill(notebook.ask("c.status()[1].pid"), signal.SIGSTOP)
    os.killpg(notebook.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, GONE_S)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["controller", "zygote"])
def test_killed_kernel_supervisor_and_another(kernel, gone, module, running):
    """Nor does a process outlive the lease where controller or zygote are killed with them."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S)
    processes = of(path)
    doomed = [
        running(path, "nbdist.supervisor")[0],
        running(path, f"nbdist.supervisor.{module}")[0],
    ]
    os.kill(notebook.pid, signal.SIGKILL)
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, GONE_S, with_folder=module != "zygote")
    assert main(["clean"]) == 0  # the folder is the zygote's to remove
    assert not path.exists()


@pytest.mark.slow
def test_killed_kernel_and_supervisor_with_the_usual_lease(kernel, gone, running):
    """With the lease that users have, nothing is left 20 seconds later."""
    notebook = kernel()
    path = notebook.start(2)
    processes = of(path)
    supervisor = running(path, "nbdist.supervisor")[0]
    os.kill(notebook.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, 20)


@pytest.mark.slow
def test_killed_kernel_with_the_usual_lease(kernel, gone):
    """The same for the kernel alone."""
    notebook = kernel()
    path = notebook.start(2)
    processes = of(path)
    os.kill(notebook.pid, signal.SIGKILL)
    notebook.process.wait(60)
    gone(path, processes, 20)


@pytest.mark.parametrize("end", ["killed", "ends"])
def test_kept_cluster_outlives_its_kernel(kernel, until, end):
    """With `keep=True` the engines stay when the kernel is killed or ends by itself, until somebody
    cleans up what was kept."""
    notebook = kernel()
    path = notebook.start(2, lease_s=LEASE_S, keep=True)
    engines = notebook.ask("[s.pid for s in c.status()]")
    if end == "killed":
        os.kill(notebook.pid, signal.SIGKILL)
    else:
        notebook.process.stdin.close()
    notebook.process.wait(60)
    time.sleep(LEASE_S + 1)  # what must not happen would have happened by then
    assert {*engines} < {p.pid for p in of(path)}
    assert main(["clean", "--all-kept"]) == 0
    until(
        lambda: path not in processes_by_rundir() and not path.exists(), 60, "the cluster is gone"
    )


def test_two_kernels(kernel):
    """accelerate#74, dask-pytorch-ddp, Ddip: two clusters at once do not disturb one another,
    started together or one losing an engine."""
    first, second = kernel(), kernel()
    for notebook in (first, second):
        notebook.process.stdin.write('["do", "import nbdist; c = nbdist.start(2)"]\n')
        notebook.process.stdin.flush()
    for notebook in (first, second):
        assert "error" not in notebook.process.stdout.readline()
        notebook.do("c.run('x = rank + 1')")
    first.do("g = c.generation; c.kill(1); c.wait_healthy(after=g)")
    assert second.ask("[c.generation, len(c.incidents), c.pull('x')]") == [1, 0, {"0": 1, "1": 2}]
    assert first.ask("c.pull('x')") == {"0": 1, "1": 2}
    first.do("c.shutdown()")
    total = "c.run('t = torch.ones(1); dist.all_reduce(t); int(t)').values"
    assert second.ask(total) == {"0": 2, "1": 2}
    assert len(of(runtime_root() / second.ask("c.id"))) >= 6


def test_shutdown_is_bounded(cluster, background, until):
    """`shutdown` ends within ten seconds whatever the ranks do: computing, waiting, stopped, or
    ignoring signals."""
    engines = cluster(4)
    code = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    dist.barrier()
while rank == 2:
    pass
while rank == 3:
    sum(range(50_000_000))
"""
    cell = background(engines.run, code)
    until(lambda: "waits in" in engines.status()[1].activity, 60, engines.status)
    path, begun = engines._rundir.path, time.monotonic()
    engines.shutdown()
    assert time.monotonic() - begun <= 10
    assert path not in processes_by_rundir()
    assert not path.exists()
    assert cell.exception(5) is not None
