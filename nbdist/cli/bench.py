"""Measure starts, cells and recoveries, and hold them against their bounds.

Prints the machine and a table. A ratio is void where its reference, measured twice, differs from
itself by more than 5 %: the machine was too busy. Exit code 1 if a bound is missed. Engines run on
the CPU. Takes some ten minutes on two cores; run nothing beside it.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

BENCHMARKS = (
    "start",
    "roundtrip",
    "push",
    "loss",
    "raise",
    "supervisor",
    "scale",
    "shutdown",
    "recovery",
    "steps",
    "sums",
    "views",
    "pipelines",
    "divided",
    "serving",
    "telemetry",
    "memory",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist bench`; those of `python -m nbdist.bench` are the same."""
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        metavar="NAME",
        help=f"measure these alone: {', '.join(BENCHMARKS)}",
    )
    parser.add_argument(
        "--rounds", type=_at_least_one, metavar="N", help="default 4, or 1 with --quick"
    )
    parser.add_argument("--quick", action="store_true", help="few values: to see that it works")
    parser.add_argument("--json", metavar="FILE", help="write everything to a file too")


def run(options: Namespace) -> NoReturn:
    """Become `python -m nbdist.bench`, which this may not import; does not return."""
    words = command(options)
    os.execv(words[0], words)  # noqa: S606 - our own interpreter, no shell wanted


def command(options: Namespace) -> list[str]:
    """The command line that runs the benchmarks with these options."""
    words = [sys.executable, "-m", "nbdist.bench"]
    if options.only:
        words += ["--only", *options.only]
    if options.rounds is not None:
        words += ["--rounds", str(options.rounds)]
    if options.quick:
        words.append("--quick")
    if options.json is not None:
        words += ["--json", options.json]
    return words


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        message = f"{text!r}: at least one round"
        raise ArgumentTypeError(message)
    return int(text)
