"""The names and defaults of the package `nbdistributed`: `%load_ext nbdist.compat`.

A notebook made for it runs with that one line changed. All else is nbdist's: a cell that fails on a
rank fails, and cells have no deadline. Runs in the kernel, in the thread that runs the cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, magics_class

from nbdist.errors import NotStarted
from nbdist.frontend import magics, rewriting
from nbdist.frontend.arguments import (
    as_count,
    as_devices,
    as_seconds,
    as_text,
    magic,
    option,
    read_line,
)
from nbdist.frontend.display import show_line, show_warnings
from nbdist.gpus import count_gpus
from nbdist.session import start as session

if TYPE_CHECKING:
    from argparse import Namespace

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

NUM_ENGINES = 2
BIND_NAMES = "gpu_id = device.index  # what torch.cuda knows it by; None: the CPU\n"
"""A cell that engines replay which join later."""


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register nbdist's magics, with `%dist_init` as that package has it. Starts nothing."""
    magics.load(shell)
    shell.register_magics(CompatMagics)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away. A cluster that runs goes on."""
    magics.unload(shell)
    shell.magics_manager.registry.pop(CompatMagics.__name__, None)


@magics_class
class CompatMagics(Magics):
    """What differs from nbdist's own magics, of one shell."""

    @magic(
        "line",
        option(
            "-n",
            "--num-processes",
            type=as_count,
            default=NUM_ENGINES,
            metavar="N",
            help=f"engines; default: {NUM_ENGINES}",
        ),
        option(
            "-g",
            "--gpu-ids",
            type=as_devices,
            metavar="0,1,3",
            help="GPUs to use, one engine each; the first N of them",
        ),
        option(
            "-a", "--master-addr", type=as_text, metavar="HOST", help="no effect: engines run here"
        ),
        option(
            "-t",
            "--timeout",
            type=as_seconds,
            metavar="SECONDS",
            help="no effect: cells have no deadline",
        ),
    )
    def dist_init(self, line: str) -> None:
        """Start the engines, bind `gpu_id` on them, and have every plain cell run on all ranks.

        As `nbdistributed` does. `%load_ext nbdist` has a %dist_init with more options.
        """
        args = read_line(self.dist_init, line)
        assert self.shell is not None
        is_new = not _is_running()
        devices, notes = _devices(args)
        chosen = f" -g {','.join(map(str, devices))}" if devices else ""
        magics.DistMagics(self.shell).dist_init(f"-n {args.num_processes}{chosen}")
        if not is_new:
            return
        _ = session.current().run(BIND_NAMES)
        show_warnings(notes)
        rewriting.set_mode(self.shell, is_on=True)
        show_line(rewriting.MODE_ON)


def _is_running() -> bool:
    try:
        _ = session.current()
    except NotStarted:
        return False
    return True


def _devices(args: Namespace) -> tuple[list[int], list[str]]:
    """The GPUs to use, none for the default; and which options have no effect here."""
    notes = []
    if args.master_addr not in {None, "localhost", "127.0.0.1"}:
        notes.append("--master-addr has no effect: the engines run on this host")
    if args.timeout is not None:
        notes.append(
            "--timeout has no effect: cells have no deadline; %%distributed -t SECONDS sets one"
        )
    devices = (args.gpu_ids or [])[: args.num_processes]
    if devices and not count_gpus().count:
        notes.append("--gpu-ids has no effect: there is no GPU, and the engines use the CPU")
        devices = []
    return devices, notes
