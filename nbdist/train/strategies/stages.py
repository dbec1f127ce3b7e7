"""The working half of a pipeline: passes batches through the stages of all ranks.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine import emit, rebind
from nbdist.engine.works import WORKS
from nbdist.errors import WrongState
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.objective import Objective, pair_of, weigh
from nbdist.train.strategies import actions
from nbdist.train.strategies.axes import own_group
from nbdist.train.strategies.held import Held
from nbdist.train.strategies.passage import Passage
from nbdist.train.strategies.pieces import Pieces, rows_of
from nbdist.train.strategies.schedules import owners as owners_of
from nbdist.train.strategies.settling import Settling, listed
from nbdist.train.vote import COUNT, LOSS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.train.strategies.base import Keeper, Summed, Turn
    from nbdist.train.strategies.copies import Spread
    from nbdist.train.strategies.schedules import Order

MAX_SCHEDULES = 4
"""One for each shape of a batch; the oldest go first."""


class Stages(Settling[Held]):
    """Passes batches through the stages, of which this rank has some."""

    pieces: ClassVar[str] = "stages"

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
        self._schedule, self._seed = schedule, seed
        self._num_microbatches = num_microbatches
        numeric, device = Objective(None, None, precision), next(held.parameters()).device
        self._passage = Passage(lambda: numeric.autocast(device))  # holds no `self`, nor the model
        super().__init__(held, copy_every=copy_every)
        from nbdist.train.strategies import torch_pipeline  # noqa: PLC0415 - it takes a second

        self._torch = torch_pipeline
        self._made: dict[tuple[Any, ...], Any] = {}
        self._is_told = False
        """The plan of the present group was told."""
        self._groups: dict[str, Any] = {}
        """Name of a shared parameter -> the group of those that have it."""
        self._turn: tuple[Turn, Pieces, Any] | None = None
        """The batch that goes through now: its step, its pieces, its targets."""
        rebind.watch(self)

    def _take(self, held: Held) -> None:
        """This is what the rank holds."""
        super()._take(held)
        self._device = next(held.parameters()).device
        for number in held.layout.own:
            held.stage(number).comes_to = self._passage.come_to

    # ---- the group

    def let_go(self) -> None:
        """What was made for a group is of no use in the next one."""
        self._made.clear()
        self._groups.clear()
        self._is_told = False

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins."""
        before = self._group
        super().begin(rank, world_size, generation)
        if self._group != before:
            self.let_go()
        if self.fits(rank, world_size):
            self._held.division.bind(is_new=self._is_new)

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether what this rank holds has changed."""
        has_changed = super()._settle_in(keeper)
        rank, num_ranks, _ = self._group
        pipelines = self._axes.pipelines(num_ranks)
        for name, owners in self._held.shared.items():
            lines = [[ranks[owner] for owner in owners] for ranks in pipelines]
            self._groups[name] = own_group(lines, rank)
        return has_changed

    def _were_lost(self, parts: Sequence[int], last: Spread) -> str:
        """In words."""
        owners = self._held.layout.owners
        if self._held.division.portion.num_ranks > 1:
            return super()._were_lost(parts, last)
        if isinstance(self._schedule, str):
            owners = owners_of(self._schedule, last.num_stages, last.num_ranks)
        stages = [stage for stage, owner in enumerate(owners) if owner in parts]
        return (
            f"stages {stages} were lost with the weights of step {last.step}: {listed(parts)} of "
            f"{last.num_ranks} had them"
        )

    def sum_vote(self, vote: list[float]) -> list[float]:
        """Sum a vote. First, gradients of pieces, and of parameters that several stages use."""
        division = self._held.division
        division.take_gradients()
        division.check(self._held.order, self._axes.sum_parts_)
        if not division.is_first:
            vote[LOSS] *= 0.0  # what is not finite stays so
            vote[COUNT] *= 0.0
        for parameter, group in self._shared():
            with emit.exchange(Op.ALL_REDUCE, Axis.PIPELINE, group.size(), parameter.nbytes):
                WORKS.follow(dist.all_reduce(parameter.grad, group=group, async_op=True)).wait()
        return super().sum_vote(vote)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all stages together; what several ranks share counts once.

        Summed parameter by parameter in the model's order, so that it does not depend on the cut.
        """
        held, layout = self._held, self._held.layout
        square = torch.zeros(len(held.order), dtype=torch.float64)
        counted = {
            held.order[name]: p.grad.norm()
            for name, p in held.named_parameters()
            if p.grad is not None
            and held.shared.get(name, (layout.rank,))[0] == layout.rank
            and held.division.counts(name)
        }
        if counted:
            square[list(counted)] = torch.stack(list(counted.values())).cpu().double() ** 2
        self._axes.sum_parts_(square)
        norm = square.sum().sqrt()
        return norm.to(gradients[0]) if gradients else norm.float()

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
        # Micro-batches are numbered over all models, so that no two draw the same random numbers.
        self._passage.first = self.place.at * self._num_microbatches
        self._turn = turn, pieces, target
        self._held.division.come()
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
        """What the model returns, on the rank that has the last stage, or the first of those."""
        pieces = Pieces(_num_samples(inputs), self._num_microbatches)
        self._passage.begin((self._seed, -1), 1.0)
        self._passage.is_silent = True
        self._held.division.come()
        try:
            if self._held.layout.num_ranks == 1:
                filled = pieces.fill(inputs).split(pieces.size)
                output = self._alone(filled, None)
            else:
                output = self._pass(pieces.fill(inputs), is_training=False)
        finally:
            self._passage.is_silent = False
            self._held.division.go()
        is_asked = output is not None and self._held.division.is_first
        return pieces.drop_filling(output) if is_asked else None

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
                group=self._axes.of_stages,
            )
        if is_training and not self._is_told:
            orders = actions.parse(self._torch.planned(made))
            self._passage.tell_plan(orders[layout.rank], len(layout.owners))
            self._is_told = True
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
                passage.go_forward(number, self._device)
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

    def planned(self) -> dict[int, list[str]]:
        """In which order each rank computes, as "2F0"; empty before the first step in a group."""
        made = next((m for (is_training, *_), m in self._made.items() if is_training), None)
        return {} if made is None else self._torch.planned(made)

    def owned(self) -> list[object]:
        """Nothing that the user could see."""
        return []

    def end(self) -> None:
        """What a step that failed has left in the schedules is let go.

        The next run may be in another group: all ranks begin it anew.
        """
        super().end()
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
