"""Distributed training that a notebook drives: engines are lost and come back, the variables stay.

In a notebook, `%load_ext nbdist` and then `%dist_init`; from Python, `nbdist.start()`. Importing
this package does nothing: what is heavy is loaded at its first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from nbdist._version import __version__
from nbdist.errors import (
    CellFailed,
    CellInterrupted,
    CheckpointUnreadable,
    EngineDied,
    FileUnwritable,
    GroupGone,
    NbdistError,
    NotStarted,
    OutOfMemory,
    RankError,
    RecordUnreadable,
    RecoveryFailed,
    RunEnded,
    SaveAbandoned,
    SegmentGone,
    StartFailed,
    TargetError,
    WrongState,
)

if TYPE_CHECKING:  # for type checkers only; at run time __getattr__ loads what is ours
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.session.cluster import Cluster
    from nbdist.session.outputs import CellResult
    from nbdist.session.start import current, start
    from nbdist.train.estimates import estimate

__all__ = [
    "CellFailed",
    "CellInterrupted",
    "CellResult",
    "CheckpointUnreadable",
    "Cluster",
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
    "__version__",
    "current",
    "estimate",
    "load_ipython_extension",
    "start",
    "unload_ipython_extension",
]

_LATE = {
    "CellResult": "nbdist.session.outputs",
    "Cluster": "nbdist.session.cluster",
    "current": "nbdist.session.start",
    "estimate": "nbdist.train.estimates",
    "start": "nbdist.session.start",
}
"""Public name -> the module that has it."""


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; called by `%load_ext nbdist`. Starts nothing."""
    if sys.platform == "win32":
        _refuse_windows()
    from nbdist.frontend import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away; called by `%unload_ext nbdist`. A cluster that runs goes on."""
    from nbdist.frontend import magics

    magics.unload(shell)


def _refuse_windows(*_args: object, **_options: object) -> NoReturn:
    raise StartFailed("nbdist does not run on Windows; use Linux, for instance under WSL 2")


def __getattr__(name: str) -> object:
    if name not in _LATE:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    if name == "start" and sys.platform == "win32":
        return _refuse_windows
    from importlib import import_module

    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
