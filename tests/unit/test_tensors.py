"""Tensors in files, in pieces: any piece is read from whichever there are."""

import json

import pytest
import torch
import torch.distributed.checkpoint  # the first write would import it

from nbdist.errors import CheckpointUnreadable
from nbdist.train import tensors as module
from nbdist.train.parting import InPieces, Origin, Piece, origins_of, pieces_of
from nbdist.train.strategies.axes import Portion
from nbdist.train.tensors import INDEX, Index, write

SHAPES = {"matrix": (5, 3), "few": (1, 2), "even": (4,), "one": (), "none": (0, 2)}


def tensors():
    generator = torch.Generator().manual_seed(4)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def of(portion):
    """Key -> what a rank has, and where it lies."""
    pieces = {}
    for key, tensor in tensors().items():
        rows = tensor[portion.rows(len(tensor))] if tensor.dim() else tensor
        pieces[key] = rows.clone(), portion.origin(tensor)
    return pieces


def save(path, pieces_of_ranks):
    """As so many ranks write them."""
    folders = []
    for rank, pieces in enumerate(pieces_of_ranks):
        folder = path / f"rank-{rank}"
        folder.mkdir()
        write(
            folder, {k: t for k, (t, _) in pieces.items()}, {k: c for k, (_, c) in pieces.items()}
        )
        folders.append(folder.name)
    return Index(path, folders)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 6])
def test_rows_are_read_from_any_rows(tmp_path, num):
    """Of as many ranks, of more and of fewer, some of which have none; and whole ones."""
    index = save(tmp_path, [of(Portion(rank, num)) for rank in range(num)])
    for num_here in (1, 2, 3, 5):
        for rank in range(num_here):
            wanted = of(Portion(rank, num_here))
            read = index.read(
                {k: (torch.empty_like(t), origin) for k, (t, origin) in wanted.items()}
            )
            assert all(torch.equal(read[key], wanted[key][0]) for key in SHAPES)
    assert {key: index.shape(key) for key in SHAPES} == SHAPES


def test_large_ones_are_written_in_pieces(tmp_path, monkeypatch):
    """So a rank that reads its rows of a whole tensor never has the whole: pieces in which it has
    no rows are not read, and none lies in a file with more than itself."""
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", 25)  # two rows of the matrix
    index = save(tmp_path, [of(Portion(rank, 2)) for rank in (0, 1)])
    pieces = [
        (piece["offsets"], piece["sizes"])
        for rank in (0, 1)
        for piece in json.loads((tmp_path / f"rank-{rank}" / INDEX).read_text())
        if piece["key"] == "matrix"
    ]
    assert pieces == [([0, 0], [2, 3]), ([2, 0], [1, 3]), ([3, 0], [2, 3])]
    read, loaded = [], torch.load
    monkeypatch.setattr("torch.load", lambda *a, **k: read.append(loaded(*a, **k)) or read[-1])
    own, origin = of(Portion(0, 3))["matrix"]
    assert torch.equal(index.read({"matrix": (own, origin)})["matrix"], tensors()["matrix"][:2])
    assert [(piece.shape, piece.untyped_storage().nbytes()) for piece in read] == [((2, 3), 24)]


def test_rows_are_read_from_columns(tmp_path):
    """Pieces may be cut along any dimension."""
    matrix = tensors()["matrix"]
    left, right = matrix[:, :1].clone(), matrix[:, 1:].clone()
    index = save(
        tmp_path,
        [{"matrix": (left, Origin((5, 3), (0, 0)))}, {"matrix": (right, Origin((5, 3), (0, 1)))}],
    )
    read = index.read({"matrix": (torch.empty(2, 3), Origin((5, 3), (3, 0)))})
    assert torch.equal(read["matrix"], matrix[3:])


def test_what_has_another_shape_is_read_whole(tmp_path):
    """As a count of steps, which the optimizer keeps of each parameter."""
    index = save(tmp_path, [{"step": (torch.tensor(7.0), Origin((), ()))}])
    read = index.read({"step": (torch.empty(2, 3), Origin((5, 3), (3, 0)))})
    assert read["step"].shape == ()
    assert read["step"] == 7


def test_a_piece_that_is_nowhere_is_missed(tmp_path):
    """What was not written is not made up, but for what lies elsewhere it does not matter."""
    save(tmp_path, [of(Portion(rank, 3)) for rank in range(3)])
    index = Index(tmp_path, ["rank-0", "rank-2"])
    whole, first = tensors()["matrix"], of(Portion(0, 3))["matrix"]
    assert torch.equal(index.read({"matrix": first})["matrix"], whole[:2])
    with pytest.raises(CheckpointUnreadable, match="has only parts of matrix"):
        index.read({"matrix": (whole, Origin.whole(whole))})


def test_an_index_says_where_pieces_lie(tmp_path):
    """In JSON that anything can read."""
    save(tmp_path, [of(Portion(rank, 3)) for rank in range(3)])
    (piece,) = [
        piece
        for piece in json.loads((tmp_path / "rank-2" / INDEX).read_text())
        if piece["key"] == "matrix"
    ]
    assert (piece["shape"], piece["offsets"], piece["sizes"]) == ([5, 3], [4, 0], [1, 3])


class Rows(InPieces):
    """The last rows of a parameter; another one as a whole."""

    def __init__(self):
        super().__init__()
        self.origins = {"some": Origin((5, 3), (3, 0))}
        self.some, self.scale = (torch.nn.Parameter(t) for t in (torch.zeros(2, 3), torch.ones(())))


def test_a_module_says_which_pieces_it_has():
    """Of what it says nothing of, it has the whole; and any other module has all whole."""
    assert origins_of(Rows()) == {"some": Origin((5, 3), (3, 0)), "scale": Origin((), ())}
    assert pieces_of(Rows()) == {"some": Piece((3, 0), (2, 3)), "scale": Piece((), ())}
    other = torch.nn.Linear(3, 2)
    other.origins = {"weight": "the user's own"}
    assert origins_of(other) == {"weight": Origin((2, 3), (0, 0)), "bias": Origin((2,), (0,))}


def test_a_folder_that_was_given_up_is_not_made_anew(tmp_path):
    """Nobody would remove it any more."""
    with pytest.raises(OSError, match="gone"):
        write(tmp_path / "gone", {"x": torch.ones(3)}, {})
    assert not list(tmp_path.iterdir())
