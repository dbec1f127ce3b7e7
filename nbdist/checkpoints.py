"""Checkpoints on disk: their folders, their manifests, which one is the newest that is whole.

Any process may use this: it knows nothing of tensors. A checkpoint is written into a fresh folder
`….partial`; each writer leaves a receipt when its files are on disk; whoever commits writes the
manifest, which has the size and SHA-256 of every file, and only then gives the folder its name. So
a folder with a name is whole, or was damaged later, which its manifest shows.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nbdist.errors import CheckpointUnreadable, FileUnwritable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MANIFEST, LATEST, RECEIPT = "manifest.json", "latest", "part.json"
PARTIAL, OLD = ".partial", ".old"
"""Ends of the names of folders that are not finished yet, and of those that are being removed."""
MIN_KEPT = 2
"""The one before the newest is there until the newest has proved good."""
FORMAT = 1
_NAME = re.compile(r"step-[0-9]+\.gen-[0-9]+\.[0-9a-f]+")
_CHUNK_BYTES = 1 << 20


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file, as it was written."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of."""

    number: int
    """Counts the checkpoints of a folder: the newest has the highest."""
    step: int
    """Committed steps."""
    generation: int
    parts: tuple[str, ...]
    """Folders in it, one for each writer, in the order of their ranks."""
    files: dict[str, File]
    """Path in the checkpoint -> what it was."""
    written: str
    """When, by the wall clock; a label."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files.values())


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest's file."""

    format: int
    sha256: str
    """Of the manifest, as msgspec writes it."""
    manifest: Manifest


class _Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A writer has written these."""

    files: dict[str, File]


class Found(NamedTuple):
    """A checkpoint that is whole."""

    path: Path
    manifest: Manifest
    skipped: list[str]
    """Why newer ones were not taken."""


def part_name(rank: int) -> str:
    """The folder of one writer."""
    return f"rank-{rank}"


# ---- writing


def begin(path: Path, *, step: int, generation: int) -> Path:
    """Make a fresh folder for a checkpoint under `path`; no folder is ever used twice.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    fresh = path / f"step-{step}.gen-{generation}.{secrets.token_hex(4)}{PARTIAL}"
    fresh.mkdir()
    return fresh


def acknowledge(partial: Path, part: str) -> None:
    """Leave a writer's receipt: all its files are on disk, and will not change."""
    folder = partial / part
    files = {str(p.relative_to(partial)): _file(p, is_new=True) for p in sorted(folder.iterdir())}
    _sync(folder)
    _write(folder / RECEIPT, msgspec.json.encode(_Receipt(files=files)))


def is_acknowledged(partial: Path, part: str) -> bool:
    """Whether a writer is done."""
    return (partial / part / RECEIPT).exists()


def commit(
    partial: Path, parts: Sequence[str], *, step: int, generation: int, keep: int | None = None
) -> Found:
    """Finish a checkpoint whose writers are all done: manifest, name, `latest`, in this order.

    What another process has begun of this, and not ended, is ended.

    Args:
        partial: its folder.
        parts: of its writers, in the order of their ranks.
        step: committed steps.
        generation: in which they stood.
        keep: so many of the newest stay; None: all.

    Raises:
        OSError: it cannot be written.
    """
    path, whole = partial.parent, partial.with_name(partial.name.removesuffix(PARTIAL))
    if whole.exists():
        manifest = read_manifest(whole)
    else:
        manifest = _manifest_of(partial, parts, step=step, generation=generation)
        sealed = _Sealed(format=FORMAT, sha256=_seal(manifest), manifest=manifest)
        _write(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed)))
        partial.rename(whole)
        _sync(path)
    _write(path / LATEST, f"{whole.name}\n".encode())
    if keep is not None:
        _remove_all_but(path, keep)
    return Found(whole, manifest, [])


def _manifest_of(partial: Path, parts: Sequence[str], *, step: int, generation: int) -> Manifest:
    files: dict[str, File] = {}
    for part in parts:
        receipt = partial / part / RECEIPT
        files |= msgspec.json.decode(receipt.read_bytes(), type=_Receipt).files
        files[str(receipt.relative_to(partial))] = _file(receipt)
    numbers = [manifest.number for _, manifest in _manifests(partial.parent, [])]
    return Manifest(
        number=max(numbers, default=0) + 1,
        step=step,
        generation=generation,
        parts=tuple(parts),
        files=files,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """Raise FileUnwritable in place of an OSError: which file, and why."""
    try:
        yield
    except OSError as error:
        raise FileUnwritable(unwritable(path, error)) from error


def unwritable(path: Path, error: OSError) -> str:
    """Why a checkpoint could not be written."""
    name = errno.errorcode.get(error.errno or 0, "")
    file = error.filename or path
    return (
        f"no checkpoint was written: {file}: {error.strerror or error}"
        f"{f' ({name})' if name else ''}. Earlier checkpoints in {path} are as they were, and "
        "training is not touched by it"
    )


def check_kept(keep: object) -> None:
    """Raise ValueError unless so many checkpoints may be kept."""
    if keep is not None and (
        not isinstance(keep, int) or isinstance(keep, bool) or keep < MIN_KEPT
    ):
        raise ValueError(f"keep is {keep!r}; it must be {MIN_KEPT} or more, or None to keep all")


def discard(partial: Path) -> None:
    """Remove what was written of a checkpoint that comes to nothing, as far as that is possible.

    Others may be writing into it still. It loses its name first: they add nothing to it by that.
    """
    with contextlib.suppress(OSError):
        partial = partial.rename(partial.with_name(partial.name + OLD))
    shutil.rmtree(partial, ignore_errors=True)


def _remove_all_but(path: Path, num: int) -> None:
    """Of those that have a manifest; a folder that goes loses its name first."""
    by_age = sorted(_manifests(path, []), key=lambda pair: pair[1].number)
    for folder, _ in by_age[:-num]:
        with contextlib.suppress(OSError):  # who removes it too, or a folder that cannot be changed
            shutil.rmtree(folder.rename(folder.with_name(folder.name + OLD)), ignore_errors=True)


def _write(file: Path, data: bytes) -> None:
    """Replace a small file by a whole one, on disk."""
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}.new")
    try:
        with fresh.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading


def newest(path: Path) -> Found:
    """The newest checkpoint that is whole: under `path`, or `path` itself.

    Reads every file of it.

    Raises:
        CheckpointUnreadable: there is none; the message says what there is.
    """
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise CheckpointUnreadable(f"{path} {what}; name the folder that checkpoints were saved in")
    skipped: list[str] = []
    found = list(_manifests(path, skipped))
    for folder, manifest in sorted(found, key=lambda pair: -pair[1].number):
        if not (fault := _damage(folder, manifest)):
            return Found(folder, manifest, skipped)
        skipped.append(f"{folder.name}: {fault}")
    unfinished = [p.name for p in path.iterdir() if p.name.endswith(PARTIAL)]
    skipped += [f"{name}: was never finished" for name in sorted(unfinished)]
    why = f": {'; '.join(skipped)}" if skipped else ""
    raise CheckpointUnreadable(f"{path} has no checkpoint that is whole{why}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint, checked; its files are not.

    Raises:
        CheckpointUnreadable: it has none, or none that is as it was written.
    """
    try:
        sealed = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Sealed)
    except OSError as error:
        raise CheckpointUnreadable(f"{folder / MANIFEST}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointUnreadable(f"{folder / MANIFEST} is damaged: {error}") from error
    if sealed.format != FORMAT:
        raise CheckpointUnreadable(
            f"{folder} has format {sealed.format}; this nbdist reads format {FORMAT}"
        )
    if sealed.sha256 != _seal(sealed.manifest):
        raise CheckpointUnreadable(f"{folder / MANIFEST} is not as it was written")
    return sealed.manifest


def _manifests(path: Path, skipped: list[str]) -> Iterator[tuple[Path, Manifest]]:
    """Those under a folder, and its own; `skipped` gets a line for each that cannot be read."""
    folders = [path] if (path / MANIFEST).exists() else []
    folders += [p for p in path.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    for folder in folders:
        try:
            yield folder, read_manifest(folder)
        except CheckpointUnreadable as error:
            skipped.append(str(error))


def _damage(folder: Path, manifest: Manifest) -> str:
    """What is not as it was written, in words; empty where all is."""
    for name, file in manifest.files.items():
        try:
            found = _file(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found.num_bytes != file.num_bytes:
            return f"{name} has {found.num_bytes} bytes, and was written with {file.num_bytes}"
        if found != file:
            return f"{name} has other bytes than were written"
    return ""


def _file(path: Path, *, is_new: bool = False) -> File:
    """What a file is; a new one is on disk then."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
        if is_new:
            os.fsync(file.fileno())
    return File(num_bytes=num_bytes, sha256=digest.hexdigest())


def _seal(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
