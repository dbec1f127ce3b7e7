"""The magics: read a line, call the session, show what came of it.

Runs in the kernel, in the thread that runs the cell. `load` and `unload` serve `%load_ext` and
`%unload_ext`. Loads neither torch nor anything of the supervisor's and the engines' columns.
Everything is checked here before anything is sent.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from nbdist.errors import NbdistError, NotStarted, WrongState
from nbdist.frontend.display import (
    CellDisplay,
    is_live,
    show_line,
    show_seats,
    show_status,
    show_warnings,
)
from nbdist.frontend.targets import name_ranks, parse_targets
from nbdist.session import start as session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["DistMagics", "load", "unload"]

Method = TypeVar("Method", bound=Callable[..., None])

_RANK_CELL = re.compile(r"%%rank(?:\[(?P<ranks>[^\]\n]*)\]|(?P<unclosed>\[[^\n]*))")
_RANKS_HELP = "0,2 or 1-3 or ::2 or all or !2 (all but 2); quoted if it has blanks or begins with -"

_NOT_PUSHED = {"ranks", "self"}
"""Names that `Cluster.push` takes for its own arguments."""


def load(shell: InteractiveShell) -> None:
    """Register the magics, and the reading of `%%rank[...]`, in a shell; twice is once."""
    shell.register_magics(DistMagics)
    if rewrite_rank_cell not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(rewrite_rank_cell)


def unload(shell: InteractiveShell) -> None:
    """Take away what `load` added."""
    if rewrite_rank_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(rewrite_rank_cell)
    for kind, names in DistMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(DistMagics.__name__, None)


def rewrite_rank_cell(lines: list[str]) -> list[str]:
    """Turn `%%rank[0,2] -t 5` into `%%distributed -r "0,2" -t 5`; other cells stay as they are.

    IPython by itself finds no magic by the first spelling.
    """
    found = _RANK_CELL.match(lines[0]) if lines else None
    if found is None:
        return lines
    # Where the closing bracket is missing, the opening one is kept: to be refused, not guessed.
    ranks = (found["ranks"] or found["unclosed"] or "").replace('"', "'")
    return [f'%%distributed -r "{ranks}"{lines[0][found.end() :]}', *lines[1:]]


def _option(*names: str, **settings: object) -> argument:
    """One argument of a magic, as argparse's `add_argument` takes it."""
    return argument(*names, **settings)  # type: ignore[no-untyped-call]


def _magic(kind: Literal["line", "cell"], *arguments: argument) -> Callable[[Method], Method]:
    """Register a method as a magic with these arguments; its docstring becomes its help."""

    def mark(method: Method) -> Method:
        marked: Any = (line_magic if kind == "line" else cell_magic)(method)
        for one in reversed(arguments):
            marked = one(marked)
        with_parser: Method = magic_arguments()(marked)  # type: ignore[no-untyped-call]
        return with_parser

    return mark


def _text(raw: str) -> str:
    """An argument without the quotes that IPython leaves around it."""
    return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'" else raw


def _count(raw: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", _text(raw)) or int(_text(raw)) < 1:
        message = f"{raw} is not a whole number of at least 1"
        raise ArgumentTypeError(message)
    return int(_text(raw))


def _seconds(raw: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", _text(raw)) or float(_text(raw)) <= 0:
        message = f"{raw} is not a number of seconds above 0"
        raise ArgumentTypeError(message)
    return float(_text(raw))


def _devices(raw: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", _text(raw)):
        message = f"{raw} is not a list of device numbers such as 0,1,3"
        raise ArgumentTypeError(message)
    return [int(index) for index in _text(raw).split(",")]


def _hosts(raw: str) -> list[str]:
    return [host.strip() for host in _text(raw).split(",") if host.strip()]


def _name(raw: str) -> str:
    if not _text(raw).isidentifier() or keyword.iskeyword(_text(raw)):
        message = f"{raw} is not a name that a variable can have"
        raise ArgumentTypeError(message)
    return _text(raw)


_ranks_option = partial(_option, "-r", "--ranks", type=_text, metavar="RANKS")


@magics_class
class DistMagics(Magics):
    """All magics of nbdist, of one shell."""

    @_magic(
        "line",
        _option(
            "-n",
            "--num-engines",
            type=_count,
            metavar="N",
            help="engines; default: one for each GPU, or else CPU core",
        ),
        _option(
            "-g", "--devices", type=_devices, metavar="0,1,3", help="GPUs to use, one engine each"
        ),
        _option(
            "--backend",
            choices=("auto", "gloo", "nccl"),
            default="auto",
            type=_text,
            help="of torch.distributed",
        ),
        _option("--launcher", default="local", type=_text, help="what starts the engines"),
        _option(
            "--hosts",
            type=_hosts,
            default=[],
            metavar="A,B",
            help="further hosts, for launchers that reach them",
        ),
        _option(
            "--policy",
            choices=("refill", "wait", "shrink", "raise"),
            default="refill",
            type=_text,
            help="what happens when an engine is lost; default: refill",
        ),
        _option("--keep", action="store_true", help="the engines outlive this kernel"),
        _option("-v", "--verbose", action="store_true", help="show host and process id too"),
    )
    def dist_init(self, line: str) -> None:
        """Start the engines of this notebook, and list them: rank, slot, device."""
        args = self._read(self.dist_init, line)
        try:
            running = session.current()
        except NotStarted:
            pass
        else:
            ranks = name_ranks(range(running.world_size))
            show_line(f"Already running: {ranks}, generation {running.generation}.")
            show_warnings([running.trouble] if running.trouble else [])
            show_line("Nothing was changed; %dist_shutdown ends it.")
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
        show_warnings(cluster.warnings)

    @_magic(
        "cell",
        _ranks_option(help=_RANKS_HELP),
        _option(
            "-t", "--timeout", type=_seconds, metavar="SECONDS", help="end the cell after this time"
        ),
        _option(
            "-o", "--output", type=_name, metavar="NAME", help="variable that gets the CellResult"
        ),
        _option("--once", action="store_true", help="do not replay it to engines that join later"),
        _option(
            "--async", dest="is_async", action="store_true", help="return at once (not there yet)"
        ),
    )
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all ranks, or on those named; it fails if it fails on any of them.

        `%%rank[0,2-3]` is the same as `%%distributed -r 0,2-3`.
        """
        args = self._read(self.distributed, line)
        if args.is_async:
            raise WrongState("%%distributed --async is not there yet; leave it out: the cell waits")
        cluster = session.current()
        ranks = _ranks(args.ranks, cluster)
        self._check_syntax(cell)
        show_warnings([cluster.trouble] if cluster.trouble else [])
        shown = CellDisplay(headless=not is_live(self.shell))
        result = cluster.run(
            cell, ranks=ranks, timeout=args.timeout, once=args.once, watch=shown.update
        )
        if args.output:
            self._names[args.output] = result

    @_magic("line")
    def sync(self, line: str) -> None:
        """Wait until every rank has come to a barrier."""
        self._read(self.sync, line)
        cluster = session.current()
        cluster.sync()
        show_line(f"Barrier passed by {name_ranks(range(cluster.world_size))}.")

    @_magic("line")
    def dist_status(self, line: str) -> None:
        """List the ranks with slot, state, generation, device, memory, step and samples a second.

        Below it: what a newcomer could not be given, and the incidents so far.
        """
        self._read(self.dist_status, line)
        cluster = session.current()
        show_status(cluster.status(), cluster.incidents)

    @_magic(
        "line",
        _option("names", nargs="+", type=_name, metavar="NAME", help="variables of this notebook"),
        _ranks_option(help=_RANKS_HELP),
    )
    def dist_push(self, line: str) -> None:
        """Send variables of this notebook to the engines, under the same names."""
        args = self._read(self.dist_push, line)
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

    @_magic(
        "line",
        _option("name", type=_name, metavar="NAME", help="variable of the engines"),
        _ranks_option(help=_RANKS_HELP),
        _option("-f", "--force", action="store_true", help="overwrite a variable of this notebook"),
    )
    def dist_pull(self, line: str) -> None:
        """Fetch a variable from the engines, under the same name: a dict of rank and value.

        If -r names one rank, it is that rank's value itself.
        """
        args = self._read(self.dist_pull, line)
        if args.name in self._names and not args.force:
            message = f"this notebook has a variable {args.name!r} already; -f overwrites it"
            raise UsageError(message)
        cluster = session.current()
        ranks = _ranks(args.ranks, cluster)
        values = cluster.pull(args.name, ranks=ranks)
        one = ranks[0] if ranks is not None and len(ranks) == 1 else None
        self._names[args.name] = values if one is None else values[one]
        show_line(f"Pulled {args.name} from {name_ranks(values)}.")

    @_magic(
        "line",
        _option("ranks", nargs="+", type=_text, metavar="RANK", help=_RANKS_HELP),
        _option(
            "--signal",
            choices=("KILL", "TERM", "STOP"),
            default="KILL",
            type=_text,
            help="default: KILL",
        ),
    )
    def dist_kill(self, line: str) -> None:
        """Take engines down, to watch the recovery.

        Returns when their exit is recorded; STOP: when the signal is delivered.
        """
        args = self._read(self.dist_kill, line)
        cluster = session.current()
        ranks = parse_targets(",".join(part.strip(",") for part in args.ranks), cluster.world_size)
        cluster.kill(ranks, signal=args.signal)
        show_line(f"Sent {args.signal} to {name_ranks(ranks)}.")

    @_magic("line", _option("size", type=_count, metavar="N", help="engines that there shall be"))
    def dist_scale(self, line: str) -> None:
        """Grow or shrink the world to N ranks; returns when the new world is formed."""
        args = self._read(self.dist_scale, line)
        cluster = session.current()
        known = Counter(cluster.warnings)
        cluster.scale(args.size)
        show_line(
            f"Running: {name_ranks(range(cluster.world_size))}, generation {cluster.generation}."
        )
        show_warnings(list((Counter(cluster.warnings) - known).elements()))

    @_magic("line")
    def dist_shutdown(self, line: str) -> None:
        """End everything that this notebook's cluster started, and nothing else."""
        self._read(self.dist_shutdown, line)
        session.current().shutdown()
        show_line("The cluster has ended.")

    @_magic("line")
    def dist_reset(self, line: str) -> None:
        """Like %dist_shutdown, but also fine where nothing runs or the cluster is broken."""
        self._read(self.dist_reset, line)
        try:
            cluster = session.current()
        except NotStarted:
            show_line("No cluster runs.")
            return
        try:
            cluster.shutdown()
        except NbdistError as error:
            show_line(f"The cluster did not end in order: {error}")
        else:
            show_line("The cluster has ended.")

    @property
    def _names(self) -> dict[str, Any]:
        """The variables of the notebook."""
        assert self.shell is not None
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _read(self, method: Callable[..., None], line: str) -> Namespace:
        """The arguments of a magic; raises UsageError."""
        try:
            args = parse_argstring(method, line)  # type: ignore[no-untyped-call]
        except ValueError as error:  # from shlex: a quotation without its end
            message = f"cannot read {line.strip()!r}: {str(error).lower()}"
            raise UsageError(message) from error
        assert isinstance(args, Namespace)
        return args

    def _check_syntax(self, cell: str) -> None:
        """Raise the SyntaxError that every rank would raise, before anything is sent."""
        assert self.shell is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come from the engines, where the cell runs
            python = self.shell.transform_cell(cell)  # type: ignore[no-untyped-call]
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(python, "<distributed cell>", "exec", flags=flags, dont_inherit=True)


def _ranks(text: str | None, cluster: session.Cluster) -> tuple[int, ...] | None:
    """The ranks of an option; None is all, those that join later too."""
    if text is None or text.strip() == "all":
        return None
    return parse_targets(text, cluster.world_size)
