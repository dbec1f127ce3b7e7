"""Text as training data, byte by byte: a corpus that every Python has, and windows over it.

Used in engines mostly. torch is loaded when a `ByteText` is made, not before: a notebook that only
reads the corpus need not have it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 256
"""Distinct tokens of a `ByteText`."""


def pydoc_text() -> bytes:
    """The reference text of Python's own `help()`: some 460 kB of English, as UTF-8.

    It comes with every CPython, so nothing is fetched; its size differs a little between versions.

    Raises:
        ModuleNotFoundError: this Python was built without it; the message says what to do.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this Python lacks pydoc_data.topics, which most builds of it have; pass a "
            "text of your own to ByteText",
            name=error.name,
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class ByteText:
    """A map-style dataset of windows over a text; a token is a byte.

    Item i is the pair `(input, target)`, int64, each of shape `(context,)`: the bytes from
    `i * stride` on, and those from `i * stride + 1` on, so that `target[j]` follows `input[j]`.
    With the default stride, which is the context, windows do not overlap and each byte is a target
    once at most; a smaller stride gives more samples, which overlap. A rest of the text too short
    for a whole window is left out.

    Args:
        text: bytes, or a string, which is encoded as UTF-8.
        context: tokens of a window, at least 1.
        stride: tokens from one window to the next, at least 1; None: as many as the context.

    Raises:
        TypeError: `text` is neither bytes nor a string.
        ValueError: `context` or `stride` is less than 1, or the text too short for one window.
    """

    def __init__(self, text: bytes | str, context: int, *, stride: int | None = None) -> None:
        if not isinstance(text, bytes | str):
            raise TypeError(f"text is a {type(text).__name__}: must be bytes or str")
        data = text.encode() if isinstance(text, str) else text
        self.context = _at_least_one("context", context)
        self.stride = _at_least_one("stride", context if stride is None else stride)
        if len(data) < context + 1:
            raise ValueError(
                f"the text has {len(data)} bytes; a window of context={context} and its targets "
                f"need {context + 1}: pass more text, or a smaller context"
            )
        torch: Any = import_module("torch")
        # uint8: an eighth of the memory, also where the dataset is sent to a loader's processes.
        self._tokens: Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @property
    def num_tokens(self) -> int:
        """Bytes of the text."""
        return len(self._tokens)

    def __len__(self) -> int:
        """How many windows."""
        return (self.num_tokens - 1 - self.context) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Window `index`; a negative one counts from the end. Raises IndexError beyond both."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of a text that has {len(self)}")
        start = index % len(self) * self.stride
        window = self._tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def _at_least_one(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: an integer, at least 1")
    return value
