"""Engines that stand still, and engines that only seem to."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

import nbdist

RANKS = [0, 1, 2, 3]
HANG_TIMEOUT_S = 1.0
HEALTHY_S = HANG_TIMEOUT_S + 4 * 1.5
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"


@pytest.fixture(scope="module")
def start_shared():
    """The cluster that these tests share soon loses patience."""
    return lambda: nbdist.start(4, hang_timeout_s=HANG_TIMEOUT_S)


def test_stopped(four, pids):
    """An engine that is stopped makes no progress: after the limit it is killed and its seat
    filled again."""
    four.run("x = rank * 11")
    known, before, generation = len(four.incidents), pids(four), four.generation
    begun = time.monotonic()
    four.kill(1, signal="STOP")
    four.wait_healthy(after=generation, timeout=20)
    assert HANG_TIMEOUT_S / 2 <= time.monotonic() - begun <= HEALTHY_S
    hung, joined = four.incidents[known:]
    assert (hung.kind, hung.slots, joined.kind) == ("hung", (1,), "joined")
    assert not psutil.pid_exists(before[1])
    assert four.pull("x") == {r: 11 * r for r in RANKS}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_stopped_inside_a_collective(four, lose):
    """The same while the others wait for it, in a group of the user's own too: they are released
    when it is given up, and the cell says why."""
    four.run("sub = dist.new_group([0, 1, 2])")
    known = len(four.incidents)
    collective = "dist.all_reduce(torch.ones(1), group=sub if rank < 3 else None)"
    loss = lose(four, 2, number=signal.SIGSTOP, collective=collective)
    assert HANG_TIMEOUT_S / 2 <= loss.cell_ended_s <= HEALTHY_S
    assert (loss.error.rank, loss.error.signal) == (2, "SIGKILL")
    assert "hung" in loss.error.guess
    assert len(loss.error.notes) == 3
    four.wait_healthy(after=loss.generation)
    assert [i.kind for i in four.incidents[known:]] == ["hung", "joined"]


def test_stopped_for_a_moment(four, pids):
    """torchft's false evictions: one that is stopped for less than the limit is left alone, and
    finishes its cell."""
    generation, found, incidents = four.generation, pids(four), four.incidents
    for _ in range(3):
        os.kill(found[1], signal.SIGSTOP)
        time.sleep(0.3)  # the fault itself
        os.kill(found[1], signal.SIGCONT)
        assert four.run(SUM).values == dict.fromkeys(RANKS, 10)
    assert (four.generation, four.incidents, pids(four)) == (generation, incidents, found)


@pytest.mark.parametrize(
    "work",
    [
        "begun = time.monotonic()\n    while time.monotonic() < begun + 2.5:\n        pass",
        "for _ in range(3):\n        sum(range(100_000_000))",
        "time.sleep(2.5)",
    ],
    ids=["python", "native", "sleep"],
)
def test_busy_is_not_hung(four, pids, work):
    """A rank that computes, holds the interpreter in native code, or sleeps for long, is not taken
    for dead."""
    generation, found, incidents = four.generation, pids(four), four.incidents
    four.run(f"import time\nif rank == 1:\n    {work}\n{SUM}", once=True)
    assert (four.generation, four.incidents, pids(four)) == (generation, incidents, found)


def test_idle_is_not_hung(four, pids):
    """Engines that are not asked anything for longer than the limit are not taken for dead."""
    generation, found, incidents = four.generation, pids(four), four.incidents
    time.sleep(2 * HANG_TIMEOUT_S)  # the fault that must not be seen
    assert (four.generation, four.incidents, pids(four)) == (generation, incidents, found)
