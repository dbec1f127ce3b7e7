"""Text as training data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbdist.data import ByteText, pydoc_text, text


def test_the_corpus_is_english_and_the_same_each_time():
    """Some hundred thousand bytes of UTF-8 that speak of Python."""
    corpus = pydoc_text()
    assert corpus == pydoc_text()
    assert len(corpus) > 300_000
    assert corpus.decode().count("the ") > 1000
    assert 50 < len(set(corpus)) < 256


def test_a_python_without_the_corpus_says_what_to_do(monkeypatch):
    """The error names the module and the way out."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match=r"lacks pydoc_data.topics.*text of your own"):
        pydoc_text()


def test_targets_are_the_inputs_one_byte_on():
    """Both have the context's length and torch's index type."""
    data = ByteText(b"abcdefgh", 3)
    inputs, targets = data[1]
    assert (inputs.dtype, inputs.shape) == (torch.int64, (3,))
    assert (targets.dtype, targets.shape) == (torch.int64, (3,))
    assert bytes(inputs.tolist()) == b"def"
    assert bytes(targets.tolist()) == b"efg"


@pytest.mark.parametrize(
    ("num_bytes", "stride", "starts"),
    [
        (4, None, [0]),
        (6, None, [0]),
        (7, None, [0, 3]),
        (8, None, [0, 3]),
        (7, 1, [0, 1, 2, 3]),
        (8, 2, [0, 2, 4]),
        (9, 5, [0, 5]),
    ],
)
def test_windows_stand_where_the_stride_says(num_bytes, stride, starts):
    """Each window is whole, the last one ends within the text, and no further one would."""
    data = ByteText(bytes(range(num_bytes)), 3, stride=stride)
    assert len(data) == len(starts)
    assert [int(data[i][0][0]) for i in range(len(data))] == starts
    assert starts[-1] + data.stride + 3 >= num_bytes


def test_indices_beyond_both_ends_are_refused():
    """A negative index counts from the end, as with a list; iteration ends."""
    data = ByteText(bytes(range(8)), 3)
    assert int(data[-1][0][0]) == 3
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"window {index} of a text that has 2"):
            data[index]
    assert len(list(data)) == 2


def test_a_string_is_read_as_utf_8():
    """Text beyond ASCII becomes several tokens a character."""
    assert ByteText("äöü", 5).num_tokens == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((b"abc", 3), ValueError, "the text has 3 bytes; a window of context=3 .* need 4"),
        ((b"", 1), ValueError, "the text has 0 bytes"),
        ((b"abc", 0), ValueError, "context=0: an integer, at least 1"),
        ((b"abc", 2.0), ValueError, "context=2.0: an integer"),
        ((["abc"], 2), TypeError, "text is a list: must be bytes or str"),
    ],
)
def test_what_makes_no_window_is_refused_with_the_reason(arguments, error, message):
    """The error names the argument, its value and what is needed."""
    with pytest.raises(error, match=message):
        ByteText(*arguments)
    with pytest.raises(ValueError, match="stride=0: an integer, at least 1"):
        ByteText(b"abcdef", 2, stride=0)


def test_writing_to_a_sample_leaves_the_text_alone():
    """A sample is a copy."""
    data = ByteText(b"abcd", 3)
    data[0][0].zero_()
    assert bytes(data[0][0].tolist()) == b"abc"


def test_reading_the_corpus_loads_neither_torch_nor_numpy():
    """A notebook may read it without them."""
    code = (
        "import sys\nfrom nbdist.data import ByteText, pydoc_text\npydoc_text()\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    root = Path(text.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
