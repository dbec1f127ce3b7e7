"""One tree of errors, each with what happened, where, and what to do next.

Used on every floor; imports nothing of nbdist. Errors of other packages are turned into these at
the border where they enter (`session.cells` for engines, `session.link` for the supervisor,
`engine.group` for torch.distributed).
"""

from __future__ import annotations

from opcode import opmap
from traceback import clear_frames
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = [
    "CellFailed",
    "CellInterrupted",
    "CheckpointUnreadable",
    "EngineDied",
    "FileUnwritable",
    "GroupGone",
    "NbdistError",
    "NotStarted",
    "OutOfMemory",
    "RankError",
    "RecordUnreadable",
    "RecoveryFailed",
    "RunEnded",
    "SaveAbandoned",
    "SegmentGone",
    "StartFailed",
    "TargetError",
    "WrongState",
    "named_error",
]


class NbdistError(Exception):
    """Root of everything that nbdist raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows the message alone: our own frames say nothing to who made the mistake."""
        return [f"{type(self).__name__}: {self}"]


class NotStarted(NbdistError):
    """There is no cluster in this kernel. `%dist_init` or `nbdist.start()` makes one."""


class StartFailed(NbdistError):
    """Engines, controller or supervisor did not come up in time.

    The message names which, and the last lines of its log.
    """


class TargetError(NbdistError, ValueError):
    """A selection of ranks that cannot be read, or that names a rank outside the present world."""


class WrongState(NbdistError):
    """The order makes sense, but not now; the message says what has to happen first."""


class RecoveryFailed(NbdistError):
    """The world could not be brought back, for instance because no engine survived."""


class RunEnded(NbdistError):
    """The training run that a cell's own loop belongs to has ended on another rank.

    A consequence: the cause stands at the rank that it names.
    """


class GroupGone(NbdistError, RuntimeError):
    """A process group, mesh or wrapped model of an earlier generation was used.

    The message says how to make it again.
    """


class OutOfMemory(NbdistError, MemoryError):
    """Memory ran out in training; the message says what it was for, and what would need less."""


class RecordUnreadable(NbdistError, ValueError):
    """A file that is no record of a run, or one of a newer nbdist; the message says which."""


class FileUnwritable(NbdistError, OSError):
    """A file that was to be written and cannot be; the message says which, and why."""


class CheckpointUnreadable(NbdistError, ValueError):
    """There is no checkpoint that could be loaded, or it does not fit; the message says why."""


class SaveAbandoned(NbdistError):
    """A checkpoint came to nothing, for instance because an engine was lost while it wrote.

    Earlier ones are as they were, and so is the training.
    """


class SegmentGone(NbdistError):
    """What was pushed through shared memory cannot be reached from an engine; push it again."""


class RankError(NbdistError):
    """What one rank raised in a cell.

    Attributes:
        rank: rank in the world in which the cell ran.
        ename: class name of the engine's exception.
        evalue: its text.
        traceback: the engine's own formatted traceback, a list of lines.
    """

    def __init__(self, rank: int, ename: str, evalue: str, traceback: Sequence[str] = ()) -> None:
        super().__init__(f"{ename}: {evalue}" if evalue else ename)
        self.rank = rank
        self.ename = ename
        self.evalue = evalue
        self.traceback = list(traceback)


class CellFailed(NbdistError):
    """A distributed cell failed on at least one rank.

    Attributes:
        errors: rank -> `RankError` or `EngineDied`, the cause first; ranks that were only released
            are not in it.
        notes: further lines about the ranks that did not fail, for instance which were released
            from what.
    """

    def __init__(
        self,
        message: str,
        errors: Mapping[int, NbdistError] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.errors: dict[int, NbdistError] = dict(errors or {})
        self.notes = list(notes)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the kernel's own frames.

        Equal tracebacks are shown once, the cause first.
        """
        others = {rank: error for rank, error in self.errors.items() if error is not self}
        return _rendered(f"{type(self).__name__}: {self.args[0]}", others, self.notes)


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a cell, and its ranks were interrupted too.

    Attributes:
        errors: rank -> where it stopped.
        notes: further lines about ranks that did not stop by themselves.
    """

    def __init__(self, errors: Mapping[int, NbdistError], notes: Sequence[str] = ()) -> None:
        super().__init__("the cell was interrupted")
        self.errors, self.notes = dict(errors), list(notes)

    def _render_traceback_(self) -> list[str]:
        return _rendered(f"KeyboardInterrupt: {self}", self.errors, self.notes)


class EngineDied(CellFailed):
    """An engine's process ended while a cell ran on it.

    It is a `CellFailed` too: a cell that an engine's death ends raises the first such death, with
    `errors` holding all.

    Attributes:
        slot, rank: where.
        at: when, by the clock on the wall, to be looked for in other logs.
        signal: name of the signal that ended it ("SIGKILL"), or None.
        exit_code: its exit code, or None where a signal ended it.
        guess: likely cause in words.
        last_lines: end of the slot's log.
    """

    def __init__(
        self,
        *,
        slot: int,
        rank: int,
        pid: int | None = None,
        signal: str | None = None,
        exit_code: int | None = None,
        guess: str = "",
        last_lines: Sequence[str] = (),
        at: str = "",
    ) -> None:
        how = (
            f"ended by {signal}"
            if signal
            else f"exited with code {exit_code}"
            if exit_code is not None
            else "ended"
        )
        text = f"rank {rank} (slot {slot}, pid {pid}) {how}" + (f" at {at}" if at else "")
        if guess:
            text += f"; {guess}"
        if last_lines:
            text += "\nLast lines of its output:\n" + "\n".join(f"  {line}" for line in last_lines)
        super().__init__(text, {rank: self})
        self.slot = slot
        self.rank = rank
        self.pid = pid
        self.signal = signal
        self.exit_code = exit_code
        self.guess = guess
        self.at = at
        self.last_lines = list(last_lines)


def guess_cause(signal: str | None) -> str:
    """What most likely lies behind a signal, in words; empty where nothing can be said."""
    return {
        "SIGKILL": "by the system that ran out of memory, by somebody, or by its own code",
        "SIGSEGV": "a native extension read memory that is not its own",
        "SIGABRT": "a native library gave up",
        "SIGTERM": "asked to end from outside",
        "SIGBUS": "often /dev/shm or a mapped file that is full or was cut short",
    }.get(signal or "", "")


def is_raised_by_us(traceback: TracebackType) -> bool:
    """Whether code of ours has raised an error itself: not what it calls, and not by a mistake."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code, place = traceback.tb_frame.f_code, traceback.tb_lasti
    return _is_of(_OURS, traceback) and code.co_code[place] == opmap["RAISE_VARARGS"]


def forget(error: BaseException) -> None:
    """Let go of what an error's frames hold.

    Tensors and the group, that is: neither a model nor the next group has room while they live.
    """
    clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None


def leave_out_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without our lines, where it begins now; its links are changed.

    The line that has called us says more than ours; what we call is the user's. IPython's lines
    between a magic's and ours go with ours, but for the first of all, with which it runs cells.
    """
    lines: list[TracebackType] = []
    while traceback is not None:
        lines.append(traceback)
        traceback = traceback.tb_next
    kept: list[TracebackType] = []
    is_before_ours = False
    for place, line in reversed(list(enumerate(lines))):
        is_ours = _is_of(_OURS, line)
        is_between = is_before_ours and place > 0 and _is_of(_IPYTHONS, line)
        if not is_ours and not is_between:
            kept.append(line)
        is_before_ours = is_ours or is_between
    following: TracebackType | None = None
    for line in kept:
        line.tb_next, following = following, line
    return following


_OURS, _IPYTHONS = "nbdist", "IPython"
"""Packages whose lines are no news to the user."""


def _is_of(package: str, line: TracebackType) -> bool:
    """By the module: code that was generated there has no file."""
    name = str(line.tb_frame.f_globals.get("__name__"))
    return name == package or name.startswith(f"{package}.")


def named_error(kind: str, message: str) -> NbdistError:
    """An error of the class called `kind`, with `message`.

    So the kernel raises the error that an answer carries. A kind that is none of ours, for instance
    what the user's code raised on an engine, becomes a part of the message.
    """
    orders = (NotStarted, StartFailed, TargetError, WrongState, RecoveryFailed)
    others = (GroupGone, OutOfMemory, RunEnded, FileUnwritable, SaveAbandoned)
    for cls in (*orders, *others, CellFailed, NbdistError):
        if cls.__name__ == kind:
            return cls(message)
    return NbdistError(f"{kind}: {message}")


def headline(errors: Mapping[int, NbdistError]) -> str:
    """What ranks raised in one line: the first error, and all ranks that have raised one."""
    return f"{next(iter(errors.values())).args[0]} ({_ranks(list(errors))})"


def _rendered(
    first_line: str, errors: Mapping[int, NbdistError], notes: Sequence[str]
) -> list[str]:
    """The lines of an error of several ranks."""
    folded: dict[tuple[str, ...], list[int]] = {}
    for rank, error in errors.items():
        lines = error.traceback if isinstance(error, RankError) else []
        lines = lines or [str(error)]  # an interrupted rank has none
        folded.setdefault(tuple(lines), []).append(rank)
    out = [first_line]
    for traceback, ranks in folded.items():
        is_said = len(folded) == len(traceback) == 1 and traceback[0] in first_line
        out += [] if is_said else ["", f"On {_ranks(ranks)}:", *traceback]
    return [*out, *([""] if notes else []), *notes]


def _ranks(ranks: Sequence[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
