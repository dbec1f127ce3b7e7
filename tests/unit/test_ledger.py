"""The ledger: the last whole line counts."""

from __future__ import annotations

import errno

import pytest

from nbdist.protocol.orders import WorldView
from nbdist.protocol.story import ROWS
from nbdist.protocol.topology import EMPTY
from nbdist.supervisor import ledger as module
from nbdist.supervisor.ledger import Ledger, StepLedger


def view(reason, **more):
    """A world that differs from others by its reason."""
    return WorldView(
        phase="starting",
        membership=EMPTY,
        seats=(),
        size=2,
        num_formed=0,
        healthy=False,
        reason=reason,
        incidents=(),
        **more,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def test_a_new_ledger_has_no_last_line(path):
    """Nothing to take up."""
    assert Ledger(path).last() is None


def test_the_last_line_is_the_world(path):
    """Another supervisor reads the newest view, with everything in it."""
    ledger = Ledger(path)
    for reason in ("a", "b", "c"):
        ledger.append(view(reason, notes=("slow",)))
    assert Ledger(path).last() == view("c", notes=("slow",))


def test_equal_views_are_written_once(path):
    """A line equal to the last is left out; one that was there before is written again."""
    ledger = Ledger(path)
    for reason in ("a", "a", "b", "a"):
        ledger.append(view(reason))
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("lost", [1, 2, 60])
def test_a_torn_line_is_passed_over(path, lost):
    """The writer was killed in the middle of a line: the last whole one counts."""
    ledger = Ledger(path)
    ledger.append(view("a"))
    ledger.append(view("b"))
    path.write_bytes(path.read_bytes()[:-lost])
    assert Ledger(path).last() == view("b" if lost == 1 else "a")


def test_what_is_not_a_view_is_passed_over(path):
    """Lines of something else are no world."""
    Ledger(path).append(view("a"))
    with path.open("ab") as file:
        file.write(b'{"type": "Ping"}\n\xff\xfe\n\n')
    assert Ledger(path).last() == view("a")


def test_a_ledger_without_a_whole_line_has_no_last_one(path):
    """As good as new."""
    path.write_bytes(b'{"type": "Wor')
    assert Ledger(path).last() is None


@pytest.mark.parametrize("lost", [1, 60])
def test_what_is_written_after_a_torn_line_is_read(path, lost):
    """The supervisor that takes over goes on writing: its line is not spoilt by the torn one."""
    Ledger(path).append(view("a"))
    Ledger(path).append(view("b"))
    path.write_bytes(path.read_bytes()[:-lost])
    Ledger(path).append(view("c"))
    assert Ledger(path).last() == view("c")


def test_a_full_disk_costs_a_successor_the_line_and_nobody_else_anything(tmp_path):
    """The supervisor goes on."""
    (tmp_path / "ledger").mkdir()  # cannot be written
    Ledger(tmp_path / "ledger").append(view("a"))


def test_a_write_that_fails_half_way_spoils_nothing(path, monkeypatch):
    """The disk was full for a moment: the next line is whole, even if the world is the same."""
    ledger = Ledger(path)
    ledger.append(view("a"))

    def write_half(line):
        with path.open("ab") as file:
            file.write(line[: len(line) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_write", write_half)
        ledger.append(view("b"))
    ledger.append(view("b"))
    assert Ledger(path).last() == view("b")


def test_a_long_ledger_is_begun_anew_with_its_last_line(path, monkeypatch):
    """The file is bounded, and nothing is lost that a supervisor reads."""
    monkeypatch.setattr(module, "MAX_BYTES", 2_000)
    ledger = Ledger(path)
    for number in range(100):
        ledger.append(view(f"{number}"))
        assert path.stat().st_size < 2_000 + 500
        assert Ledger(path).last() == view(f"{number}")
    assert [p.name for p in path.parent.iterdir()] == ["ledger"]


# ---- committed steps


class Folder:
    """A run directory, as far as the ledger looks at it."""

    def __init__(self, path):
        self.path = path

    def file(self, name):
        return self.path / name


ROW = ROWS.itemsize


def test_rows_are_read_as_they_were_written(tmp_path):
    """Of each run its own; nothing of one that has none."""
    steps = StepLedger(Folder(tmp_path))
    steps.append("a", b"1" * ROW)
    steps.append("a", b"2" * ROW)
    steps.append("b", b"3" * ROW)
    assert StepLedger(Folder(tmp_path)).read("a") == b"1" * ROW + b"2" * ROW
    assert steps.read("c") == b""


@pytest.mark.parametrize("lost", [1, 63])
def test_a_torn_row_spoils_none_that_follows(tmp_path, lost):
    """The writer was killed within a row: it is left out, and the next ones are whole."""
    steps = StepLedger(Folder(tmp_path))
    steps.append("a", b"1" * ROW + b"2" * ROW)
    file = tmp_path / "steps-a"
    file.write_bytes(file.read_bytes()[:-lost])
    assert steps.read("a") == b"1" * ROW
    steps.append("a", b"3" * ROW)
    assert steps.read("a") == b"1" * ROW + b"3" * ROW


def test_rows_that_cannot_be_written_cost_nobody_anything(tmp_path):
    """A successor lacks them; the run goes on."""
    (tmp_path / "steps-a").mkdir()
    StepLedger(Folder(tmp_path)).append("a", b"1" * ROW)
