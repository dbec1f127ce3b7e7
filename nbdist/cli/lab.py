"""Open JupyterLab on the first tutorial, or on this folder where there is none.

What stands after `--` goes to JupyterLab: `nbdist lab -- --no-browser --port 9999`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import nbdist

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist lab`."""
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="passed to JupyterLab")


def run(options: Namespace) -> NoReturn:
    """Become JupyterLab; does not return."""
    words = command(first_tutorial(), options.options, is_root=os.geteuid() == 0)
    print(" ".join(words), flush=True)
    os.execv(words[0], words)  # noqa: S606 - our own interpreter, no shell wanted


def command(place: Path, options: Sequence[str], *, is_root: bool) -> list[str]:
    """The command line that opens JupyterLab on a notebook, or on a folder."""
    words = [sys.executable, "-m", "jupyterlab", str(place)]
    if is_root and "--allow-root" not in options:
        words.append("--allow-root")
    return [*words, *options]


def first_tutorial() -> Path:
    """The first notebook of `notebooks` here, else of the checkout, else this folder itself."""
    checkout = Path(nbdist.__file__).parents[1]
    for folder in (Path.cwd() / "notebooks", checkout / "notebooks"):
        for notebook in sorted(folder.glob("*.ipynb")):
            return notebook
    return Path.cwd()
