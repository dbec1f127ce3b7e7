"""Large values pushed to engines: there once for all of them, and gone with their processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import torch

SIZE = 16 * 2**20
"""Numbers of the value: 64 MiB."""

LEASE_S = 6.0

LOOK = """
def look(value):
    '''Of the mapping that holds a tensor: its name, how much of it is in use, in KiB, and how much
    this process has copied.'''
    address, found = value.data_ptr(), {}
    for line in open('/proc/self/smaps'):
        words = line.split()
        if '-' in words[0]:
            low, high = (int(end, 16) for end in words[0].split('-'))
            is_it = low <= address < high
            if is_it:
                found['name'] = words[5]
        elif is_it and words[0] in ('Rss:', 'Anonymous:'):
            found[words[0]] = int(words[1])
    return found
"""


def test_one_copy_for_all(cluster):
    """ipyparallel#129, #250, #748: all engines map the same memory; each has what it changes for
    itself; an engine that takes another's seat has it too, and nothing is said to be missing."""
    engines = cluster(2)
    sent = torch.arange(SIZE, dtype=torch.float32)
    engines.push(big=sent)
    sent.zero_()
    assert not [note for note in engines.warnings if "pushed" in note]
    total = float(torch.arange(SIZE, dtype=torch.float64).sum())
    sums = "float(big.sum(dtype=torch.float64))"
    assert engines.run(sums, once=True).values == {0: total, 1: total}
    engines.run(LOOK)
    for seen in engines.run("look(big)", once=True).values.values():
        assert "memfd:nbdist-" in seen["name"]
        assert seen["Rss:"] > SIZE * 2 // 1024
        assert seen["Anonymous:"] == 0
    assert engines.run("big[7] = -rank; float(big[7])", once=True).values == {0: 0.0, 1: -1.0}
    engines.push(big=torch.arange(SIZE, dtype=torch.float32), small=1)
    generation = engines.generation
    engines.kill(1)
    engines.wait_healthy(after=generation, timeout=60)
    assert engines.run(sums, once=True).values == {0: total, 1: total}
    assert not engines.status()[1].not_restored


def test_nothing_is_left_of_a_killed_kernel(kernel, until):
    """Whoever is killed: when the last process has ended, the memory is gone with it."""
    notebook = kernel()
    folder = notebook.start(2, lease_s=LEASE_S)
    notebook.do(f"import torch; c.push(big=torch.ones({SIZE}))")
    notebook.do(f"c.run({LOOK!r}); name = c.run(\"look(big)['name']\").values[0]")
    name = Path(notebook.ask("name")).name.split()[0]
    assert sum(holds(process, name) for process in psutil.process_iter()) == 3
    os.kill(notebook.pid, signal.SIGKILL)
    until(
        lambda: not any(holds(process, name) for process in psutil.process_iter()),
        60,
        "the processes that held the segment ended",
    )
    until(lambda: not folder.exists(), 60, "the cluster's folder is removed")


def holds(process, name):
    """Whether a process has a segment open or maps it."""
    folder = Path(f"/proc/{process.pid}")
    try:
        opened = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
        return name in (folder / "maps").read_text() or any(name in path for path in opened)
    except OSError:  # it has ended, or ends
        return False
