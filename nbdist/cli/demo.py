"""Train a language model on engines, kill one and stop another, and lose nothing: the main job.

Prints how far the run is once a second, then the incidents, a line for each check, and where the
report and the record of the run are. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

NUM_STEPS = 60


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist demo`."""
    parser.add_argument(
        "-n",
        dest="num_engines",
        type=partial(_at_least, 2, "engines"),
        default=4,
        metavar="ENGINES",
        help="how many engines; at least 2, default %(default)s",
    )
    parser.add_argument(
        "--steps",
        dest="num_steps",
        type=partial(_at_least, 24, "steps"),
        default=NUM_STEPS,
        metavar="STEPS",
        help="how many steps; at least 24, default %(default)s",
    )
    parser.add_argument(
        "--report",
        type=_writable,
        default=Path("nbdist-report.html"),
        metavar="FILE.html",
        help="where the report goes, and beside it FILE.jsonl, the record of the run; "
        "default %(default)s",
    )


def run(options: Namespace) -> int:
    """Play the demo."""
    # Late: it loads numpy, and `nbdist --help` should not.
    from nbdist.cli.main_job import MainJob

    return MainJob(
        num_engines=options.num_engines, num_steps=options.num_steps, report=options.report
    ).run()


def _writable(text: str) -> Path:
    """A file to be written when all is over: better to know now that it cannot be."""
    path = Path(text)
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ArgumentTypeError(f"{text!r}: no file can be written there")
    return path


def _at_least(least: int, what: str, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        message = f"{text!r}: the demo needs {least} {what} or more"
        raise ArgumentTypeError(message)
    return int(text)
