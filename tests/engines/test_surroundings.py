"""A cluster that is started among things that have led others astray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

import pytest

import nbdist

RANKS = [0, 1, 2, 3]
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
NO_SUCH_HOST = "no-such-host.invalid"
CLONE_NEWUTS = 0x04000000
"""unshare(2): a hostname of one's own."""
MISLEADING = {
    "GLOO_SOCKET_IFNAME": "^lo", "HOSTNAME": NO_SUCH_HOST, "TP_SOCKET_IFNAME": "eth99",
    "RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1", "MY_VARIABLE": "as it was",
}  # fmt: skip


@contextlib.contextmanager
def misleading_hostname():
    """For what this thread starts meanwhile, the host has another name; where that is permitted."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    with Path("/proc/thread-self/ns/uts").open() as own:
        is_permitted = libc.unshare(CLONE_NEWUTS) == 0
        try:
            if is_permitted:
                socket.sethostname(NO_SUCH_HOST)
            yield
        finally:
            if is_permitted:
                assert libc.setns(own.fileno(), CLONE_NEWUTS) == 0


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory):
    """The cluster that these tests share is started among all of it, and it is all gone then."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "beside.py").write_text("answer = 42\n")
    for name in ("python", "python3", "ipengine", "ipcontroller"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)

    def start():
        with pytest.MonkeyPatch.context() as patch, socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", 29500))
                taken.listen()
            except OSError:
                pass  # taken by somebody else: just as well
            for name, value in MISLEADING.items():
                patch.setenv(name, value)
            patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            with misleading_hostname():
                return nbdist.start(4)

    return start


def test_taken_port(four):
    """accelerate#74, #508, #3245, snowfall#152, Ddip: torch's usual port 29500 may be taken."""
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_interface_and_hostname(four):
    """pytorch PR#26166, gloo#40, horovod#2852, aws-do-eks PR#51: neither NCCL's way of excluding an
    interface nor a hostname that does not resolve keeps gloo from loopback, for the user's own
    groups too."""
    four.run("sub = dist.new_group([0, 1, 2, 3]); dist.barrier(sub)")
    if {s.host for s in four.status()} == {socket.gethostname()}:
        pytest.skip("the hostname is as it was: changing it is not permitted here")
    assert {s.host for s in four.status()} == {NO_SUCH_HOST}


def test_torchrun_variables(four):
    """What a scheduler or a launcher left in the environment is not taken for nbdist's."""
    code = "(dist.get_rank(), dist.get_world_size(), local_rank)"
    assert four.run(code).values == {r: (r, 4, r) for r in RANKS}


def test_other_python_on_the_path(four):
    """ipyparallel#880: engines run the kernel's own interpreter, whatever comes first on PATH."""
    values = four.run("import sys; (sys.executable, sys.version)").values
    assert set(values.values()) == {(sys.executable, sys.version)}


def test_newcomer(four):
    """Engines share the kernel's folder, variables and module path as they were at the start, and
    so does a newcomer, though the kernel's have changed since."""
    assert os.environ.get("MY_VARIABLE") is None
    generation = four.generation
    four.kill(1)
    four.wait_healthy(after=generation)
    code = "import os, beside; (os.path.basename(os.getcwd()), os.environ['MY_VARIABLE'])"
    values = four.run(code).values
    assert len({v[0] for v in values.values()}) == 1
    assert {v[1] for v in values.values()} == {"as it was"}
    assert four.run("beside.answer").values == dict.fromkeys(RANKS, 42)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
