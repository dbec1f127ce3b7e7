"""Saves and loads the state of a trainer on all engines.

Runs in the thread of the kernel that calls; loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import checkpoints
from nbdist.errors import CellFailed, CheckpointUnreadable, NbdistError, RankError, WrongState
from nbdist.protocol import calls
from nbdist.protocol import saves as sv
from nbdist.session.run_end import Detached

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.session.engine_calls import EngineCalls
    from nbdist.session.run import Ask, Run


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, or loaded."""

    path: Path
    """Its own folder."""
    name: str
    """The engines' variable with the trainer."""
    step: int
    """Committed steps of the trainer."""
    num_bytes: int
    held_s: float
    """For so long training stood."""
    notes: tuple[str, ...] = ()
    """Why newer ones were passed over, and what does not go on as it was."""


class Saving:
    """The checkpoints of one cluster.

    Args:
        engine_calls: to its engines.
        ask: asks the supervisor.
        runs: the training runs of the cluster.
    """

    def __init__(self, engine_calls: EngineCalls, ask: Ask, runs: Callable[[], list[Run]]) -> None:
        self._calls, self._ask, self._runs = engine_calls, ask, runs

    def save(self, path: str | os.PathLike[str], name: str | None, keep: int | None) -> Checkpoint:
        """Have every rank copy its state, between two steps, and wait until it is on disk."""
        checkpoints.check_kept(keep)
        place = _absolute(path)
        with self._calls.between(None) as run:
            began_at = time.monotonic()
            found, step = self._stand(self._calls.call(calls.STANDING, run, name))
            generation = run.membership.generation
            with checkpoints.telling(place):
                partial = checkpoints.begin(place, step=step, generation=generation)
            try:
                self._calls.call(calls.SAVE, run, found, str(partial))
            except BaseException:  # an interrupt, too: nobody would commit it any more
                checkpoints.discard(partial)
                raise
            pids = tuple(run.membership.members[rank].pid for rank in run.ranks)
        held_s = time.monotonic() - began_at
        order = sv.CommitSave(
            partial=str(partial), step=step, generation=generation, pids=pids, keep=keep
        )
        try:
            done: sv.SaveCommitted = self._ask(order, None)
        except KeyboardInterrupt:
            raise Detached(f"step {step} is still being written to {place}, as it was") from None
        return Checkpoint(Path(done.folder), found, step, done.num_bytes, held_s)

    def load(self, path: str | os.PathLike[str], name: str | None) -> Checkpoint:
        """Have every rank read its part of the newest checkpoint, then all take it over."""
        going = [run for run in self._runs() if not run.is_over]
        if going:
            raise WrongState(
                f"a run goes on ({going[-1]}); run.stop() or %dist_stop ends it, then load"
            )
        found = checkpoints.newest(_absolute(path))
        with self._calls.between(None) as run:
            began_at = time.monotonic()
            told = self._calls.call(calls.STANDING, run, name)
            known = self._same_name(told)
            try:
                read = self._calls.call(calls.READ, run, known, str(found.path))
            except CellFailed as error:
                with contextlib.suppress(NbdistError):  # a rank that is gone has let go of it
                    self._calls.call(calls.TAKE, run, known, is_wanted=False)
                raise _of_checkpoint(error) from None
            self._calls.call(calls.TAKE, run, known, is_wanted=True)
        held_s = time.monotonic() - began_at
        step, notes = read[min(read)]
        passed_over = [f"passed over: {why}" for why in found.skipped]
        return Checkpoint(
            found.path, known, step, found.manifest.num_bytes, held_s, (*passed_over, *notes)
        )

    @staticmethod
    def _same_name(told: dict[int, Any]) -> str:
        names = {rank: name for rank, (name, _) in told.items()}
        if len(set(names.values())) > 1:
            raise WrongState(f"ranks have trainers of different names: {names}; say which is meant")
        return str(names[min(names)])

    def _stand(self, told: dict[int, Any]) -> tuple[str, int]:
        """The trainer's name and its step, which are the same on all ranks."""
        name = self._same_name(told)
        steps = {rank: int(step) for rank, (_, step) in told.items()}
        if len(set(steps.values())) > 1:
            raise WrongState(
                f"{name} has committed different numbers of steps, rank by rank: {steps}; a rank "
                "that was lost gets its state with the next step. Train a step, then save"
            )
        if steps[min(steps)] == 0:
            raise WrongState(
                f"{name} has not trained yet, and before the first step the ranks' weights may "
                "differ: train a step, then save"
            )
        return name, steps[min(steps)]


def _absolute(path: str | os.PathLike[str]) -> Path:
    """As the notebook means it: engines may have another working directory by now."""
    if not path or not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path is {path!r}; it must name a folder for checkpoints")
    return Path(path).expanduser().absolute()


def _of_checkpoint(error: CellFailed) -> CellFailed | CheckpointUnreadable:
    """Where all that is wrong is the checkpoint: that, once."""
    errors = [e for e in error.errors.values() if isinstance(e, RankError)]
    if errors and all(e.ename == CheckpointUnreadable.__name__ for e in errors):
        return CheckpointUnreadable(errors[0].evalue)
    return error
