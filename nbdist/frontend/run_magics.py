"""The magics that drive a training run.

Runs in the kernel, in the thread that runs the cell. The orders go to the supervisor, which carries
them out whatever the kernel does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

from IPython.core.magic import Magics, magics_class

from nbdist.errors import WrongState
from nbdist.frontend.arguments import (
    as_count,
    as_name,
    as_setting,
    as_text,
    as_view,
    magic,
    option,
    read_line,
)
from nbdist.frontend.display import LiveText, is_live, show_line, show_value, show_warnings
from nbdist.protocol.tables import View
from nbdist.session import start as session

if TYPE_CHECKING:
    from nbdist.session.run import Run

__all__ = ["RunMagics"]

DEFAULT_STEPS = 100
_VIEWS = ", ".join(get_args(View))
_WHICH = "the engines' variable with the trainer; default: the one that trains, or the only one"
SHOW_PERIOD_S = 0.5


@magics_class
class RunMagics(Magics):
    """The magics for training runs, of one shell."""

    @magic(
        "line",
        option("name", type=as_name, metavar="NAME", help="the engines' variable with the trainer"),
        option(
            "--steps",
            type=as_count,
            default=DEFAULT_STEPS,
            metavar="N",
            help=f"train so many more committed steps; default: {DEFAULT_STEPS}",
        ),
        option("--wait", action="store_true", help="show how far it is, until it is over"),
    )
    def dist_train(self, line: str) -> None:
        """Train with the trainer that a variable of the engines holds; returns at once.

        With --wait it returns when the run is over; an interrupt then ends the wait, not the run.
        """
        args = read_line(self.dist_train, line)
        run = session.current().train(args.name, steps=args.steps)
        if args.wait:
            self._follow(run)
            return
        show_line(
            f"Training {args.name} from step {run.first_step} to {run.target}. %dist_status shows "
            "how far it is; %dist_pause, %dist_step, %dist_set and %dist_stop drive it."
        )

    @magic(
        "line",
        option("steps", nargs="?", type=as_count, default=1, metavar="N", help="default: 1"),
    )
    def dist_step(self, line: str) -> None:
        """Train N more steps of the current run, then pause, to look at what they did."""
        args = read_line(self.dist_step, line)
        run = _current_run()
        run.step(args.steps)
        show_line(run.summary())

    @magic("line")
    def dist_pause(self, line: str) -> None:
        """Let the current run stand at its next step boundary; %dist_resume lets it go on."""
        read_line(self.dist_pause, line)
        run = _current_run()
        run.pause()
        show_line(run.summary())

    @magic("line")
    def dist_resume(self, line: str) -> None:
        """Let the current run go on after a pause."""
        read_line(self.dist_resume, line)
        run = _current_run()
        run.resume()
        show_line(run.summary())

    @magic("line")
    def dist_stop(self, line: str) -> None:
        """End the current run at its next step boundary; its steps and the trainer stay."""
        read_line(self.dist_stop, line)
        run = _current_run()
        run.stop()
        show_line(run.summary())

    @magic(
        "line",
        option("settings", nargs="+", type=as_setting, metavar="lr=X", help="the new base rate"),
    )
    def dist_set(self, line: str) -> None:
        """Change the learning rate of the current run at its next step boundary, on all ranks."""
        args = read_line(self.dist_set, re.sub(r"\s*=\s*", "=", line))
        settings = dict(args.settings)
        _current_run().set(**settings)
        changes = ", ".join(f"{name}={value:g}" for name, value in settings.items())
        show_line(f"From the next step on: {changes}.")

    @magic(
        "line",
        option("views", nargs="*", type=as_view, metavar="VIEW", help=f"of {_VIEWS}"),
    )
    def dist_dashboard(self, line: str) -> None:
        """Live views of the run that goes on, with buttons to kill and drive; none named: all."""
        args = read_line(self.dist_dashboard, line)
        show_value(session.current().dashboards.open(*args.views))

    @magic(
        "line",
        option("path", type=as_text, metavar="PATH", help="folder for checkpoints"),
        option("name", nargs="?", type=as_name, metavar="NAME", help=_WHICH),
        option(
            "--keep",
            type=as_count,
            metavar="N",
            help="so many of the newest stay, 2 or more; default: all",
        ),
    )
    def dist_save(self, line: str) -> None:
        """Save a trainer's state between two steps; a run goes on while it is written.

        It can be loaded by another number of ranks, and with another strategy.
        """
        args = read_line(self.dist_save, line)
        saved = session.current().save(args.path, args.name, keep=args.keep)
        show_line(
            f"Saved {saved.name} at step {saved.step} in {args.path}: "
            f"{saved.num_bytes / 1e6:.3g} MB, whole and on disk."
        )

    @magic(
        "line",
        option("path", type=as_text, metavar="PATH", help="folder for checkpoints, or one of them"),
        option("name", nargs="?", type=as_name, metavar="NAME", help=_WHICH),
    )
    def dist_load(self, line: str) -> None:
        """Load the newest checkpoint that is whole, whatever ranks and strategy it is of."""
        args = read_line(self.dist_load, line)
        loaded = session.current().load(args.path, args.name)
        show_line(f"Loaded {args.path}: {loaded.name} stands at step {loaded.step}.")
        show_warnings(list(loaded.notes))

    def _follow(self, run: Run) -> None:
        """Show how far a run is, until it is over."""
        shown = LiveText(headless=not is_live(self.shell))
        try:
            while not _is_over_soon(run):
                shown.show(str(run), done=False)
        except KeyboardInterrupt:  # also one that came between two waits
            raise run.detached() from None
        finally:
            shown.show(run.summary(), done=True)


def _current_run() -> Run:
    """The last run; the supervisor refuses orders to one that is over."""
    runs = session.current().runs
    if not runs:
        raise WrongState("no run has been begun on this cluster; %dist_train begins one")
    return runs[-1]


def _is_over_soon(run: Run) -> bool:
    """Wait a moment for the end of a run; raises what it failed with."""
    try:
        _ = run.wait(SHOW_PERIOD_S)
    except TimeoutError:
        return False
    return True
