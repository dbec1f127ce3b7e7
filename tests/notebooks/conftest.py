"""Commands that run notebooks, with kernels that find this package; none of their processes stays.

Fixtures:
    command: runs a Python module with arguments, in an empty folder, until it has ended.
    copy: a copy of a tutorial in that folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "notebooks"
COMMAND_LIMIT_S = 160
"""Four times what a tutorial may take."""
GONE_LIMIT_S = 10.0
LOOK_S = 1.0
NUM_ENGINES = 3
"""Of a tutorial; the least."""
MARK = "NBDIST_TEST_MARK"


def marked(value):
    """The processes that have the mark in their environment: the command's, and all they began."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline()[:5])}")
        except psutil.Error:  # it has ended meanwhile, or is another user's
            continue
    return found


@pytest.fixture
def copy(tmp_path):
    """`copy(name)`: the tutorial, where a command may write."""
    return lambda name: Path(shutil.copy(TUTORIALS / name, tmp_path))


@pytest.fixture
def command(tmp_path):
    """`command(module, *arguments)`: run it. Afterwards no process of it is left."""
    mark = uuid.uuid4().hex
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + COMMAND_LIMIT_S
        said = None
        while said is None:
            try:
                said, _ = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                seen.update(marked(mark))
                if time.monotonic() > deadline:
                    process.kill()
                    said, _ = process.communicate()
        assert process.returncode == 0, said

    seen = set()
    yield run
    # Were its engines not found while it ran, finding none afterwards would mean nothing.
    assert len(seen) > NUM_ENGINES
    deadline = time.monotonic() + GONE_LIMIT_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes outlive the command: {left}"
