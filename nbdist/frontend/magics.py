"""The magics: read a line, call the session, show what came of it.

Runs in the kernel, in the thread that runs the cell. `load` and `unload` serve `%load_ext` and
`%unload_ext`. Loads neither torch nor anything of the supervisor's and the engines' columns.
Everything is checked here before anything is sent.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class

from nbdist.errors import NbdistError, NotStarted, WrongState
from nbdist.frontend import rewriting, tracebacks
from nbdist.frontend.arguments import (
    as_count,
    as_devices,
    as_factor,
    as_hosts,
    as_name,
    as_seconds,
    as_text,
    magic,
    option,
    read_line,
)
from nbdist.frontend.display import (
    CellDisplay,
    is_live,
    show_line,
    show_seats,
    show_status,
    show_warnings,
)
from nbdist.frontend.rewriting import ModeMagics
from nbdist.frontend.run_magics import RunMagics
from nbdist.frontend.targets import name_ranks, parse_targets
from nbdist.frontend.variables import VariableMagics
from nbdist.session import start as session
from nbdist.session.status import crowding

if TYPE_CHECKING:
    from argparse import Namespace

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["DistMagics", "load", "unload"]

_RANKS_HELP = "0,2 or 1-3 or ::2 or all or !2 (all but 2); quoted if it has blanks or begins with -"

_NOT_PUSHED = {"ranks", "self"}
"""Names that `Cluster.push` takes for its own arguments."""


def load(shell: InteractiveShell) -> None:
    """Register the magics, and the reading of `%%rank[...]`, in a shell; twice is once."""
    shell.register_magics(*_CLASSES)
    rewriting.install(shell)
    tracebacks.install(shell)


def unload(shell: InteractiveShell) -> None:
    """Take away what `load` added."""
    tracebacks.uninstall(shell)
    rewriting.uninstall(shell)
    for magics in _CLASSES:
        for kind, names in magics.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop(magics.__name__, None)


_ranks_option = partial(option, "-r", "--ranks", type=as_text, metavar="RANKS")
_CELL_OPTIONS = (
    option(
        "-t",
        "--timeout",
        type=as_seconds,
        metavar="SECONDS",
        help="end the cell after this time",
    ),
    option(
        "-o", "--output", type=as_name, metavar="NAME", help="variable that gets the CellResult"
    ),
    option("--once", action="store_true", help="do not replay it to engines that join later"),
    option("--async", dest="is_async", action="store_true", help="return at once (not there yet)"),
)


@magics_class
class DistMagics(Magics):
    """The magics for engines, cells and values, of one shell."""

    @magic(
        "line",
        option(
            "-n",
            "--num-engines",
            type=as_count,
            metavar="N",
            help="engines; default: one for each GPU, or else CPU core",
        ),
        option(
            "-g", "--devices", type=as_devices, metavar="0,1,3", help="GPUs to use, one engine each"
        ),
        option(
            "--backend",
            choices=("auto", "gloo", "nccl"),
            default="auto",
            type=as_text,
            help="of torch.distributed",
        ),
        option(
            "--launcher",
            default="local",
            type=as_text,
            help="what starts the engines; default: local; others are not there yet",
        ),
        option(
            "--hosts",
            type=as_hosts,
            default=[],
            metavar="A,B",
            help="further hosts; launchers that reach them are not there yet",
        ),
        option(
            "--policy",
            choices=("refill", "wait", "shrink", "raise"),
            default="refill",
            type=as_text,
            help="when an engine is lost; default: refill; wait and raise are not there yet",
        ),
        option("--keep", action="store_true", help="the engines outlive this kernel"),
        option("-v", "--verbose", action="store_true", help="show host and process id too"),
    )
    def dist_init(self, line: str) -> None:
        """Start the engines of this notebook, and list them: rank, slot, device."""
        args = read_line(self.dist_init, line)
        try:
            running = session.current()
        except NotStarted:
            pass
        else:
            ranks = name_ranks(range(running.world_size))
            show_line(f"Already running: {ranks}, generation {running.generation}.")
            show_warnings([running.trouble] if running.trouble else [])
            wanted = args.num_engines
            is_other = wanted is not None and wanted != running.world_size
            scale = f"%dist_scale {wanted} makes it {wanted}, " if is_other else ""
            show_line(f"Nothing was changed; {scale}%dist_shutdown ends it.")
            return
        try:
            cluster = session.start(
                args.num_engines,
                devices=args.devices,
                backend=args.backend,
                launcher=args.launcher,
                hosts=args.hosts,
                policy=args.policy,
                keep=args.keep,
            )
        except NbdistError:
            raise
        except ValueError as error:  # a setting that the session refuses, in words
            raise UsageError(str(error)) from error
        show_seats(cluster.status(), is_verbose=args.verbose)
        # Who starts more engines than there are cores says so here, and what a notebook shows of
        # its start is the same on every machine. %dist_status tells it, and so does %dist_scale.
        known = Counter(crowding(cluster.world_size))
        _show_new_warnings(cluster, known)

    @magic(
        "cell",
        _ranks_option(help=_RANKS_HELP),
        *_CELL_OPTIONS,
    )
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all ranks, or on those named; it fails if it fails on any of them.

        `%%rank[0,2-3]` is the same as `%%distributed -r 0,2-3`.
        """
        args = read_line(self.distributed, line)
        self._run_cell(args, cell)

    @magic("cell", option("ranks", type=as_text, metavar="RANKS", help=_RANKS_HELP), *_CELL_OPTIONS)
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on the ranks that are named: `%%rank[0,2-3]`, or `%%rank 0,2-3`.

        The same as `%%distributed -r 0,2-3`.
        """
        self._run_cell(read_line(self.rank, line), cell)

    @magic("line")
    def sync(self, line: str) -> None:
        """Wait until every rank has come to a barrier."""
        read_line(self.sync, line)
        cluster = session.current()
        cluster.sync()
        show_line(f"Barrier passed by {name_ranks(range(cluster.world_size))}.")

    @magic("line")
    def dist_status(self, line: str) -> None:
        """List the ranks with slot, state, generation, device, memory, step and samples a second.

        Below it: what a newcomer lacks, the last run, the incidents so far, and warnings.
        """
        read_line(self.dist_status, line)
        cluster = session.current()
        run = cluster.runs[-1].summary() if cluster.runs else ""
        show_status(cluster.status(), cluster.incidents, run=run)
        show_warnings(cluster.warnings)

    @magic(
        "line",
        option("names", nargs="+", type=as_name, metavar="NAME", help="variables of this notebook"),
        _ranks_option(help=_RANKS_HELP),
    )
    def dist_push(self, line: str) -> None:
        """Send variables of this notebook to the engines, under the same names."""
        args = read_line(self.dist_push, line)
        for name in args.names:
            if name not in self._names:
                message = f"this notebook has no variable {name!r}; nothing was pushed"
                raise UsageError(message)
            if name in _NOT_PUSHED:
                message = f"{name!r} cannot be pushed under that name; give it another"
                raise UsageError(message)
        cluster = session.current()
        ranks = _ranks(args.ranks, cluster)
        cluster.push(ranks=ranks, **{name: self._names[name] for name in args.names})
        whom = name_ranks(range(cluster.world_size) if ranks is None else ranks)
        show_line(f"Pushed {', '.join(args.names)} to {whom}.")

    @magic(
        "line",
        option("name", type=as_name, metavar="NAME", help="variable of the engines"),
        _ranks_option(help=_RANKS_HELP),
        option("-f", "--force", action="store_true", help="overwrite a variable of this notebook"),
    )
    def dist_pull(self, line: str) -> None:
        """Fetch a variable from the engines, under the same name: a dict of rank and value.

        If -r names one rank, it is that rank's value itself.
        """
        args = read_line(self.dist_pull, line)
        if args.name in self._names and not args.force:
            message = f"this notebook has a variable {args.name!r} already; -f overwrites it"
            raise UsageError(message)
        cluster = session.current()
        ranks = _ranks(args.ranks, cluster)
        values = cluster.pull(args.name, ranks=ranks)
        one = ranks[0] if ranks is not None and len(ranks) == 1 else None
        self._names[args.name] = values if one is None else values[one]
        show_line(f"Pulled {args.name} from {name_ranks(values)}.")

    @magic(
        "line",
        option("ranks", nargs="+", type=as_text, metavar="RANK", help=_RANKS_HELP),
        option(
            "--signal",
            choices=("KILL", "TERM", "STOP"),
            default="KILL",
            type=as_text,
            help="default: KILL",
        ),
    )
    def dist_kill(self, line: str) -> None:
        """Take engines down, to watch the recovery.

        Returns when their exit is recorded; STOP: when the signal is delivered.
        """
        args = read_line(self.dist_kill, line)
        cluster = session.current()
        ranks = _targets(",".join(part.strip(",") for part in args.ranks), cluster)
        cluster.kill(ranks, signal=args.signal)
        show_line(f"Sent {args.signal} to {name_ranks(ranks)}.")

    @magic(
        "line",
        option("rank", type=as_text, metavar="RANK", help="such as 1, or 0,2"),
        option("factor", type=as_factor, metavar="FACTOR", help="1 ends it"),
    )
    def dist_slow(self, line: str) -> None:
        """Make a rank so many times as slow as it is, to watch a straggler."""
        args = read_line(self.dist_slow, line)
        cluster = session.current()
        ranks = _targets(args.rank, cluster)
        known = Counter(cluster.warnings)
        cluster.slow(ranks, args.factor)
        pace = "as quick as before" if args.factor == 1 else f"{args.factor:g} times as slow"
        show_line(f"Now {pace}: {name_ranks(ranks)}.")
        _show_new_warnings(cluster, known)

    @magic("line", option("size", type=as_count, metavar="N", help="engines that there shall be"))
    def dist_scale(self, line: str) -> None:
        """Grow or shrink the world to N ranks; returns when the new world is formed."""
        args = read_line(self.dist_scale, line)
        cluster = session.current()
        known = Counter(cluster.warnings)
        cluster.scale(args.size)
        show_line(
            f"Running: {name_ranks(range(cluster.world_size))}, generation {cluster.generation}."
        )
        _show_new_warnings(cluster, known)

    @magic("line")
    def dist_shutdown(self, line: str) -> None:
        """End everything that this notebook's cluster started, and nothing else."""
        read_line(self.dist_shutdown, line)
        session.current().shutdown()
        self._say_ended()

    @magic("line")
    def dist_reset(self, line: str) -> None:
        """Like %dist_shutdown, but also fine where nothing runs or the cluster is broken."""
        read_line(self.dist_reset, line)
        try:
            cluster = session.current()
        except NotStarted:
            show_line("No cluster runs.")
            self._end_mode()
            return
        try:
            cluster.shutdown()
        except NbdistError as error:
            show_line(f"The cluster did not end in order: {error}")
            self._end_mode()
        else:
            self._say_ended()

    def _say_ended(self) -> None:
        show_line("The cluster has ended.")
        self._end_mode()

    def _end_mode(self) -> None:
        """Without engines no plain cell could run."""
        assert self.shell is not None
        if rewriting.is_mode_on(self.shell):
            rewriting.set_mode(self.shell, is_on=False)
            show_line(rewriting.MODE_OFF)

    def _run_cell(self, args: Namespace, cell: str) -> None:
        """Run a cell with the options of its first line, and show it."""
        if args.is_async:
            raise WrongState("--async is not there yet; leave it out: the cell waits")
        cluster = session.current()
        ranks = _ranks(args.ranks, cluster)
        self._check_syntax(cell)
        shown = CellDisplay(headless=not is_live(self.shell))
        result = cluster.run(
            cell, ranks=ranks, timeout=args.timeout, once=args.once, watch=shown.update
        )
        if args.output:
            self._names[args.output] = result

    @property
    def _names(self) -> dict[str, Any]:
        """The variables of the notebook."""
        assert self.shell is not None
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _check_syntax(self, cell: str) -> None:
        """Raise the SyntaxError that every rank would raise, before anything is sent."""
        assert self.shell is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come from the engines, where the cell runs
            python = self.shell.transform_cell(cell)  # type: ignore[no-untyped-call]
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(python, "<distributed cell>", "exec", flags=flags, dont_inherit=True)


_CLASSES = (DistMagics, RunMagics, VariableMagics, ModeMagics)


def _ranks(text: str | None, cluster: session.Cluster) -> tuple[int, ...] | None:
    """The ranks of an option; None is all, those that join later too."""
    if text is None or text.strip() == "all":
        return None
    return _targets(text, cluster)


def _targets(text: str, cluster: session.Cluster) -> tuple[int, ...]:
    """The ranks that are selected; where the world is lost, there is none to be named."""
    cluster.check_alive()
    return parse_targets(text, cluster.world_size)


def _show_new_warnings(cluster: session.Cluster, known: Counter[str]) -> None:
    """What there is to warn of since."""
    show_warnings(list((Counter(cluster.warnings) - known).elements()))
