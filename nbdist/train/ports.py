"""What a loop talks to: the engine's port, or here one that stands alone.

Runs in the main thread of an engine, or of any process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nbdist.protocol.story import ROWS, Evaluation
from nbdist.train.strategies.axes import place_of_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RunPort(Protocol):
    """How far to train, and whom to tell. `nbdist.engine.port.Port` is one."""

    go_until: int | None
    """Train until so many steps are committed; None: stand and wait."""
    is_over: bool
    """The run has ended."""
    fault: Exception | None
    """With `is_over`: what an own loop raises."""
    wants_hold: bool
    """To be said in the next vote."""
    settings: list[dict[str, float]]
    """Changes to be made before going on."""
    patience_s: float
    """For so long a trainer that does not fit the present group waits for the next."""

    @property
    def others_come(self) -> bool:
        """Seats are being filled: another group follows the present one."""

    @property
    def generation(self) -> int:
        """Of the present group."""

    @property
    def rank(self) -> int:
        """In the present group."""

    @property
    def world_size(self) -> int:
        """Of the present group."""

    @property
    def slow_factor(self) -> float:
        """Each step's own compute is to take so many times as long, by sleeping; 1: as it is."""

    def poll(self) -> None:
        """Carry out orders that have come; never waits."""

    def wait(self) -> None:
        """Block until an order has been carried out."""

    async def wait_async(self) -> None:
        """The same, while cells run."""

    def begin_step(self, step: int, *, patient: bool) -> None:
        """An attempt at a step begins; `patient`: it may take long."""

    def hold(self, step: int) -> None:
        """The loop stands, `step` steps being committed. May be said again."""

    def committed(self, row: tuple[Any, ...]) -> None:
        """A step is applied; `row` as `protocol.story.ROWS`."""

    def broken(self, step: int, error: BaseException) -> bool:
        """Whether an error in an attempt is the group's: then wait, and repeat the step."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def raised(self, error: BaseException) -> None:
        """The user's code raised."""

    def left(self, step: int) -> None:
        """An own loop was left early."""


class Rows:
    """Committed steps in the order of their commits, as a run's history shows them."""

    def __init__(self) -> None:
        self._rows = np.empty(256, ROWS)
        self._num = 0

    def append(self, row: tuple[Any, ...]) -> None:
        """One more."""
        if self._num == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._num] = row
        self._num += 1

    def columns(self, start: int = 0) -> dict[str, NDArray[Any]]:
        """Name -> values, from a place on."""
        rows = self._rows[start : self._num]
        columns = {name: rows[name].copy() for name in ROWS.names or () if name != "at"}
        columns["samples_per_second"] = rows["samples"] / rows["seconds"]
        return columns

    def __len__(self) -> int:
        return self._num


class SoloPort:
    """Trains without a supervisor: in torch's default group if there is one, else alone."""

    def __init__(self, until: int, rows: Rows, evaluations: list[Evaluation]) -> None:
        self.go_until: int | None = until
        self.is_over = self.wants_hold = False
        self.fault: Exception | None = None
        self.settings: list[dict[str, float]] = []
        self.generation, self.slow_factor, self.patience_s = 0, 1.0, 0.0
        self.others_come = False
        self.rank, self.world_size = place_of_rank()
        self._rows, self._evaluations = rows, evaluations

    def poll(self) -> None:
        """Nobody orders anything."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    async def wait_async(self) -> None:
        """There is nothing to wait for."""

    def begin_step(self, step: int, *, patient: bool) -> None:
        """Nobody looks for hung ranks."""

    def hold(self, step: int) -> None:  # noqa: ARG002 - as the engine's port
        """All steps are trained."""
        self.is_over, self.go_until = True, None

    def committed(self, row: tuple[Any, ...]) -> None:
        """Keep it."""
        self._rows.append(row)

    def broken(self, step: int, error: BaseException) -> bool:  # noqa: ARG002 - as the engine's port
        """Nobody forms another group."""
        return False

    def evaluated(self, evaluation: Evaluation) -> None:
        """Keep it."""
        self._evaluations.append(evaluation)

    def raised(self, error: BaseException) -> None:  # noqa: ARG002 - as the engine's port
        """The error itself is all that is told."""
        self.is_over = True

    def left(self, step: int) -> None:  # noqa: ARG002 - as the engine's port
        """Nobody else is in this loop."""
        self.is_over = True
