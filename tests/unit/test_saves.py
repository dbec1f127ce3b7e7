"""The supervisor's part in a checkpoint: it commits what all have written, and nothing else."""

import time

import pytest

from nbdist import checkpoints
from nbdist.protocol import orders as od
from nbdist.protocol import saves as sv
from nbdist.supervisor import saves
from nbdist.supervisor.saves import Saves

PIDS = (101, 102)


@pytest.fixture
def partial(tmp_path):
    return checkpoints.begin(tmp_path / "runs", step=7, generation=2)


@pytest.fixture
def alive():
    """Which processes are there."""
    return {*PIDS}


@pytest.fixture
def book(alive):
    made = Saves(lambda pid: pid in alive)
    yield made
    made.close()


def order(partial, **more):
    return sv.CommitSave(partial=str(partial), step=7, generation=2, pids=PIDS, **more)


def write(partial, rank):
    folder = partial / checkpoints.part_name(rank)
    folder.mkdir()
    (folder / "data").write_text(f"of {rank}")
    checkpoints.acknowledge(partial, folder.name)


def failure(partial, kind="FileUnwritable", message="no room"):
    return sv.PartFailed(slot=1, pid=102, partial=str(partial), kind=kind, message=message)


def answers(book, num=1):
    """So many, within a generous time."""
    found, deadline = [], time.monotonic() + 20
    while len(found) < num:
        assert time.monotonic() < deadline
        found += book.answered()
        time.sleep(0.005)
    return found


def test_it_is_committed_when_all_have_written(book, partial):
    """Not before; and who asks is told where it is."""
    write(partial, 0)
    book.take("kernel", order(partial))
    assert book.answered() == []
    assert partial.exists()
    write(partial, 1)
    ((who, done),) = answers(book)
    assert who == "kernel"
    found = checkpoints.newest(partial.parent)
    assert (done.folder, done.num_bytes) == (str(found.path), found.manifest.num_bytes)
    assert found.manifest.step == 7
    assert found.manifest.parts == ("rank-0", "rank-1")


def test_asked_twice_it_is_done_once(book, partial):
    """By the kernel that has lost its supervisor, or by another one, afterwards too."""
    book.take("a", order(partial))
    book.take("b", order(partial))
    write(partial, 1)
    write(partial, 0)
    told = answers(book, 2)
    assert {who for who, _ in told} == {"a", "b"}
    book.take("c", order(partial))
    ((_, again),) = answers(book)
    assert again == told[0][1]
    assert len([p for p in partial.parent.iterdir() if p.is_dir()]) == 1


def refused(book):
    ((_, answer),) = answers(book)
    assert isinstance(answer, od.Refused)
    return answer


def test_an_engine_that_ends_takes_it_along(book, partial, alive):
    """It is said which rank, and nothing of it is left."""
    write(partial, 0)
    book.take("kernel", order(partial))
    alive.discard(102)
    answer = refused(book)
    assert answer.kind == "SaveAbandoned"
    assert answer.message.startswith("step 7 is not saved: rank 1 ended while writing. Earlier")
    assert not list(partial.parent.iterdir())


def test_an_engine_that_ends_after_its_receipt_does_not(book, partial, alive):
    """What it wrote is on disk."""
    write(partial, 0)
    write(partial, 1)
    alive.clear()
    book.take("kernel", order(partial))
    ((_, done),) = answers(book)
    assert isinstance(done, sv.SaveCommitted)


@pytest.mark.parametrize("is_early", [True, False])
def test_an_engine_that_cannot_write_ends_it(book, partial, is_early):
    """Told before the kernel asks, or after."""
    if is_early:
        book.failed(failure(partial))
    book.take("kernel", order(partial))
    if not is_early:
        book.failed(failure(partial))
    assert refused(book) == od.Refused(kind="FileUnwritable", message="no room")
    assert not partial.exists()


def test_faults_that_nobody_asks_for_are_not_kept_for_ever(book):
    """The oldest go."""
    for number in range(3 * saves.MAX_FAULTS):
        book.failed(failure(f"x{number}"))
    assert len(book._faults) == saves.MAX_FAULTS


def test_a_disk_that_fails_at_the_manifest_is_named(book, partial, monkeypatch):
    """As it is where an engine writes."""
    write(partial, 0)
    write(partial, 1)

    def full(*_):
        raise OSError(28, "No space left on device", "/x/manifest.json")

    monkeypatch.setattr(checkpoints, "_write", full)
    book.take("kernel", order(partial))
    answer = refused(book)
    assert answer.kind == "FileUnwritable"
    assert "/x/manifest.json: No space left on device (ENOSPC)" in answer.message
    assert not partial.exists()


def test_one_that_was_given_up_is_not_waited_for(book, partial):
    """A kernel may ask for it again, when its first answer was lost."""
    checkpoints.discard(partial)
    book.take("kernel", order(partial))
    assert refused(book).kind == "FileUnwritable"


def test_a_cluster_that_ends_gives_it_up(partial):
    """Its folder is gone then."""
    book = Saves(lambda _: True)
    book.take("kernel", order(partial))
    book.close()
    assert refused(book).kind == "SaveAbandoned"
    assert not partial.exists()
