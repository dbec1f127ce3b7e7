"""The trainer: what a user makes of a model, an optimizer and data, and trains.

Runs in the engine's main thread, or in any process that `fit` is called in. Making one does no
communication.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import checkpoints
from nbdist.engine import runs
from nbdist.errors import WrongState
from nbdist.train import agreement, checkpoint, loop, resume, snapshot
from nbdist.train.memory import explained, make_room, note
from nbdist.train.ports import Rows, SoloPort
from nbdist.train.recipe import Precision, Recipe
from nbdist.train.state import State
from nbdist.train.strategies import DataParallel, Strategy
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.service import Service
from nbdist.train.strategies.settling import Settling

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from nbdist.protocol.story import Evaluation
    from nbdist.train.evaluate import Evaluate
    from nbdist.train.ports import RunPort
    from nbdist.train.sampling import Tail
    from nbdist.train.step import Step


class Trainer:
    """Trains a model on all ranks of the present group, whichever those are.

    Args:
        model: a Module, whose weights are taken from rank 0 before the first step, or a function
            that returns one; it is called with the same random numbers on every rank.
        optimizer: from named parameters to an Optimizer, as
            `lambda named: torch.optim.AdamW(named, lr=3e-4)`.
        loss: `(output, target) ->` the mean over the samples given, or `(sum, count)`. The gradient
            is that of the sum of all sums over the sum of all counts, over the global batch.
        forward: instead of `loss`: `(model, batch) -> (sum, count)`.
        data: map-style, `data[i] -> (input, target)`, or a function that returns such a set.
        collate: from a list of samples to a batch; torch's default where None.
        num_workers: processes that fetch ahead; 0: fetch in place.
        tail: what becomes of samples that do not fill a batch at an epoch's end.
        global_batch: samples a step, over all ranks, however many there are.
        seed: of the order of the samples, and of everything random in a step.
        scheduler: from the optimizer to an LRScheduler, which steps once with each committed step.
        accumulate: batches in which a rank goes through its share of a step.
        clip_norm: largest norm of the global gradient.
        precision: "bf16": forward passes under autocast.
        evaluate: an evaluation every so many steps.
        strategy: how ranks share the work.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that a training is made of
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Callable[..., Optimizer],
        data: Any,
        *,
        loss: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        tail: Tail = "drop",
        global_batch: int,
        seed: int = 0,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: Precision = "float32",
        evaluate: Evaluate | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self._set_up(
            Recipe(
                model=model,
                optimizer=optimizer,
                loss=loss,
                forward=forward,
                data=data,
                collate=collate,
                num_workers=num_workers,
                tail=tail,
                global_batch=global_batch,
                seed=seed,
                scheduler=scheduler,
                accumulate=accumulate,
                clip_norm=clip_norm,
                precision=precision,
                evaluate=evaluate,
                strategy=strategy or DataParallel(),
            )
        )

    def _set_up(self, recipe: Recipe) -> None:
        make_room()
        try:
            self._state = State(recipe)
        except Exception as error:  # noqa: BLE001 - it is raised again, or what it became
            said = explained(error, recipe.strategy)
            try:
                raise said
            finally:
                del said  # or its frames hold it, and what they hold lives with them
        note(self, self._state)
        self._rows = Rows()
        self._evaluations: list[Evaluation] = []

    # ---- what it consists of

    @property
    def model(self) -> nn.Module:
        """The module itself; in a step's body, call it as you like."""
        return self._state.module

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. The trainer steps it."""
        return self._state.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler, where there is one. The trainer steps it."""
        return self._state.scheduler

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._state.step

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole state."""
        return self._state.recipe.strategy.is_replicated

    @property
    def has_twin(self) -> bool:
        """Whether another rank of the present group holds what this one holds."""
        return self._state.exchange.twins(*place_of_rank()).num_places > 1

    @property
    def leaves_by(self) -> int:
        """So many ranks may leave together, and as often as they are half of all; 0: one alone."""
        exchange = self._state.exchange
        return exchange.leaves_by if isinstance(exchange, Settling) else 0

    @property
    def num_skipped(self) -> int:
        """Committed steps in which nothing was applied: loss or gradient was not finite."""
        return self._state.num_skipped

    @property
    def num_lost_steps(self) -> int:
        """Steps of single ranks that all had committed, and that were lost with these ranks.

        Only where ranks train apart (`LocalSGD`, `DiLoCo`) are there any: those since the last
        outer step, of the whole model where it has fragments. And those of all ranks before an
        outer step that was not finite.
        """
        return self._state.exchange.num_lost

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates were applied so many others after the parameters that they are of.

        At a parameter server and its replica; elsewhere there are none.
        """
        exchange = self._state.exchange
        return dict(exchange.ages) if isinstance(exchange, Service) else {}

    @property
    def late_parts(self) -> dict[str, int]:
        """What became of parts of synchronous steps that were applied without them.

        Under "applied" those that went into a later step, under "dropped" those that went into
        none; at a parameter server with a quorum, and at its replica. Elsewhere there are none.
        """
        exchange = self._state.exchange
        late = exchange.late if isinstance(exchange, Service) else {}
        return {name: late[name] for name in ("applied", "dropped") if late.get(name)}

    @property
    def blocks(self) -> list[str]:
        """What the view "agreement" calls block 0, block 1 …, by the model's names.

        Where each rank holds something of its own there are none, and at first where ranks train
        apart.
        """
        return list(agreement.blocks(agreement.alike(self._state)))

    @property
    def history(self) -> dict[str, NDArray[Any]]:
        """What `fit` has trained in this process: name -> values, one for each committed step."""
        return self._rows.columns()

    @property
    def evaluations(self) -> list[Evaluation]:
        """What `fit` has evaluated in this process."""
        return list(self._evaluations)

    @property
    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """What `step.log` has noted in this process: name -> (step, value), the latest 10,000."""
        return {name: list(pairs) for name, pairs in self._state.logged.items()}

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<Trainer of {type(state.module).__name__}, step {state.step}, "
            f"{state.recipe.strategy!r}>"
        )

    def register(self, name: str, obj: Any) -> None:
        """Hand `obj` on with the trainer's state: to ranks that join, and into checkpoints.

        Args:
            name: the same on all ranks.
            obj: has `state_dict()` and `load_state_dict(state)`.
        """
        missing = [m for m in ("state_dict", "load_state_dict") if not hasattr(obj, m)]
        if missing:
            raise TypeError(
                f"register({name!r}, …): a {type(obj).__name__} has no {' and no '.join(missing)}; "
                "what is to be handed over needs both"
            )
        if self._state.registered.get(name, obj) is not obj:
            raise ValueError(f"register({name!r}, …): another object has this name already")
        self._state.registered[name] = obj

    # ---- training

    def fit(self, steps: int) -> dict[str, NDArray[Any]]:
        """Train so many more steps, without a supervisor; the history of these steps.

        Uses torch's default group where there is one, as under torchrun: every rank calls it.
        """
        _check_steps(steps)
        if runs.present() is not None:
            raise WrongState(
                "fit() trains without a supervisor, and here is one: cluster.train(name, steps) or "
                "%dist_train trains on all engines, trainer.steps(n) is for an own loop in a cell"
            )
        start = len(self._rows)
        port = SoloPort(self.step + steps, self._rows, self._evaluations)
        for step in loop.own(self._state, port):
            loop.train(step)
        return self._rows.columns(start)

    def steps(self, num: int) -> Iterator[Step]:
        """The next so many steps, for a loop of your own, which every rank goes through.

        `with step:` is the body; a step that is broken by a loss comes again. In a replay there are
        none.
        """
        _check_steps(num)
        return self._own_steps(num)

    def _own_steps(self, num: int) -> Iterator[Step]:
        present = runs.present()
        if present is not None and present.is_replaying:
            return
        port: RunPort
        if present is None:
            port = SoloPort(self.step + num, self._rows, self._evaluations)
        else:
            snapshot.check(self._state)
            port = present.enter(self, num)
        yield from loop.own(self._state, port)

    async def drive(self, port: RunPort) -> None:
        """Train as the port says; for the engine."""
        await loop.drive(self._state, port)

    # ---- the state as a whole

    def pack(self) -> bytes:
        """The whole state: for a rank that has none, or an older one."""
        return snapshot.pack(self._state)

    def unpack(self, data: bytes) -> None:
        """Take over a state that `pack` has made, on this or another rank."""
        snapshot.unpack(self._state, data)

    def digest(self) -> str:
        """Of the whole state; equal on all ranks between steps."""
        return snapshot.digest(self._state)

    def parameter_digest(self) -> str:
        """Of the parameters; equal on all ranks between steps."""
        return snapshot.parameter_digest(self._state)

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str], *, keep: int | None = None) -> Path | None:
        """Write a checkpoint, in a script: the folder of it under `path`.

        In a group, rank 0 writes, and the others return None. On engines, `cluster.save` and
        %dist_save do it.

        Args:
            path: the folder for checkpoints.
            keep: so many of the newest stay, 2 or more; None: all.

        Raises:
            WrongState: nothing is trained yet, or each rank holds something of its own.
            FileUnwritable: it cannot be written; earlier checkpoints are as they were.
        """
        if runs.present() is not None:
            raise WrongState("on engines, cluster.save(path) or %dist_save PATH saves a trainer")
        found = checkpoint.save(self._state, Path(path), keep)
        return None if found is None else found.path

    def load(self, path: str | os.PathLike[str]) -> list[str]:
        """Go on from the newest checkpoint that is whole, of any number of ranks and any strategy.

        Every rank calls this. Returns, in words, what does not go on as it was.

        Args:
            path: the folder for checkpoints, or one of them.

        Raises:
            CheckpointUnreadable: there is none, or it is of another model; nothing has changed.
            WrongState: it trains now.
        """
        loaded = self.read(checkpoints.newest(Path(path)).path)
        self.take(loaded)
        return loaded.notes

    def part(self, rank: int, num_ranks: int) -> checkpoint.Part:
        """What this rank is to write of a checkpoint, as it is now."""
        return checkpoint.Part(self._state, rank, num_ranks)

    def read(self, folder: Path) -> resume.Loaded:
        """Read what this rank holds of one checkpoint; changes nothing."""
        present = runs.present()
        port = None if present is None else present.port
        trains = port is not None and port.trainer is self and not port.is_over
        if trains or self._state.is_in_step:
            raise WrongState(
                "this trainer trains now; run.stop() or %dist_stop ends its run, then load"
            )
        return resume.read(self._state, folder)

    def take(self, loaded: resume.Loaded) -> None:
        """Have a state that was read. Every rank does it, or none."""
        resume.take(self._state, loaded)

    def owned(self) -> list[object]:
        """What the trainer carries: a rank that joins is given these through it."""
        state = self._state
        parts = [self, state.module, state.optimizer, *state.exchange.owned()]
        parts += [] if state.scheduler is None else [state.scheduler]
        return [*parts, *state.registered.values()]

    def __getstate__(self) -> dict[str, Any]:
        """As it is handed over whole: what it was made of, and its state. No group, no port."""
        state = self._state
        return {
            "recipe": state.recipe,
            "module": state.module,
            "registered": state.registered,
            "state": self.pack(),
        }

    def __setstate__(self, parts: dict[str, Any]) -> None:
        recipe: Recipe = parts["recipe"]
        self._set_up(dataclasses.replace(recipe, model=parts["module"]))
        self._state.registered.update(parts["registered"])
        self.unpack(parts["state"])


def _check_steps(steps: Any) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"steps is {steps!r}; it must be a whole number, 0 or more")
