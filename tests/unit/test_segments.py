"""Large values in shared memory: as they were, private to who changes them, gone with who keeps
them."""

import errno
import os
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from nbdist import segments as module
from nbdist.engine.namespace import push_again
from nbdist.errors import CellFailed, RankError, SegmentGone
from nbdist.protocol import values
from nbdist.segments import Kept, Segment
from nbdist.session.engine_calls import EngineCalls

SIZE = 3000
"""Numbers of a large value here."""


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Some thousand bytes are large, and more than is written at a time."""
    monkeypatch.setattr(module, "MIN_BYTES", 2000)
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)


@pytest.fixture
def segment():
    made = Segment()
    yield made
    made.close()


def there_and_back(segment, value):
    packed = values.pack(value, segment.lend)
    return values.unpack(packed), len(packed)


TENSORS = {
    "float": torch.arange(SIZE, dtype=torch.float32),
    "bfloat16": torch.arange(SIZE, dtype=torch.bfloat16).reshape(3, 1000),
    "bool": torch.arange(SIZE) % 3 == 0,
    "complex": torch.randn(SIZE, dtype=torch.complex64),
    "wants a gradient": torch.ones(SIZE, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_as_they_were(segment, name):
    """Type, shape, values, and whether they want a gradient; the message holds none of it."""
    sent = TENSORS[name]
    got, num_bytes = there_and_back(segment, sent)
    assert (got.dtype, got.shape, got.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
    assert torch.equal(got, sent)
    assert num_bytes < 1000 < segment.num_bytes


@pytest.mark.parametrize("dtype", ["f4", ">i8", "M8[s]", [("a", "i4"), ("b", "f8")]])
def test_arrays_are_as_they_were(segment, dtype):
    """Of any type whose values lie in the array itself."""
    sent = np.arange(SIZE).astype(dtype).reshape(30, -1)
    got, num_bytes = there_and_back(segment, sent)
    assert got.dtype == sent.dtype
    np.testing.assert_array_equal(got, sent)
    assert num_bytes < 1000
    assert got.flags.writeable


def test_large_values_inside_of_others(segment):
    """A model's state, a module, a list; one object that comes twice is one again."""
    layer = torch.nn.Linear(60, 60)
    sent = {
        "state": OrderedDict(layer.state_dict()),
        "layer": layer,
        "twice": [TENSORS["float"]] * 2,
    }
    got, num_bytes = there_and_back(segment, sent)
    assert torch.equal(got["state"]["weight"], layer.weight)
    assert torch.equal(got["layer"](torch.ones(60)), layer(torch.ones(60)))
    assert got["twice"][0] is got["twice"][1]
    assert isinstance(got["layer"].weight, torch.nn.Parameter)
    assert num_bytes < SIZE * 4


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(10),
        torch.ones(SIZE, 2).T,
        torch.ones(SIZE, dtype=torch.complex64).conj(),
        np.ones(10),
        np.asfortranarray(np.ones((SIZE, 2))),
        np.array([None] * SIZE),
        "text" * SIZE,
    ],
    ids=["small tensor", "turned", "conj", "small array", "Fortran", "objects", "text"],
)
def test_what_stays_in_the_message(segment, value):
    """What is small, and what is more than a row of bytes."""
    there_and_back(segment, value)
    assert (segment.num_bytes, segment.reason) == (0, "")


def test_changes_are_ones_own(segment):
    """pitfall ipyparallel#129, #250, #748, and read-only arrays: each who maps it may change its
    part, and nobody else sees it; what was sent is changed by nothing either."""
    sent = torch.zeros(SIZE)
    packed = values.pack(sent, segment.lend)
    segment.seal()
    one, other = values.unpack(packed), values.unpack(packed)
    one += 1
    sent.fill_(7)
    assert (one.sum().item(), other.sum().item()) == (SIZE, 0)
    assert values.unpack(packed).sum().item() == 0


def test_a_segment_is_its_users_alone_and_sealed(segment):
    """Mode 0600, no file anywhere; once it is sealed nobody writes, shortens or lengthens it."""
    values.pack(TENSORS["float"], segment.lend)
    segment.seal()
    assert stat.S_IMODE(os.fstat(segment._fd).st_mode) == 0o600
    assert str(Path(f"/proc/self/fd/{segment._fd}").readlink()).startswith("/memfd:nbdist-")
    for change in (lambda fd: os.pwrite(fd, b"x", 0), lambda fd: os.ftruncate(fd, 1)):
        with pytest.raises(PermissionError):
            change(segment._fd)


def test_what_is_kept_no_longer(segment, monkeypatch):
    """Who has mapped it keeps it; who comes later is told what to do, also where another file has
    its number."""
    packed = values.pack(TENSORS["float"], segment.lend)
    got = values.unpack(packed)
    segment.close()
    segment.close()
    with pytest.raises(SegmentGone, match=r"cannot be reached.*Push the name again"):
        values.unpack(packed)
    with Path(os.devnull).open() as other:
        monkeypatch.setattr(module.os, "open", lambda *_: os.dup(other.fileno()))
        with pytest.raises(SegmentGone, match="another file"):
            values.unpack(packed)
    assert torch.equal(got, TENSORS["float"])


def test_no_room(segment, monkeypatch):
    """Where shared memory ends in the middle of a value, it goes in the message, and that is
    told."""
    write, calls = os.pwrite, []

    def fail_late(fd, data, at):
        calls.append(at)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", fail_late)
    got, num_bytes = there_and_back(segment, TENSORS["float"])
    assert torch.equal(got, TENSORS["float"])
    assert num_bytes > 4 * SIZE
    assert "No space left" in segment.reason
    assert "in messages" in segment.reason


def test_no_memory_without_a_name(segment, monkeypatch):
    """A system that has none of its kind sends in messages, and says so."""
    monkeypatch.delattr(os, "memfd_create")
    got, _ = there_and_back(segment, TENSORS["float"])
    segment.seal()
    assert torch.equal(got, TENSORS["float"])
    assert "none without a name" in segment.reason


def test_so_much_is_kept(monkeypatch):
    """The newest always, older ones within the bound."""
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2 * 4 * SIZE + 8192)
    kept, packed = Kept(), []
    for _ in range(3):
        segment = Segment()
        packed.append(values.pack(TENSORS["float"], segment.lend))
        kept.add(segment)
    with pytest.raises(SegmentGone):
        values.unpack(packed[0])
    assert all(torch.equal(values.unpack(one), TENSORS["float"]) for one in packed[1:])
    kept.close()
    assert kept.num_bytes == 0
    with pytest.raises(SegmentGone):
        values.unpack(packed[2])


def test_a_name_pushed_again_is_not_missed(segment):
    """In a replay, what is gone is told, unless the name is bound by a later push."""
    gone = Segment()
    lost = values.pack_named({"x": TENSORS["float"], "y": TENSORS["bool"]}, gone.lend)
    gone.close()
    failed, bound = {}, {}
    bind = lambda packed: bound.update({n: values.unpack(d) for n, d in packed.items()})  # noqa: E731
    push_again(bind, {"z": values.pack(1), **lost}, failed)
    assert bound == {"z": 1}
    assert set(failed) == {"x", "y"}
    push_again(bind, values.pack_named({"x": TENSORS["float"]}, segment.lend), failed)
    assert list(failed) == ["y"]
    assert "push of y: SegmentGone" in failed["y"]


class Ranks:
    """Cells, engine client and membership in one: what each push was, and what became of it."""

    def __init__(self, error=None):
        self.error, self.got, self.ended = error, [], []
        self.ranks, self.membership, self.members = (), self, {}
        self.raise_if_ended = None

    def begin(self, *_, **__):
        return self

    def end(self, _, *, succeeded):
        self.ended.append(succeeded)

    def call(self, _engines, _function, packed, **_):
        self.got.append(sum(map(len, packed.values())))
        if self.error is not None and self.got[-1] < 4 * SIZE:
            raise CellFailed("rank 1 failed", {1: RankError(1, self.error, "of no use")})
        return {}


def test_engines_that_do_not_reach_it():
    """Those of another host, say, are sent messages from then on, and the user is told why."""
    ranks = Ranks("SegmentGone")
    calls = EngineCalls(ranks, ranks)
    calls.push(None, {"x": TENSORS["float"]})
    calls.push(None, {"x": TENSORS["float"]})
    assert ranks.ended == [False, True, True]
    assert [got > 4 * SIZE for got in ranks.got] == [False, True, True]
    assert "in messages from now on" in calls.notes[0]


def test_another_failure_of_a_push_is_the_callers():
    """It is raised as it is, and nothing is kept."""
    ranks = Ranks("WrongState")
    calls = EngineCalls(ranks, ranks)
    with pytest.raises(CellFailed, match="rank 1"):
        calls.push(None, {"x": TENSORS["float"]})
    assert (ranks.ended, calls.notes, calls._kept.num_bytes) == ([False], [], 0)


def test_what_was_pushed_is_kept_until_the_end():
    """For engines that come later; a push of small values keeps nothing."""
    ranks = Ranks()
    calls = EngineCalls(ranks, ranks)
    calls.push(None, {"x": 1})
    assert calls._kept.num_bytes == 0
    calls.push(None, {"x": TENSORS["float"]})
    assert calls._kept.num_bytes == 4 * SIZE
    assert calls.notes == []
    calls.close()
    assert calls._kept.num_bytes == 0
