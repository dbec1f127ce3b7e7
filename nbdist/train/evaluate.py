"""Evaluation at a step boundary: every rank takes a part of the set, and the sums are put together.

Runs in the engine's main thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbdist.train.checks import check_whole, shown
from nbdist.train.loading import Loader, Part, check_data, to_device
from nbdist.train.objective import Objective, pair_of, weigh
from nbdist.train.sampling import share

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from nbdist.train.strategies import Exchange


@dataclass(frozen=True, eq=False)
class Evaluate:
    """An evaluation every so many steps, exact for any number of ranks.

    A metric is a function `(output, target) ->` a scalar, the mean over the samples given, or
    `(sum, count)`; where the trainer has `forward=`, it is `(model, batch) -> (sum, count)`. The
    trainer's own loss is always among the results, as "loss".
    """

    data: Any
    """Map-style, or a callable that returns such a set."""
    every: int = 100
    """After so many committed steps, again and again."""
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Name -> function."""
    batch: int | None = None
    """Samples that go through the model at once; None: the trainer's global batch."""
    collate: Callable[[list[Any]], Any] | None = None
    """From a list of samples to a batch; None: as the trainer."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("every", self.every, 1)
        if self.batch is not None:
            check_whole("batch", self.batch, 1)
        if not isinstance(self.metrics, Mapping):
            raise TypeError(
                f"metrics is {shown(self.metrics)}; it must be a dict, name -> function"
            )
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise TypeError(f"metrics[{name!r}] is {shown(metric)}; it must be a function")
        if "loss" in self.metrics:
            raise ValueError('metrics has "loss": the trainer\'s own loss has this name')


class Evaluator:
    """Carries out an `Evaluate`.

    Args:
        settings: what the user wants.
        objective: the trainer's loss.
        collate, batch: the trainer's, used where the settings have none.
    """

    def __init__(
        self,
        settings: Evaluate,
        objective: Objective,
        *,
        collate: Callable[[list[Any]], Any] | None,
        batch: int,
    ) -> None:
        self.every = settings.every
        data = check_data(settings.data, "evaluate.data")
        if len(data) == 0:
            raise ValueError("evaluate.data is empty: len(data) is 0")
        self._num_samples, self._batch = len(data), settings.batch or batch
        self._loader = Loader(data, settings.collate or collate)
        self._objective, self._metrics = objective, dict(settings.metrics)

    def run(
        self,
        model: nn.Module,
        device: torch.device,
        exchange: Exchange,
    ) -> dict[str, float]:
        """Name -> value over the whole set; the same on every rank.

        Args:
            model: put into its evaluation mode for the time.
            device: the model's.
            exchange: takes part of it, and sums.
        """
        names = ["loss", *self._metrics]
        totals = torch.zeros(2, len(names), dtype=torch.float64)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad(), self._objective.autocast(device):
                for part in self._parts(*exchange.place):
                    batch = to_device(self._fetch(part), device)
                    self._add(totals, model, exchange, batch, float(len(part.indices)))
                for part in self._idle_parts(exchange):
                    batch = to_device(self._fetch(part), device)
                    self._add(torch.zeros_like(totals), model, exchange, batch, 1.0)
        finally:
            for module in training:
                module.training = True
        exchange.sum_(totals)
        means = (totals[0] / totals[1]).tolist()
        return dict(zip(names, means, strict=True))

    def _parts(self, place: int, num_places: int) -> list[Part]:
        mine = share(self._num_samples, place, num_places)
        indices = np.arange(mine.start, mine.stop)
        return [
            Part(0, int(piece[0]), piece)
            for piece in (
                indices[start : start + self._batch]
                for start in range(0, len(indices), self._batch)
            )
        ]

    def _idle_parts(self, exchange: Exchange) -> list[Part]:
        """Passes that count for nothing, where all ranks must make as many as the busiest."""
        if not exchange.is_lockstep:
            return []
        place, num_places = exchange.place
        num = len(self._parts(0, num_places)) - len(self._parts(place, num_places))
        return [Part(0, 0, np.arange(1))] * num

    def _fetch(self, part: Part) -> Any:
        ((_, batch),) = self._loader.batches(0, lambda _step: [part])
        return batch

    def _add(
        self, totals: Tensor, model: nn.Module, exchange: Exchange, batch: Any, num: float
    ) -> None:
        """Add what one batch of so many samples gives; nothing where another rank has it."""
        if self._objective.name == "forward":
            values = [self._objective(model, batch)]
            values += [metric(model, batch) for metric in self._metrics.values()]
        else:
            inputs, target = pair_of(batch)
            output = exchange.predict(inputs)
            if output is None:
                return
            values = [self._objective.of(output, target)]
            values += [metric(output, target) for metric in self._metrics.values()]
        for column, (name, value) in enumerate(zip(["loss", *self._metrics], values, strict=True)):
            is_number = isinstance(value, int | float)
            weighed = weigh(torch.tensor(float(value)) if is_number else value, num, name)
            totals[0, column] += float(weighed.value) * weighed.factor
            totals[1, column] += weighed.weight
