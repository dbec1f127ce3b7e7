"""Open JupyterLab on the first tutorial, or on this folder where there is none.

A tutorial that is our own is signed first: JupyterLab shows live views only where it trusts a
notebook, and this one comes with outputs.

What stands after `--` goes to JupyterLab: `nbdist lab -- --no-browser --port 9999`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import nbdist

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence


CHECKOUT = Path(nbdist.__file__).parents[1]
"""Where our own tutorials are, if they are here."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist lab`."""
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="passed to JupyterLab")


def run(options: Namespace) -> NoReturn:
    """Become JupyterLab; does not return."""
    place = first_tutorial()
    if place.is_relative_to(CHECKOUT):
        sign(place)
    words = command(place, options.options, is_root=os.geteuid() == 0)
    print(" ".join(words), flush=True)
    os.execv(words[0], words)  # noqa: S606 - our own interpreter, no shell wanted


def command(place: Path, options: Sequence[str], *, is_root: bool) -> list[str]:
    """The command line that opens JupyterLab on a notebook, or on a folder."""
    words = [sys.executable, "-m", "jupyterlab", str(place)]
    if is_root and "--allow-root" not in options:
        words.append("--allow-root")
    return [*words, *options]


def sign(notebook: Path) -> bool:
    """Have JupyterLab trust a notebook as it is, as `jupyter trust` does; False: it cannot be."""
    try:
        # It comes with JupyterLab, which may not be there.
        nbformat, signing = map(import_module, ("nbformat", "nbformat.sign"))
    except ImportError:
        return False
    try:
        signing.NotebookNotary().sign(nbformat.read(notebook, as_version=4))
    except OSError:  # nowhere to keep signatures: it is opened all the same
        return False
    return True


def first_tutorial() -> Path:
    """The first notebook of `notebooks` here, else of the checkout, else this folder itself."""
    for folder in (Path.cwd() / "notebooks", CHECKOUT / "notebooks"):
        for notebook in sorted(folder.glob("*.ipynb")):
            return notebook
    return Path.cwd()
