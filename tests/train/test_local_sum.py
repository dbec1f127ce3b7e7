"""Sums through memory that ranks share: the same bits everywhere, in the order of ranks, and who
waits for a rank that is gone is told."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from regression import make

from nbdist.engine import arena
from nbdist.engine import local_sum as module
from nbdist.engine.local_sum import LOCAL_SUM
from nbdist.engine.works import WORKS
from nbdist.protocol.ids import EngineId, Generation, Slot
from nbdist.protocol.topology import Member, Membership
from nbdist.train import DataParallel


def meet(rank, generation=1, **changes):
    """Join the generation of all ranks that there are; whether they share memory."""
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    host = os.uname().nodename
    members = tuple(
        Member(**{"slot": Slot(r), "engine_id": EngineId(r), "pid": pid, "host": host} | changes)
        for r, pid in enumerate(pids)
    )
    LOCAL_SUM.begin(Membership(generation=Generation(generation), members=members), rank)
    return LOCAL_SUM.agree()


def numbers(rank, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator, dtype=dtype)


def in_order(num, size, dtype=torch.float32):
    """What the ranks' numbers are together, added rank by rank."""
    total = numbers(0, size, dtype)
    for rank in range(1, num):
        total = total + numbers(rank, size, dtype)
    return total


PIECE = module.PIECE_BYTES // 4
SIZES = [1, 2, 7, 1000, PIECE, PIECE + 1, 3 * PIECE - 5]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_the_same_bits_in_the_order_of_ranks(together, num):
    """Of any size, fewer numbers than ranks and several pieces; in both types; one after the
    other through the same places."""

    def body(rank):
        assert meet(rank)
        for size in [*SIZES, *reversed(SIZES)]:
            for dtype in (torch.float32, torch.float64):
                mine = numbers(rank, size, dtype)
                LOCAL_SUM.sum_(mine)
                assert torch.equal(mine, in_order(num, size, dtype)), (size, dtype)
        LOCAL_SUM.sum_(torch.zeros(0))
        return True

    assert together(num, body) == [True] * num


def test_what_is_no_number_stays_none(together):
    """Infinities and NaN are summed as numbers are, in a tensor of any shape."""

    def body(rank):
        assert meet(rank)
        mine = torch.tensor([[1.0, float("inf")], [float("nan"), -1.0]])
        LOCAL_SUM.sum_(mine)
        return mine.tolist()

    for got in together(2, body):
        np.testing.assert_equal(got, [[2.0, float("inf")], [float("nan"), -2.0]])


def test_what_is_taken():
    """Numbers of two types on the CPU, end to end."""
    takes = {
        name: LOCAL_SUM.takes(tensor)
        for name, tensor in {
            "float32": torch.ones(3),
            "float64": torch.ones(3, dtype=torch.float64),
            "bfloat16": torch.ones(3, dtype=torch.bfloat16),
            "int64": torch.ones(3, dtype=torch.int64),
            "turned": torch.ones(3, 2).T,
            "elsewhere": torch.ones(3, device="meta"),
        }.items()
    }
    assert [name for name, is_taken in takes.items() if is_taken] == ["float32", "float64"]


def opened():
    """Memory of ours that this process has open."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            names.append(str(entry.readlink()))
    return [name for name in names if "nbdist-sum" in name]


def test_one_generation_after_the_other(together):
    """Each has memory of its own, and leaves nothing open; a sum between two is refused."""

    def body(rank):
        for generation in range(1, 4):
            assert meet(rank, generation)
            mine = numbers(rank, 100)
            LOCAL_SUM.sum_(mine)
            assert torch.equal(mine, in_order(2, 100))
            assert set(opened()) == {
                f"/memfd:nbdist-sum-{generation}-{r} (deleted)" for r in range(2)
            }
            dist.barrier()
            LOCAL_SUM.end()
            with pytest.raises(dist.DistNetworkError, match="parted"):
                LOCAL_SUM.sum_(mine)
        return opened()

    assert together(2, body) == [[]] * 2


def nobody_shares(rank, monkeypatch, change):
    with monkeypatch.context() as patch:
        change(patch, rank)
        return meet(rank), LOCAL_SUM._arena


def fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, rank: patch.setattr(os, "posix_fallocate", fail) if rank == 1 else None,
        lambda patch, rank: patch.setattr(os, "pidfd_open", fail) if rank == 1 else None,
        lambda patch, _: patch.delattr(os, "memfd_create"),
        lambda patch, _: patch.setattr(arena.platform, "machine", lambda: "aarch64"),
    ],
    ids=["no room", "no sight", "no such memory", "another machine"],
)
def test_all_share_or_none(together, monkeypatch, caplog, change):
    """Where one rank cannot, all sum over gloo, and the log says why."""

    def body(rank):
        found = nobody_shares(rank, monkeypatch, change)
        return found, "summed over gloo" in caplog.text

    assert together(2, body) == [((False, None), True)] * 2


def test_ranks_of_several_hosts_do_not(together):
    """They know it without a word to one another, and so does a rank alone."""

    def body(rank):
        return meet(rank, host=f"host-{rank}")

    assert together(2, body) == [False, False]
    LOCAL_SUM.begin(Membership(generation=Generation(1), members=()), 0)
    assert not LOCAL_SUM.agree()


def test_who_has_ended_is_named(together):
    """A process of a rank that has ended frees who waits for it, with an error that says who it
    was; and so does the next sum."""

    def body(rank):
        assert meet(rank)
        if rank == 0:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            LOCAL_SUM._arena._processes[os.pidfd_open(pid)] = 1
            for text in ("rank 1 has ended in a sum", "parted in a sum"):
                with pytest.raises(dist.DistNetworkError, match=text):
                    LOCAL_SUM.sum_(torch.ones(10))
            os.waitpid(pid, 0)
        dist.barrier()
        return True

    assert together(2, body) == [True, True]


def test_a_cut_frees_who_waits(together):
    """As with gloo: who waits for a rank that does not come is freed when the group is cut."""

    def body(rank):
        assert meet(rank)
        if rank == 0:
            threading.Timer(0.2, WORKS.give_up).start()
            with pytest.raises(RuntimeError, match="cut"):
                LOCAL_SUM.sum_(torch.ones(10))
        dist.barrier()
        return True

    assert together(2, body) == [True, True]


def test_who_comes_late_is_waited_for(together):
    """Longer than others look for it."""

    def body(rank):
        assert meet(rank)
        for late in (0, 1):
            if rank == late:
                time.sleep(15 * module.LOOK_S)  # what is tried: past a peer's own looking
            mine = numbers(rank, 2 * PIECE)
            LOCAL_SUM.sum_(mine)
            assert torch.equal(mine, in_order(2, 2 * PIECE))
        return True

    assert together(2, body) == [True, True]


def trained(together, num, *, is_local, **settings):
    """Losses and digest of 22 steps of AdamW, in several buckets; how many sums went which way."""

    def body(rank):
        shared = is_local and meet(rank)
        sums, sum_ = [], LOCAL_SUM.sum_
        LOCAL_SUM.sum_ = lambda tensor: (sums.append(len(tensor)), sum_(tensor))
        trainer = make(strategy=DataParallel(bucket_mb=0.005, **settings))
        losses = trainer.fit(22)["loss"].tolist()
        return shared, losses, trainer.digest(), len(sums)

    answers = together(num, body)
    assert len({digest for _, _, digest, _ in answers}) == 1
    return answers[0]


def test_training_is_that_over_gloo(together):
    """On 2 ranks bit by bit, on 3 but for the order of sums; each step sums all its buckets so."""
    _, over_gloo, digest, none = trained(together, 2, is_local=False)
    shared, losses, same, num_sums = trained(together, 2, is_local=True)
    assert (shared, losses, same) == (True, over_gloo, digest)
    assert none == 0
    assert num_sums >= 22
    _, three, _, _ = trained(together, 3, is_local=True)
    assert three == pytest.approx(over_gloo, rel=1e-5)


@pytest.mark.parametrize("settings", [{"shared_memory": False}, {"compress": "fp16"}])
def test_a_user_can_say_no(together, settings):
    """Then gradients go over gloo, as they do where they are compressed."""
    assert trained(together, 2, is_local=True, **settings)[3] == 0
