"""The command line, `nbdist COMMAND`. Loaded late on purpose: importing this does nothing."""

from __future__ import annotations

import argparse
import inspect
import os
import select
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = ("demo", "lab", "ps", "clean", "doctor", "replay", "bench")
"""Modules of this package. Each has `add_arguments(parser)` and `run(options) -> exit code`; its
docstring is its help."""

_FAILED = 1
_REFUSED = 2
_INTERRUPTED = 130
_UNREAD = 141
"""As of a command that a broken pipe's signal ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `nbdist`; default: those of this process.

    Returns:
        The exit code: 0 where all is well, 1 where something failed, 2 where the command makes no
        sense (argparse's own), 130 after Ctrl-C, 141 where whoever read its output, such as `head`,
        has left.
    """
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # when the interpreter ends nobody can catch what it raises
    except BrokenPipeError:
        if not _is_unread():
            raise
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is left to write goes there
        return _UNREAD


def _is_unread() -> bool:
    """Nobody reads what this process prints any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _main(argv: Sequence[str] | None) -> int:
    if sys.platform == "win32":
        print("nbdist does not run on Windows; use Linux, for instance under WSL 2")
        return _REFUSED
    # These load psutil and zmq; a mere import of this package need not.
    from nbdist.cli.table import printable
    from nbdist.errors import NbdistError

    parser = build_parser()
    options, extra = parser.parse_known_args(argv)
    if extra:  # the parser of all commands would print its own usage
        options.parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        return int(options.run(options))
    except (NbdistError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            raise
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            said = f"{error.strerror}: {error.filename}"
        said = "\n".join(map(printable, said.split("\n")))  # it may quote what a file holds
        print(f"nbdist {options.command}: {said}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from nbdist._version import __version__

    parser = argparse.ArgumentParser(
        prog="nbdist",
        description="Distributed training that a notebook drives.",
        epilog="`nbdist COMMAND --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands.required = True
    for name in _COMMANDS:
        module = import_module(f"nbdist.cli.{name}")
        text = inspect.cleandoc(module.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser
