"""For all tests: a runtime folder of this session's own, at whose end nothing may be left in it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from nbdist.processes import end_processes, processes_by_rundir

GONE_LIMIT_S = 10.0


def pytest_configure():
    """Who starts tests in the background may have interrupts ignored; some tests press Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder():
    """No cluster outside this session is seen or touched, and none of its own outlives it."""
    folder = Path(tempfile.mkdtemp(prefix="nbd-", dir="/tmp"))  # short: it holds sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same engines on every machine
        for name in ("NBDIST_RUNDIR", "NBDIST_NO_FORK", "GLOO_SOCKET_IFNAME"):
            patch.delenv(name, raising=False)
        yield folder
        left = {
            str(path): [f"{p.pid} {' '.join(p.cmdline()[:4])}" for p in processes]
            for path, processes in processes_by_rundir().items()
        }
        folders = sorted(map(str, (folder / "nbdist").glob("*")))
        for path in {*left, *folders}:
            end_processes(Path(path), timeout_s=GONE_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes outlive the tests: {left}"
    assert not folders, f"folders of clusters outlive the tests: {folders}"
    assert os.environ.get("XDG_RUNTIME_DIR") != str(folder)
