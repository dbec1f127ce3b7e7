"""`nbdist ps` and `nbdist clean` on real clusters: leftovers go, everything else stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from nbdist.cli import main
from nbdist.processes import processes_by_rundir


@pytest.fixture
def worker(tmp_path):
    """A stranger's process with a name that clean-ups by name go for."""
    script = tmp_path / "worker.py"
    script.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(120)\n")
    process = subprocess.Popen(
        [sys.executable, str(script), "nbdist.engine", "ipengine"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()


def listed(capsys):
    capsys.readouterr()
    assert main(["ps", "--json"]) == 0
    return {c["id"]: c for c in json.loads(capsys.readouterr().out)}


def test_strangers_survive(cluster, worker, capsys):
    """nbdistributed, ipyparallel PR#571: a foreign `worker.py` survives a shutdown, a clean-up, and
    another cluster's end."""
    engines = cluster(2)
    assert main(["clean"]) == 0
    assert "alive" in capsys.readouterr().out
    assert engines.run("rank").values == {0: 0, 1: 1}
    engines.shutdown()
    assert main(["clean"]) == 0
    assert worker.poll() is None


def test_list(cluster, kernel, capsys):
    """`nbdist ps` lists this user's clusters with owner, supervisor and processes; a clean-up
    leaves living ones alone."""
    notebook = kernel()
    path = notebook.start(1)
    engines = cluster(1)
    found = listed(capsys)
    assert set(found) == {path.name, engines.id}
    assert found[path.name]["owner_pid"] == notebook.pid
    assert found[engines.id]["owner_pid"] == os.getpid()
    assert found[engines.id]["supervisor_pid"] == engines._link._supervisor.pid
    assert {c["state"] for c in found.values()} == {"owned"}
    assert engines.status()[0].pid in found[engines.id]["pids"]
    assert main(["clean"]) == 0
    assert set(listed(capsys)) == {path.name, engines.id}
    assert notebook.ask("c.run('rank').values") == {"0": 0}


def test_leftovers(kernel, cluster, worker, capsys):
    """ipyrad#95, #333, slide2vec PR#131: a cluster whose kernel and supervisor were killed does not
    disturb a start beside it; then `nbdist clean` ends it at once, folder and all, and nothing
    else."""
    notebook = kernel()
    path = notebook.start(2, lease_s=60.0)  # longer than the start beside it takes
    supervisor = listed(capsys)[path.name]["supervisor_pid"]
    os.kill(notebook.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    notebook.process.wait(60)
    assert listed(capsys)[path.name]["state"] == "left over"
    engines = cluster(1)
    assert engines.run("rank").values == {0: 0}
    assert processes_by_rundir().get(path)
    assert main(["clean"]) == 0
    assert path not in processes_by_rundir()
    assert not path.exists()
    assert list(listed(capsys)) == [engines.id]
    assert engines.run("rank").values == {0: 0}
    assert worker.poll() is None
