"""What ranks put out, on screen: in rank order, equal output once; and the tables of the magics.

Runs in the kernel, in the thread that runs the cell; starts no thread. The only module that prints.
Knows the session's records of output, but neither engines nor the supervisor.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import DisplayHandle, display

from nbdist.frontend.targets import format_ranks, name_ranks
from nbdist.session.outputs import Rich, Text

if TYPE_CHECKING:  # for annotations only
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.protocol.events import Incident
    from nbdist.session.outputs import Progress, RankOutput
    from nbdist.session.status import RankStatus

__all__ = [
    "CellDisplay",
    "LiveText",
    "is_live",
    "render",
    "show_line",
    "show_page_table",
    "show_seats",
    "show_status",
    "show_table",
    "show_value",
    "show_warnings",
]

MAX_LINES = 200
"""A heading with more lines than this shows the first and the last half of it."""

_MARKS = {"ok": "", "error": "failed"}
"""How a state is written in a heading, where that is not its name."""

_NO_MODEL_HERE = "application/vnd.jupyter.widget-view+json"
"""A widget of an engine has no model in this kernel: the page could draw nothing but an error."""
_REST_FACTOR = 10
"""Redrawing takes at most one part in this many of the cell's time, however much was printed."""


def is_live(shell: InteractiveShell | None) -> bool:
    """Whether the cell that runs now may update its display: its front end can be asked for input.

    One that cannot (nbclient, nbval) keeps what a cell shows, so it gets one display, when the cell
    is done. So does a terminal, where an update would be printed again.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    request = kernel.get_parent() or {}
    return bool(request.get("content", {}).get("allow_stdin", False))


class CellDisplay:
    """Shows one distributed cell, from its first output to its last.

    Args:
        headless: show once, when the cell is done; else update one display while it runs, up to
            the same text.
        clock: monotonic seconds.
    """

    def __init__(self, headless: bool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_headless = headless
        self._clock = clock
        self._text = LiveText(headless)
        self._rests_until = float("-inf")

    def update(self, progress: Progress) -> None:
        """Show the cell as it stands; called when output changed, and once when it is done."""
        if progress.done:
            self._text.show(render(progress), done=True)
            _show_rich(progress)
        elif not self._is_headless and self._clock() >= self._rests_until:
            begun = self._clock()
            self._text.show(render(progress), done=False)
            ended = self._clock()
            self._rests_until = ended + _REST_FACTOR * (ended - begun)


class LiveText:
    """One display of plain text.

    Args:
        headless: shown once, when it is done; else updated up to the same text.
    """

    def __init__(self, headless: bool) -> None:
        self._is_headless = headless
        self._handle: DisplayHandle | None = None
        self._shown = ""

    def show(self, text: str, *, done: bool) -> None:
        """Show the text as it is now."""
        if text == self._shown or (self._is_headless and not done):
            return
        self._shown = text
        bundle = {"text/plain": text}
        if self._handle is not None:
            self._handle.update(bundle, raw=True)  # type: ignore[no-untyped-call]
        elif self._is_headless:
            _publish(bundle)
        else:
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(bundle, raw=True)  # type: ignore[no-untyped-call]


def render(progress: Progress) -> str:
    """The text of a cell: headings that name ranks, each followed by their lines, unaltered.

    Ranks with equal text share a heading. What was printed to stderr has one of its own: the order
    between the two streams is not known exactly. A rank that put out nothing has none; no output at
    all is an empty text. Notes on the cell are the last lines.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, output in sorted(progress.ranks.items()):
        mark = _MARKS.get(output.state, output.state)
        for suffix, text in (("", _plain_text(output)), (" stderr", _stderr_text(output))):
            if text:
                title = f"{suffix}, {mark}" if mark else suffix
                groups.setdefault((title, text), []).append(rank)
    lines: list[str] = []
    for (title, text), ranks in groups.items():
        lines += [f"[{name_ranks(ranks)}{title}]", *_bounded(text.removesuffix("\n").split("\n"))]
    lines += [f"[{note}]" for note in progress.notes]
    return "\n".join(lines)


def show_line(text: str) -> None:
    """Print one sentence of a magic."""
    print(text)  # noqa: T201 - the one place that prints


def show_value(value: object) -> None:
    """Show something that knows how to show itself."""
    show: Callable[..., object] = display
    show(value)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their headings, columns aligned; None is shown as a dash."""
    for line in _aligned(headings, rows):
        show_line(line)


def show_page_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, below: Sequence[str] = ()
) -> None:
    """Show rows as a table of the page, and as aligned text wherever that cannot be drawn.

    Args:
        headings: of the columns.
        rows: under them.
        below: sentences under the table.
    """
    head = "".join(f"<th style='text-align:left'>{escape(one)}</th>" for one in headings)
    body = "".join(
        f"<tr>{''.join(f'<td style=text-align:left>{escape(_cell(v))}</td>' for v in row)}</tr>"
        for row in rows
    )
    notes = "".join(f"<div>{escape(line)}</div>" for line in below)
    page = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"
    text = "\n".join([*_aligned(headings, rows), *below])
    _publish({"text/plain": text, "text/html": page})


def show_seats(seats: Sequence[RankStatus], *, is_verbose: bool) -> None:
    """Print who sits where, as after the start."""
    headings = ["rank", "slot", "device", *(["host", "pid"] if is_verbose else [])]
    show_table(headings, [[getattr(seat, heading) for heading in headings] for seat in seats])


def show_status(
    seats: Sequence[RankStatus], incidents: Sequence[Incident], *, run: str = ""
) -> None:
    """Print how every seat stands, what newcomers could not be given, a run, and the incidents."""
    headings = "rank slot state generation device memory step samples/s activity"
    show_table(headings.split(), [_status_row(seat) for seat in seats])
    for seat in seats:
        where = f"slot {seat.slot}" if seat.rank is None else f"rank {seat.rank}"
        for name, reason in seat.not_restored.items():
            show_line(f"Not restored on {where}: {name} ({reason})")
    if run:
        show_line(f"Run: {run}")
    if incidents:
        show_line(_incidents_line(incidents))


def show_warnings(texts: Sequence[str]) -> None:
    """Print what the user should know, though it stops nothing."""
    for text in texts:
        show_line(f"Warning: {text}")


def _cell(value: object) -> str:
    return "–" if value is None else str(value)


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _status_row(seat: RankStatus) -> list[object]:
    memory = f"{seat.memory_bytes / 2**20:.0f} MiB"
    rate = None if seat.samples_per_second is None else f"{seat.samples_per_second:.1f}"
    place = [seat.rank, seat.slot, seat.state, seat.generation, seat.device]
    slowed = f"slowed {seat.slow_factor:g} times" if seat.slow_factor != 1 else ""
    activity = ", ".join(filter(None, (slowed, seat.activity)))
    return [*place, memory, seat.step, rate, activity]


def _incidents_line(incidents: Sequence[Incident]) -> str:
    """How many incidents of which kind there were, and the last one."""
    numbers = Counter(incident.kind for incident in incidents)
    counts = ", ".join(f"{number} {kind}" for kind, number in numbers.items())
    last = incidents[-1]
    slots = f"{'slot' if len(last.slots) == 1 else 'slots'} {format_ranks(last.slots)}"
    cause = f" ({last.cause})" if last.cause else ""
    after = "no new one yet" if last.generation_after is None else last.generation_after
    then = f"generation {last.generation_before} -> {after}"
    return f"Incidents: {counts}; last: {slots} {last.kind}{cause}, {then}"


def _plain_text(output: RankOutput) -> str:
    """All but stderr, in order; displays and results of text alone stand on lines of their own."""
    pieces: list[str] = []
    is_at_line_start = True
    for item in output.items:
        if isinstance(item, Text):
            piece = item.text if item.stream == "stdout" else ""
        elif _rich_data(item):
            continue
        else:
            piece = str(item.data.get("text/plain", ""))
            piece = ("" if is_at_line_start else "\n") + piece + "\n" if piece else ""
        if piece:
            pieces.append(piece)
            is_at_line_start = piece.endswith("\n")
    return _settled("".join(pieces))


def _stderr_text(output: RankOutput) -> str:
    items = (item for item in output.items if isinstance(item, Text) and item.stream == "stderr")
    return _settled("".join(item.text for item in items))


def _settled(text: str) -> str:
    """Of a line that was written over after carriage returns, its last state."""
    if "\r" not in text:
        return text
    return "\n".join(map(_last_state, text.replace("\r\n", "\n").split("\n")))


def _last_state(line: str) -> str:
    if "\r" not in line:
        return line
    last = next((state for state in reversed(line.split("\r")) if state), "")
    return last if last.strip() else ""  # blanks wipe a progress bar out


def _bounded(lines: list[str]) -> list[str]:
    num_left_out = len(lines) - MAX_LINES
    if num_left_out <= 0:
        return lines
    half = MAX_LINES // 2
    note = f"[{num_left_out} lines left out here; the log of the rank's slot has them all]"
    return [*lines[:half], note, *lines[-half:]]


def _rich_data(item: Rich) -> dict[str, Any]:
    """What a page can draw of an item, beyond text."""
    return {k: v for k, v in item.data.items() if k not in {"text/plain", _NO_MODEL_HERE}}


def _show_rich(progress: Progress) -> None:
    """Show each picture, table and so on as an output of its own, after a heading; equal ones once.

    Text forms are not compared: the default one of an object holds its address.
    """
    groups: dict[str, list[int]] = {}
    bundles: dict[str, list[Rich]] = {}
    for rank, output in sorted(progress.ranks.items()):
        items = [item for item in output.items if isinstance(item, Rich) and _rich_data(item)]
        if items:
            content = [[_rich_data(item), dict(item.metadata)] for item in items]
            key = json.dumps(content, sort_keys=True, default=repr)
            groups.setdefault(key, []).append(rank)
            bundles.setdefault(key, items)
    for key, ranks in groups.items():
        _publish({"text/plain": f"[{name_ranks(ranks)}]"})
        for item in bundles[key]:
            plain = {k: v for k, v in item.data.items() if k == "text/plain"}
            _publish({**plain, **_rich_data(item)}, dict(item.metadata))


def _publish(bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    display(bundle, raw=True, metadata=metadata)  # type: ignore[no-untyped-call]
