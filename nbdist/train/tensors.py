"""Tensors in files: torch.distributed.checkpoint's layout and planner, without its collectives.

Each writer has a folder of its own. What torch would pickle as metadata is an index in JSON here,
so nothing of a checkpoint is ever unpickled; tensors are read with `weights_only`. A tensor may lie
in pieces in several folders. Writing runs in a thread, reading in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

INDEX = "tensors.json"


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

    def empty(self, key: str, like: Tensor) -> Tensor:
        """Room for a tensor: of the kind of `like`, where they have the same shape."""
        piece = next(iter(self._pieces[key].values()))
        dtype = getattr(torch, piece.dtype)
        if piece.shape == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(piece.shape, dtype=dtype)

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill tensors, each by its key."""
        from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - it takes half a second

        reader, planner = (
            dcp.FileSystemReader(self.path),
            dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
        metadata = self._metadata(targets)
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()

    def _metadata(self, keys: Iterable[str]) -> Any:
        """As torch's planner wants it."""
        from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415 - as above

        tensors: dict[str, metadata.STORAGE_TYPES] = {}
        places: dict[metadata.MetadataIndex, Any] = {}
        for key in keys:
            pieces = list(self._pieces[key].values())
            for number, piece in enumerate(pieces):
                place = filesystem._StorageInfo(piece.file, piece.start, piece.num_bytes)  # noqa: SLF001 - what the reader looks for
                places[metadata.MetadataIndex(key, piece.offsets, number)] = place
            tensors[key] = metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=getattr(torch, pieces[0].dtype)),
                torch.Size(pieces[0].shape),
                [
                    metadata.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes))
                    for p in pieces
                ],
            )
        return metadata.Metadata(tensors, storage_data=places)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors into a folder, and the index of their pieces.

    Raises:
        OSError: the folder cannot be written to.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - it takes half a second

    writer, planner = dcp.FileSystemWriter(folder), dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(plan)
    places = {r.index: r.storage_data for r in writer.write_data(plan, planner).wait()}
    pieces = []
    for item in plan.items:
        data, place = item.tensor_data, places[item.index]
        assert data is not None  # only tensors were given
        pieces.append(
            Piece(
                key=item.index.fqn,
                dtype=str(data.properties.dtype).removeprefix("torch."),
                shape=tuple(data.size),
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                num_bytes=place.length,
            )
        )
    (folder / INDEX).write_bytes(msgspec.json.encode(pieces))
