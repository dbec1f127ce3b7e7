"""The journal: what is kept, for whom, how much, and what another supervisor reads of it."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist.protocol.orders import Entry
from nbdist.supervisor import journal as module
from nbdist.supervisor.journal import Journal

LIMIT_S = 30.0


@pytest.fixture
def open_journal(tmp_path):
    """Opens the journal of one cluster, again and again."""
    return lambda: Journal(tmp_path / "journal", LIMIT_S)


@pytest.fixture
def half_a_write(monkeypatch):
    """While it lasts, a file takes half of what is written and then has no space."""

    @contextmanager
    def failing():
        real = Path.open

        def open_badly(path, *args, **kwargs):
            file = real(path, *args, **kwargs)
            return HalfFile(file)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", open_badly)
            yield

    return failing


class HalfFile:
    """A file on a disk that is nearly full."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


def run(journal, cell, *, slots=None, succeeded=True, seconds=1.0, code="f()", **values):
    """A cell from its beginning to its end."""
    journal.begin(Entry(cell=cell, code=code, values=values), slots)
    journal.end(cell, succeeded=succeeded, seconds=seconds)


def cells(journal, position=0, slot=0):
    return [entry.cell for entry in journal.since(position, slot)]


def test_a_new_journal_is_empty(open_journal, tmp_path):
    """Nothing has run, and no file is made before something does."""
    journal = open_journal()
    assert (journal.length, cells(journal)) == (0, [])
    assert list(tmp_path.iterdir()) == []


def test_cells_and_pushes_are_kept_in_the_order_in_which_they_ended(open_journal):
    """Code and values come back as they were sent."""
    journal = open_journal()
    journal.begin(Entry(cell="a", code="x = 1"), None)
    run(journal, "b", code="", lr=b"\x01\x02")
    journal.end("a", succeeded=True, seconds=1.0)
    assert journal.since(0, 5) == (
        Entry(cell="b", code="", values={"lr": b"\x01\x02"}),
        Entry(cell="a", code="x = 1"),
    )


@pytest.mark.parametrize(
    ("outcome", "is_kept"),
    [
        ({"succeeded": True, "seconds": LIMIT_S}, True),
        ({"succeeded": True, "seconds": LIMIT_S + 0.1}, False),
        ({"succeeded": False, "seconds": 1.0}, False),
    ],
)
def test_what_failed_or_took_too_long_is_not_kept(open_journal, outcome, is_kept):
    """A newcomer replays only what ended well within the limit."""
    journal = open_journal()
    run(journal, "a", **outcome)
    assert cells(journal) == (["a"] if is_kept else [])
    assert cells(open_journal()) == cells(journal)


def test_the_end_of_what_never_began_is_ignored(open_journal):
    """Cells that are not replayed are not entered; their end is no entry either."""
    journal = open_journal()
    journal.end("a", succeeded=True, seconds=1.0)
    run(journal, "b")
    journal.end("b", succeeded=True, seconds=1.0)
    assert cells(journal) == ["b"]


def test_a_newcomer_is_given_what_its_slot_ran(open_journal):
    """Cells for some slots go to these alone; cells for all go to every later slot."""
    journal = open_journal()
    run(journal, "all")
    run(journal, "some", slots=(0, 2))
    assert cells(journal, slot=2) == ["all", "some"]
    assert cells(journal, slot=1) == ["all"]
    assert cells(journal, slot=9) == ["all"]


def test_a_forgotten_cell_is_given_to_nobody(open_journal):
    """It keeps its place, so that positions hold, also for who reads the file later."""
    journal = open_journal()
    for cell in ("a", "b", "c"):
        run(journal, cell)
    journal.forget("b")
    for known in (journal, open_journal()):
        assert cells(known) == ["a", "c"]
        assert cells(known, 1) == ["c"]
        assert known.length == 3


def test_positions_go_on_for_every_slot(open_journal):
    """A position counts all entries, also those of other slots."""
    journal = open_journal()
    run(journal, "a", slots=(0,))
    run(journal, "b")
    assert journal.length == 2
    assert cells(journal, 1, slot=1) == ["b"]
    assert cells(journal, 2) == []


def test_the_oldest_entries_go_and_are_counted(open_journal, monkeypatch):
    """The number is bounded; positions stay what they were."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    journal = open_journal()
    for cell in "abcde":
        run(journal, cell)
    assert (journal.num_dropped, journal.length) == (2, 5)
    assert cells(journal) == ["c", "d", "e"]
    assert cells(journal, 1) == ["c", "d", "e"]
    assert cells(journal, 4) == ["e"]


def test_the_size_is_bounded(open_journal, monkeypatch):
    """Large pushes push the oldest out; one that is too large by itself is not kept at all."""
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    journal = open_journal()
    run(journal, "a", code="", x=bytes(60))
    run(journal, "b", code="", x=bytes(60))
    assert cells(journal) == ["b"]
    run(journal, "c", code="", x=bytes(200))
    assert (cells(journal), journal.num_dropped, journal.length) == ([], 3, 3)
    run(journal, "d", code="", x=bytes(60))
    assert cells(journal) == ["d"]


def test_another_supervisor_reads_the_same(open_journal, monkeypatch):
    """Entries, positions and what was dropped; a cell that was open ends there."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    first = open_journal()
    for cell in "abc":
        run(first, cell)
    first.begin(Entry(cell="open", code="g()"), (0,))
    second = open_journal()
    assert (second.num_dropped, second.length) == (1, 3)
    assert second.since(0, 0) == first.since(0, 0)
    second.end("open", succeeded=True, seconds=1.0)
    assert cells(second) == ["c", "open"]
    assert cells(second, slot=1) == ["c"]
    assert cells(open_journal()) == ["c", "open"]


@pytest.mark.parametrize("lost", [1, 3, 20])
def test_a_torn_end_loses_the_last_record_alone(open_journal, tmp_path, lost):
    """The writer was killed in the middle of it: what stands before is read."""
    first = open_journal()
    run(first, "a")
    first.begin(Entry(cell="torn", code="x" * 50), None)
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-lost])
    second = open_journal()
    assert cells(second) == ["a"]
    second.end("torn", succeeded=True, seconds=1.0)
    assert cells(second) == ["a"]


def test_a_torn_length_loses_the_last_record_alone(open_journal, tmp_path):
    """Not even its length was written in full."""
    first = open_journal()
    run(first, "a")
    with (tmp_path / "journal").open("ab") as file:
        file.write(b"\0\0")
    assert cells(open_journal()) == ["a"]


def test_a_long_file_is_written_anew(open_journal, tmp_path, monkeypatch):
    """It is bounded too, holds what is kept and what runs, and nothing else is left behind."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2_000)
    journal = open_journal()
    journal.begin(Entry(cell="open", code="g()"), None)
    for number in range(100):
        run(journal, f"{number}", succeeded=number % 2 == 0)
        assert (tmp_path / "journal").stat().st_size < 2_500
    again = open_journal()
    again.end("open", succeeded=True, seconds=1.0)
    assert cells(again) == ["96", "98", "open"]
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]


def test_positions_stay_when_the_file_is_written_anew(open_journal, monkeypatch):
    """Another supervisor counts on: a newcomer's position still means the same."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1_000)
    first = open_journal()
    for number in range(50):
        run(first, f"{number}")
    second = open_journal()
    assert (second.length, second.num_dropped) == (first.length, first.num_dropped) == (50, 47)
    assert cells(second, 49) == ["49"]


def test_another_supervisor_reads_the_same_whenever_it_comes(open_journal, monkeypatch):
    """Whichever record makes the file too long, what ended well stands in the new one."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1_000)
    first = open_journal()
    for number in range(100):
        run(first, f"{number}")
        second = open_journal()
        assert (second.length, second.num_dropped) == (first.length, first.num_dropped)
        assert cells(second) == cells(first)


def test_a_file_that_cannot_be_written_anew_stays_as_it_is(open_journal, tmp_path, monkeypatch):
    """The disk is full for the new one: the old one goes on, and is read."""
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    (tmp_path / "journal.new").mkdir()  # cannot be written
    journal = open_journal()
    for cell in "abc":
        run(journal, cell)
    assert cells(open_journal()) == ["a", "b", "c"]


def test_a_full_disk_costs_a_successor_the_entry_and_nobody_else_anything(open_journal, tmp_path):
    """The supervisor goes on with what it has in memory."""
    journal = open_journal()
    run(journal, "a")
    (tmp_path / "journal").rename(tmp_path / "kept")
    (tmp_path / "journal").mkdir()  # cannot be written
    run(journal, "b")
    assert cells(journal) == ["a", "b"]


def test_a_write_that_fails_half_way_spoils_nothing(open_journal, half_a_write):
    """The disk was full for a moment: what is written later is read, and what was before."""
    journal = open_journal()
    run(journal, "a")
    with half_a_write():
        journal.begin(Entry(cell="lost", code="x" * 50), None)
    run(journal, "b")
    assert cells(open_journal()) == ["a", "b"]


@pytest.mark.parametrize("lost", [1, 20])
def test_what_is_written_after_a_torn_end_is_read(open_journal, tmp_path, lost):
    """The supervisor that takes over goes on writing: the next one reads all of it."""
    first = open_journal()
    run(first, "a")
    first.begin(Entry(cell="torn", code="x" * 50), None)
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-lost])
    run(open_journal(), "b")
    assert cells(open_journal()) == ["a", "b"]
