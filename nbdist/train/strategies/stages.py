"""The working half of a pipeline: passes batches through the stages of all ranks.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.works import WORKS
from nbdist.errors import RecoveryFailed, WrongState
from nbdist.protocol.telemetry import Kind
from nbdist.train.objective import Objective, pair_of, weigh
from nbdist.train.sampling import share
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.copies import Copies, common_step
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first
from nbdist.train.strategies.passage import Passage
from nbdist.train.vote import FIRST_BUFFER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Keeper, Summed, Turn
    from nbdist.train.strategies.held import Held
    from nbdist.train.strategies.schedules import Order

MAX_SCHEDULES = 4
"""One for each shape of a batch; the oldest go first."""


class Pieces:
    """How a batch of `num` samples comes apart into micro-batches of equal size.

    Where it does not come out even, a micro-batch's last sample stands in it more than once.
    """

    def __init__(self, num: int, num_microbatches: int) -> None:
        cuts = [share(num, i, num_microbatches) for i in range(num_microbatches)]
        self.size = cuts[0].stop
        """Of each."""
        self.cuts = cuts
        """The samples of each."""
        self.is_even = num == self.size * num_microbatches
        rows = [np.minimum(np.arange(c.start, c.start + self.size), c.stop - 1) for c in cuts]
        self._rows = torch.from_numpy(np.concatenate(rows).clip(0))
        places = [np.arange(i * self.size, i * self.size + n) for i, n in enumerate(self.sizes)]
        self._places = torch.from_numpy(np.concatenate(places))

    @property
    def sizes(self) -> list[int]:
        """Samples of each that count."""
        return [cut.stop - cut.start for cut in self.cuts]

    def fill(self, inputs: Tensor) -> Tensor:
        """As many rows as all micro-batches have together."""
        return inputs if self.is_even else inputs[self._rows.to(inputs.device)]

    def drop_filling(self, output: Any) -> Any:
        """Of what comes out for these, the rows that count."""
        return output if self.is_even else rows_of(output, self._places, self._rows.numel())


def rows_of(value: Any, rows: slice | Tensor, num: int) -> Any:
    """The same with some of the rows of each tensor that has so many."""
    if isinstance(value, Tensor):
        there = rows.to(value.device) if isinstance(rows, Tensor) else rows
        return value[there] if value.dim() and len(value) == num else value
    if isinstance(value, dict):
        return {key: rows_of(item, rows, num) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [rows_of(item, rows, num) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Stages:
    """Passes batches through the stages, of which this rank has some."""

    is_lockstep = True

    def __init__(
        self,
        held: Held,
        schedule: str | Order,
        num_microbatches: int,
        *,
        seed: int,
        precision: str,
        copy_every: int,
    ) -> None:
        self.place = Place(0, 1)
        """Every rank sees the whole batch."""
        self._held, self._schedule, self._seed = held, schedule, seed
        self._num_microbatches = num_microbatches
        self._device = next(held.parameters()).device
        numeric = Objective(None, None, precision)
        self._passage = Passage(lambda: numeric.autocast(self._device))
        from nbdist.train.strategies import torch_pipeline  # noqa: PLC0415 - it takes a second

        self._torch = torch_pipeline
        self._made: dict[tuple[Any, ...], Any] = {}
        self._generation: int | None = None
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._copy_every = copy_every
        self._copies = Copies(held.layout.rank, held.layout.num_ranks)
        self._groups: dict[str, Any] = {}
        """Name of a shared parameter -> the group of those that have it."""
        self._turn: tuple[Turn, Pieces, Any] | None = None
        """The batch that goes through now: its step, its pieces, its targets."""

    # ---- the group

    def fits(self, rank: int, world_size: int) -> bool:
        """The stages lie on so many ranks, and on this one so."""
        return (rank, world_size) == (self._held.layout.rank, self._held.layout.num_ranks)

    def misfit(self, rank: int, world_size: int) -> str:
        """They lie on other ranks."""
        layout = self._held.layout
        return (
            f"the pipeline was cut for {layout.num_ranks} ranks, and this one has the stages "
            f"{layout.own} of rank {layout.rank}; the group has {world_size} ranks now, and "
            f"this is rank {rank}"
        )

    def begin(self, rank: int, world_size: int, generation: int) -> None:  # noqa: ARG002 - it fits
        """An attempt begins; what was made for an earlier group is of no use."""
        if generation != self._generation:
            self._made.clear()
            self._groups.clear()
            self._generation, self._is_new = generation, True

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """See that all ranks hold the same step; before the first, take a module's weights.

        In a new group all may have to go back to their copies. In any group these are renewed every
        so many steps.
        """
        if self._held.layout.num_ranks == 1:
            return False
        is_new = self._is_new
        has_changed = self._settle_in(keeper) if is_new else False
        self._is_new = False
        for tensor in self._held.source if keeper.step == 0 else []:
            take_from_first(tensor)
            has_changed = True
        is_due = bool(self._copy_every) and keeper.step % self._copy_every == 0
        if self._copy_every and (is_new or (is_due and not self._copies.has(keeper.step))):
            self._copies.renew(keeper)
        return has_changed

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether all had to go back."""
        layout, stands = self._held.layout, self._copies.gather(keeper.step)
        is_even = len({stand.step for stand in stands}) == 1
        if not is_even:
            step = common_step(stands)
            if step is None:
                steps = [stand.step for stand in stands]
                raise RecoveryFailed(_lost(steps, layout.owners, self._copy_every))
            self._copies.go_back(stands, step, keeper)
        for name, ranks in self._held.shared.items():
            self._groups[name] = dist.new_group(list(ranks))
        return not is_even

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks."""
        if self._held.layout.num_ranks > 1:
            sum_on_backend(tensor)

    def sum_places_(self, tensor: Tensor) -> None:
        """No other rank holds what this one holds."""

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote; buffers are each rank's own. First, gradients of shared parameters."""
        for parameter, group in self._shared():
            WORKS.follow(dist.all_reduce(parameter.grad, group=group, async_op=True)).wait()
        tensor = torch.tensor(vote[:FIRST_BUFFER], dtype=torch.float64)
        self.sum_(tensor)
        return [*tensor.tolist(), *vote[FIRST_BUFFER:]]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all stages together; what several ranks share counts once."""
        layout, own = self._held.layout, nn.utils.get_total_norm(gradients)
        square = own.double() ** 2
        for name, parameter in self._held.named_parameters():
            others = self._held.shared.get(name, ())
            if others and others[0] != layout.rank and parameter.grad is not None:
                square -= parameter.grad.norm().double() ** 2
        total = square.reshape(1).cpu()
        self.sum_(total)
        return total.clamp(min=0).sqrt()[0].to(own)

    def _shared(self) -> list[tuple[nn.Parameter, Any]]:
        """Parameters that other ranks have too, in the same order on all of them."""
        own = dict(self._held.named_parameters())
        pairs = [(own[name], group) for name, group in self._groups.items() if name in own]
        for parameter, _ in pairs:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return pairs

    # ---- a batch

    def train(self, batch: Any, turn: Turn) -> None:
        """Forward and backward of a whole batch, in pieces."""
        inputs, target = pair_of(batch)
        pieces = Pieces(_num_samples(inputs), self._num_microbatches)
        self._passage.begin((self._seed, turn.number), turn.slow_factor)
        self._turn = turn, pieces, target
        try:
            with turn.objective.autocast(self._device, is_suspended=True):
                if self._held.layout.num_ranks == 1:
                    self._alone(pieces.fill(inputs).split(pieces.size), self._loss)
                else:
                    self._pass(pieces.fill(inputs), is_training=True)
        finally:
            self._turn = None
        turn.went_back(self._passage.ready_ns, self._passage.compute_ns)

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """What a micro-batch goes backward from; `number`: which one it is."""
        assert self._turn is not None
        turn, pieces, target = self._turn
        i = int(number)
        cut, num = pieces.cuts[i], pieces.sizes[i]
        if num == 0:
            return _first_tensor(output).sum() * 0.0
        num_all = pieces.cuts[-1].stop
        with self._passage.autocast():
            loss = turn.objective.of(
                rows_of(output, slice(num), pieces.size), rows_of(target, cut, num_all)
            )
        if self._passage.is_trial:
            return weigh(loss, float(num), "loss").value
        return turn.weigh(loss, float(num))

    def predict(self, inputs: Any) -> Any:
        """What the model returns, on the rank that has the last stage."""
        pieces = Pieces(_num_samples(inputs), self._num_microbatches)
        self._passage.begin((self._seed, -1), 1.0)
        self._passage.is_silent = True
        try:
            if self._held.layout.num_ranks == 1:
                filled = pieces.fill(inputs).split(pieces.size)
                output = self._alone(filled, None)
            else:
                output = self._pass(pieces.fill(inputs), is_training=False)
        finally:
            self._passage.is_silent = False
        return None if output is None else pieces.drop_filling(output)

    def _pass(self, inputs: Tensor, *, is_training: bool) -> Any:
        """Through torch's schedule, which every rank enters with the same shape."""
        layout = self._held.layout
        key = (is_training, tuple(inputs.shape), inputs.dtype)
        made = self._made.get(key)
        if made is None:
            while len(self._made) >= MAX_SCHEDULES:
                del self._made[next(iter(self._made))]
            made = self._made[key] = self._torch.make(
                self._held,
                self._schedule,
                self._num_microbatches,
                self._passage,
                device=self._device,
                loss=self._loss if is_training else None,
            )
        own, last = layout.own, len(layout.owners) - 1
        given: dict[str, Any] = {"return_outputs": not is_training}
        if is_training and last in own:
            given["target"] = torch.arange(self._num_microbatches)
        return made.step(*([inputs] if 0 in own else []), **given)

    def _alone(self, pieces: Sequence[Tensor], loss: Callable[..., Tensor] | None) -> Any:
        """The same on one rank that has all stages, one micro-batch after the other."""
        passage, outputs = self._passage, []
        for number, piece in enumerate(pieces):
            value: Any = piece
            for stage in range(len(self._held.layout.owners)):
                passage.seed(stage, number, self._device)
                with passage.computes(Kind.FORWARD, stage, number), passage.autocast():
                    value = self._held.stage(stage)(value)
            if loss is None:
                outputs.append(value)
                continue
            with passage.computes(Kind.BACKWARD, stage, number):
                loss(value, torch.tensor(number)).backward()
        return self._torch.merge(outputs) if loss is None else None

    def backward(self, *_args: Any, **_kwargs: Any) -> Summed:
        """No rank has a loss of the whole model to go back from."""
        raise WrongState(
            "step.backward(loss) needs the whole model on each rank, and it is cut into the stages "
            "of a pipeline: call step.train(batch) instead, which takes the trainer's loss="
        )

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """Gradients are summed as they are: nothing is left for later steps."""

    def forget(self) -> None:
        """Nothing is kept of earlier steps but whole copies, which are right for theirs."""

    def planned(self) -> dict[int, list[str]]:
        """In which order each rank computes, as "2F0"; empty before the first step in a group."""
        made = next((m for (is_training, *_), m in self._made.items() if is_training), None)
        return {} if made is None else self._torch.planned(made)

    def owned(self) -> list[object]:
        """Nothing that the user could see."""
        return []

    def end(self) -> None:
        """What a step that failed has left in the schedules is let go."""
        self._made.clear()
        self._turn = None


def _num_samples(inputs: Any) -> int:
    if not isinstance(inputs, Tensor) or inputs.dim() == 0:
        raise TypeError(
            f"with strategy=Pipeline(…), data[i] must be (input, target) with a tensor as input; "
            f"a batch of inputs is a {type(inputs).__name__}"
        )
    return len(inputs)


def _first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def _lost(steps: list[int], owners: Sequence[int], copy_every: int) -> str:
    newest = max(steps)
    behind = [rank for rank, step in enumerate(steps) if step != newest]
    stages = [stage for stage, owner in enumerate(owners) if owner in behind]
    why = (
        "no rank has copies of one step of all stages: neighbours were lost together"
        if copy_every
        else "nobody keeps copies, since copy_every is 0"
    )
    return (
        f"stages {stages} were lost with the weights of step {newest}: rank"
        f"{'s' if len(behind) > 1 else ''} {', '.join(map(str, behind))} of the present group "
        f"stands at step {min(steps)}, and {why}. Make the trainer anew and train from the "
        "beginning"
    )
