"""Folders of checkpoints: which one counts, whatever a writer was killed in or a disk has lost."""

import contextlib
import errno
import json
import os
import threading

import pytest

from nbdist import checkpoints
from nbdist.errors import CheckpointUnreadable, FileUnwritable

PARTS = ("rank-0", "rank-1")


def begun(path, step=1):
    """Both writers are done; nobody has committed."""
    partial = checkpoints.begin(path, step=step, generation=3)
    for part in PARTS:
        (partial / part).mkdir()
        (partial / part / "data").write_bytes(f"{part} at {step}".encode() * 10)
        checkpoints.acknowledge(partial, part)
    return partial


def saved(path, step=1, **more):
    return checkpoints.commit(begun(path, step), PARTS, step=step, generation=3, **more).path


def test_a_finished_checkpoint_is_found(tmp_path):
    """Its manifest names the parts in order and every file; `latest` names it."""
    folder = saved(tmp_path / "deep" / "down")
    found = checkpoints.newest(folder.parent)
    assert found.path == folder
    assert found.manifest.parts == PARTS
    assert set(found.manifest.files) == {f"{p}/{f}" for p in PARTS for f in ("data", "part.json")}
    assert (folder.parent / "latest").read_text() == f"{folder.name}\n"
    assert folder.name.startswith("step-1.gen-3.")
    assert not list(folder.parent.glob("*.new")) + list(folder.parent.glob("*.partial"))


def test_one_of_them_can_be_named(tmp_path):
    """An older one is loaded by its own path."""
    older, newer = saved(tmp_path, 1), saved(tmp_path, 2)
    assert checkpoints.newest(older).path == older
    assert checkpoints.newest(tmp_path).path == newer


def test_the_newest_is_the_one_saved_last(tmp_path):
    """Not the one with the most steps: a training may have begun anew."""
    saved(tmp_path, 200)
    again = saved(tmp_path, 100)
    assert checkpoints.newest(tmp_path).path == again


def test_no_folder_is_used_twice(tmp_path):
    """The same step of the same generation gets another one."""
    assert saved(tmp_path) != saved(tmp_path)


def cut_short(folder):
    file = folder / "rank-1" / "data"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder):
    file = folder / "rank-0" / "data"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def change_the_manifest(folder):
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))


def raise_the_format(folder):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


DAMAGES = {
    "cut": (cut_short, "rank-1/data has 109 bytes, and was written with 110"),
    "bit": (flip_a_bit, "rank-0/data has other bytes than were written"),
    "missing": (lambda f: (f / "rank-0" / "data").unlink(), "rank-0/data: No such file"),
    "receipt": (lambda f: (f / "rank-0" / "part.json").write_text("{}"), "part.json has"),
    "manifest": (change_the_manifest, "is not as it was written"),
    "no manifest": (lambda f: (f / "manifest.json").write_text("{"), "is damaged"),
    "format": (raise_the_format, "has format 99; this nbdist reads format 1"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_one_is_passed_over(tmp_path, how):
    """The one before it is taken, and it is said why; alone it is refused with that sentence."""
    older, newer = saved(tmp_path, 1), saved(tmp_path, 2)
    damage, why = DAMAGES[how]
    damage(newer)
    found = checkpoints.newest(tmp_path)
    assert found.path == older
    assert len(found.skipped) == 1
    assert why in found.skipped[0]
    with pytest.raises(CheckpointUnreadable, match="no checkpoint that is whole"):
        checkpoints.newest(newer)


def test_one_that_was_not_finished_is_none(tmp_path):
    """Whatever of it is there: neither before its manifest, nor with it."""
    partial = begun(tmp_path, 5)
    (partial / "manifest.json").write_bytes((saved(tmp_path / "x") / "manifest.json").read_bytes())
    with pytest.raises(CheckpointUnreadable, match=f"{partial.name}: was never finished"):
        checkpoints.newest(tmp_path)
    whole = saved(tmp_path, 4)
    assert checkpoints.newest(tmp_path).path == whole


@pytest.mark.parametrize("made", [None, "file", "empty"])
def test_where_there_is_nothing_a_sentence_says_so(tmp_path, made):
    """No folder, no folder but a file, an empty folder."""
    path = tmp_path / "x"
    if made == "file":
        path.touch()
    if made == "empty":
        path.mkdir()
    what = {None: "does not exist", "file": "is no folder", "empty": "no checkpoint that is whole"}
    with pytest.raises(CheckpointUnreadable, match=what[made]):
        checkpoints.newest(path)


STOPS = ["manifest", "folder", "latest"]


@pytest.mark.parametrize("at", STOPS)
def test_what_one_has_begun_to_commit_another_ends(tmp_path, monkeypatch, at):
    """Killed before the manifest, the name or `latest`: it is the previous one until it is this."""
    older = saved(tmp_path, 1)
    partial = begun(tmp_path, 2)
    stops = {
        "manifest": (checkpoints, "_write"),
        "folder": (type(partial), "rename"),
        "latest": (checkpoints, "_sync"),
    }

    def stop(*_):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(*stops[at], stop)
        with pytest.raises(InterruptedError):
            checkpoints.commit(partial, PARTS, step=2, generation=3)
    is_named = at == "latest" and not partial.exists()
    assert (checkpoints.newest(tmp_path).path == older) is not is_named
    found = checkpoints.commit(partial, PARTS, step=2, generation=3)
    assert checkpoints.newest(tmp_path).path == found.path
    assert (tmp_path / "latest").read_text() == f"{found.path.name}\n"


def test_only_so_many_are_kept(tmp_path):
    """The newest; what is no checkpoint stays."""
    (tmp_path / "notes").mkdir()
    unfinished = begun(tmp_path, 9)
    folders = [saved(tmp_path, step, keep=3) for step in range(6)]
    there = {p for p in tmp_path.iterdir() if p.is_dir()}
    assert there == {*folders[-3:], tmp_path / "notes", unfinished}


@pytest.mark.parametrize("keep", [0, 1, -2, 2.0, True, "3"])
def test_at_least_two_are_kept(keep):
    """Until the newest has proved good, the one before it is there."""
    with pytest.raises(ValueError, match="it must be 2 or more"):
        checkpoints.check_kept(keep)


def test_a_disk_that_cannot_be_written_is_named(tmp_path):
    """The file, and the reason by its name too."""
    with (
        pytest.raises(FileUnwritable, match=r"/x/y: Read-only file system \(EROFS\)"),
        checkpoints.telling(tmp_path),
    ):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/x/y")


def test_a_file_in_the_way_is_named(tmp_path):
    """Where the folder should be there is a file."""
    (tmp_path / "x").touch()
    with (
        pytest.raises(FileUnwritable, match=r"File exists \(EEXIST\).*Earlier checkpoints"),
        checkpoints.telling(tmp_path / "x"),
    ):
        checkpoints.begin(tmp_path / "x", step=1, generation=1)


def test_one_that_is_given_up_while_others_write_is_gone(tmp_path):
    """Whatever they are in the middle of, they bring nothing of it back."""

    def keep_writing(folder, begun):
        with contextlib.suppress(FileNotFoundError):
            for number in range(3000):
                (folder / str(number)).write_bytes(b"x")
                begun.set()

    for step in range(20):
        partial = checkpoints.begin(tmp_path, step=step, generation=3)
        (partial / "rank-0").mkdir()
        is_begun = threading.Event()
        writer = threading.Thread(target=keep_writing, args=(partial / "rank-0", is_begun))
        writer.start()
        assert is_begun.wait(10)
        checkpoints.discard(partial)
        writer.join(10)
        assert not writer.is_alive()
        assert not list(tmp_path.iterdir())
