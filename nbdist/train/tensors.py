"""Tensors in files: torch.distributed.checkpoint's layout and planner, without its collectives.

Each writer has a folder of its own. What torch would pickle as metadata is an index in JSON here,
so nothing of a checkpoint is ever unpickled; tensors are read with `weights_only`. A tensor may lie
in pieces in several folders, and any piece of it is read from whichever there are. Writing runs in
a thread, reading in the engine's main thread.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from nbdist.errors import CheckpointUnreadable
from nbdist.train.parting import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

INDEX = "tensors.json"
MAX_PIECE_BYTES = 64 << 20
"""Larger ones are written by rows, as many pieces: who reads some rows has one or two in memory at
a time, whatever the size of the whole; a single row may be larger."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a tensor, and where it lies."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where in it the piece begins."""
    sizes: tuple[int, ...]
    """Of the piece."""
    file: str
    start: int
    num_bytes: int


class Index:
    """All pieces of a checkpoint."""

    def __init__(self, path: Path, folders: Iterable[str]) -> None:
        self.path = path
        self._pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
        for folder in folders:
            data = (path / folder / INDEX).read_bytes()
            for piece in msgspec.json.decode(data, type=list[Piece]):
                there = msgspec.structs.replace(piece, file=f"{folder}/{piece.file}")
                # What several ranks hold, as tied weights, is the same on all of them.
                self._pieces.setdefault(piece.key, {}).setdefault(piece.offsets, there)

    def __contains__(self, key: object) -> bool:
        return key in self._pieces

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor."""
        return next(iter(self._pieces[key].values())).shape

    def read(self, wanted: Mapping[str, tuple[Tensor, Origin]]) -> dict[str, Tensor]:
        """Read tensors, by their keys: only pieces in which something is wanted, one by one.

        Args:
            wanted: a tensor of the kind to be read, and where it lies in the whole. What was
                written with another shape than the whole's is read whole.

        Raises:
            CheckpointUnreadable: something of them was not written.
        """
        from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - it takes half a second

        metadata = self._metadata(wanted)
        targets: dict[str, Tensor] = {}
        items = []
        for key, (like, origin) in wanted.items():
            targets[key], offsets = self._room(key, like, origin)
            items += self._items(key, metadata.state_dict_metadata[key], targets[key], offsets)
        reader, planner = (
            dcp.FileSystemReader(self.path),
            dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(dcp.LoadPlan(items)), planner).wait()
        return targets

    def _room(self, key: str, like: Tensor, origin: Origin) -> tuple[Tensor, tuple[int, ...]]:
        """For what is wanted of a tensor, and where that begins in what was written."""
        piece = next(iter(self._pieces[key].values()))
        dtype = getattr(torch, piece.dtype)
        if piece.shape == origin.shape:
            return torch.empty_like(like, dtype=dtype, requires_grad=False), origin.offsets
        return torch.empty(piece.shape, dtype=dtype), (0,) * len(piece.shape)

    def _items(self, key: str, there: Any, target: Tensor, offsets: tuple[int, ...]) -> list[Any]:
        """What is to be read for it of which pieces, as torch's reader wants it."""
        from torch.distributed.checkpoint import metadata, planner_helpers  # noqa: PLC0415 - as above

        chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), target.size())
        items = planner_helpers.create_read_items_for_chunk_list(key, there, [chunk])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise CheckpointUnreadable(f"{self.path} has only parts of {key}; it is of no use")
        # The target is a tensor of its own: to torch it begins at 0.
        own = metadata.MetadataIndex(key)
        return [dataclasses.replace(item, dest_index=own) for item in items]

    def _metadata(self, keys: Iterable[str]) -> Any:
        """As torch's planner wants it."""
        from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415 - as above

        tensors: dict[str, metadata.STORAGE_TYPES] = {}
        places: dict[metadata.MetadataIndex, Any] = {}
        for key in keys:
            # A rank may have no rows of a tensor that has few.
            pieces = [piece for piece in self._pieces[key].values() if 0 not in piece.sizes]
            for number, piece in enumerate(pieces):
                place = filesystem._StorageInfo(piece.file, piece.start, piece.num_bytes)  # noqa: SLF001 - what the reader looks for
                places[metadata.MetadataIndex(key, piece.offsets, number)] = place
            first = next(iter(self._pieces[key].values()))
            tensors[key] = metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=getattr(torch, first.dtype)),
                torch.Size(first.shape),
                [
                    metadata.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes))
                    for p in pieces
                ],
            )
        return metadata.Metadata(tensors, storage_data=places)


def write(folder: Path, tensors: dict[str, Tensor], origins: Mapping[str, Origin]) -> None:
    """Write tensors into a folder, and the index of their pieces.

    Args:
        folder: is there, and empty.
        tensors: by their keys.
        origins: key -> where it lies in the whole, of those that are pieces.

    Raises:
        OSError: the folder cannot be written to.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - it takes half a second

    written: dict[str, Tensor] = {}
    where: dict[str, tuple[str, Origin]] = {}
    for key, tensor in tensors.items():
        origin = origins.get(key) or Origin.whole(tensor)
        for number, (piece, its_origin) in enumerate(_split(tensor, origin)):
            name = f"{key}/{number}"
            written[name], where[name] = piece, (key, its_origin)
    writer, planner = dcp.FileSystemWriter(folder), dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer.fs.mkdir = lambda path: None  # type: ignore[method-assign]  # noqa: ARG005 - it would bring back a folder that was given up
    planner.set_up_planner(written, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(plan)
    places = {r.index: r.storage_data for r in writer.write_data(plan, planner).wait()}
    pieces = []
    for item in plan.items:
        data, place = item.tensor_data, places[item.index]
        assert data is not None  # only tensors were given
        key, origin = where[item.index.fqn]
        pieces.append(
            Piece(
                key=key,
                dtype=str(data.properties.dtype).removeprefix("torch."),
                shape=origin.shape,
                offsets=origin.offsets,
                sizes=tuple(data.chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                num_bytes=place.length,
            )
        )
    (folder / INDEX).write_bytes(msgspec.json.encode(pieces))


def _split(tensor: Tensor, origin: Origin) -> Iterator[tuple[Tensor, Origin]]:
    """Pieces that are small enough, and where each begins in the whole."""
    if tensor.dim() == 0 or tensor.nbytes <= MAX_PIECE_BYTES:
        yield tensor, origin
        return
    num_rows = max(1, MAX_PIECE_BYTES * len(tensor) // tensor.nbytes)
    first, *others = origin.offsets
    for start in range(0, len(tensor), num_rows):
        piece = tensor[start : start + num_rows]
        yield piece, origin._replace(offsets=(first + start, *others))
