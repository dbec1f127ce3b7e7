"""What ranks printed and showed in a cell, in order, and what a cell returned.

No threads, no sockets. Filled by `session.cells` in the ipyparallel client's thread, read by
whoever shows it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from nbdist.protocol import values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

State = Literal["running", "ok", "error", "died", "released", "lost"]
"""How a rank's part of a cell stands.

"released": it waited for a rank that failed, and was freed. "lost": its engine ended while the cell
trained, and the cell goes on without it, or with another in its place.
"""


@dataclass
class Text:
    """Text of one stream; consecutive pieces of one stream are joined."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True)
class Rich:
    """A display or the value of the last expression, as a MIME bundle."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_result: bool = False


@dataclass
class RankOutput:
    """Everything one rank put out in one cell, in order."""

    items: list[Text | Rich] = field(default_factory=list)
    state: State = "running"

    def add_text(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Append printed text."""
        last = self.items[-1] if self.items else None
        if isinstance(last, Text) and last.stream == stream:
            last.text += text
        else:
            self.items.append(Text(stream, text))

    def add_line(self, text: str) -> None:
        """Append a line of ours to what was printed."""
        last = self.items[-1] if self.items else None
        is_open = isinstance(last, Text) and not last.text.endswith("\n")
        self.add_text("stdout", f"{chr(10) if is_open else ''}{text}\n")

    def add_rich(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], *, is_result: bool = False
    ) -> None:
        """Append a display or a result."""
        self.items.append(Rich(data, metadata, is_result))

    @property
    def text(self) -> str:
        """All that can be read as text: streams, and the plain form of displays and results.

        Each of the latter stands on a line of its own.
        """
        out = ""
        for item in self.items:
            if isinstance(item, Text):
                out += item.text
            else:
                plain = str(item.data.get("text/plain", ""))
                if plain:
                    out += ("" if not out or out.endswith("\n") else "\n") + plain + "\n"
        return out


@dataclass(frozen=True)
class Progress:
    """A cell as it stands now: what a display redraws."""

    cell: str
    ranks: Mapping[int, RankOutput]
    done: bool
    generation: int
    seconds: float
    notes: Sequence[str] = ()
    """What the user should know beside the output, a line each."""


@dataclass(frozen=True)
class CellResult:
    """What a cell that succeeded on all its ranks gave.

    Attributes:
        outputs: rank -> everything it printed or showed, as text.
        packed: rank -> what its engine's reply holds of ours.
        generation: the group in which it ran.
        seconds: from sending to the last answer.
        notes: what the user should know beside the output, a line each.
    """

    outputs: Mapping[int, str]
    packed: Mapping[int, Mapping[str, str]] = field(repr=False)
    generation: int
    seconds: float
    notes: Sequence[str] = ()

    @cached_property
    def values(self) -> dict[int, Any]:
        """Rank -> value of the cell's last expression.

        Tensors on the CPU; None where it has none, `NotSent` where it could not be sent, with the
        reason. Unpacked when they are first looked at: unpacking a tensor imports torch, which
        takes seconds, and most cells are only shown.
        """
        return {rank: _value(ours) for rank, ours in self.packed.items()}


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that stayed on its engine, and says why."""

    reason: str


def _value(ours: Mapping[str, str]) -> Any:
    if "value" in ours:
        try:
            return values.unpack(base64.b64decode(ours["value"]))
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything
            return NotSent(f"it cannot be unpacked here: {type(error).__name__}: {error}")
    return NotSent(ours["not_sent"]) if "not_sent" in ours else None
