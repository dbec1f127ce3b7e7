"""The working half of a pipeline: passes batches through the stages of all ranks.

Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbdist.engine.works import WORKS
from nbdist.errors import RecoveryFailed, WrongState
from nbdist.protocol.telemetry import Kind
from nbdist.train.objective import Objective, pair_of, weigh
from nbdist.train.strategies import actions
from nbdist.train.strategies.base import Place
from nbdist.train.strategies.copies import Copies, Spread, Stand, are_together, newest
from nbdist.train.strategies.data_parallel import sum_on_backend, take_from_first
from nbdist.train.strategies.passage import Passage
from nbdist.train.strategies.pieces import Pieces, rows_of
from nbdist.train.strategies.schedules import owners as owners_of
from nbdist.train.vote import FIRST_BUFFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.train.strategies.base import Keeper, Summed, Turn
    from nbdist.train.strategies.held import Held
    from nbdist.train.strategies.schedules import Order

_NO_GROUP = 0, 1, -1
MAX_SCHEDULES = 4
"""One for each shape of a batch; the oldest go first."""


class Stages:
    """Passes batches through the stages, of which this rank has some."""

    is_lockstep = True
    num_lost = 0

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
        self._schedule, self._seed = schedule, seed
        self._num_microbatches = num_microbatches
        numeric = Objective(None, None, precision)
        self._passage = Passage(lambda: numeric.autocast(self._device))
        self._take(held)
        from nbdist.train.strategies import torch_pipeline  # noqa: PLC0415 - it takes a second

        self._torch = torch_pipeline
        self._made: dict[tuple[Any, ...], Any] = {}
        self._group = _NO_GROUP
        """Own rank, size and generation of the present group."""
        self._is_new = True
        """The ranks have not settled in the present group yet."""
        self._is_told = False
        """The plan of the present group was told."""
        self._copy_every = copy_every
        self._copies = Copies()
        self._groups: dict[str, Any] = {}
        """Name of a shared parameter -> the group of those that have it."""
        self._turn: tuple[Turn, Pieces, Any] | None = None
        """The batch that goes through now: its step, its pieces, its targets."""

    def _take(self, held: Held) -> None:
        """This is what the rank holds."""
        self._held, self._device = held, next(held.parameters()).device
        for number in held.layout.own:
            held.stage(number).comes_to = self._passage.come_to

    # ---- the group

    def fits(self, rank: int, world_size: int) -> bool:
        """The stages lie on so many ranks, and on this one so."""
        return (rank, world_size) == (self._held.layout.rank, self._held.layout.num_ranks)

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt begins; what was made for an earlier group is of no use."""
        group = rank, world_size, generation
        if group != self._group:
            self._made.clear()
            self._groups.clear()
            self._group, self._is_new, self._is_told = group, True, False

    @torch.no_grad()
    def settle(self, keeper: Keeper) -> bool:
        """See that all ranks hold the same step; before the first, take a module's weights.

        In a new group all may have to go back to their copies, and to cut the model anew where it
        has another size. In any group copies are renewed every so many steps.
        """
        is_new = self._is_new
        has_changed = self._settle_in(keeper) if is_new else False
        self._is_new = False
        if self._held.layout.num_ranks == 1:
            return has_changed
        for tensor in self._held.source if keeper.step == 0 else []:
            take_from_first(tensor)
            has_changed = True
        now = self._now(keeper)
        is_due = bool(self._copy_every) and keeper.step % self._copy_every == 0
        is_due = is_due and not self._copies.has(now)
        if self._copy_every and (is_new or is_due or self._copies.is_empty):
            self._copies.renew(now, self._held.layout.rank, keeper)
        return has_changed

    def _settle_in(self, keeper: Keeper) -> bool:
        """In a new group; whether what this rank holds has changed."""
        layout, (rank, num_ranks, _) = self._held.layout, self._group
        if num_ranks == layout.num_ranks == 1:
            return False
        if not self.fits(rank, num_ranks) and keeper.step:
            self._copies.keep(self._now(keeper), layout.rank, keeper)  # all may be here still
        stands = self._copies.gather(self._now(keeper), layout.rank, rank, num_ranks)
        has_changed = not are_together(stands)
        if has_changed:
            self._come_together(stands, keeper)
        for name, ranks in self._held.shared.items():
            self._groups[name] = dist.new_group(list(ranks))
        return has_changed

    def _now(self, keeper: Keeper) -> Spread:
        layout = self._held.layout
        return Spread(keeper.step, layout.num_ranks, len(layout.owners))

    def _come_together(self, stands: Sequence[Stand], keeper: Keeper) -> None:
        """All hold the parts that they should in this group, of the same step."""
        rank, num_ranks, _ = self._group
        spread = newest(stands)
        if spread is None and any(stand.now.step for stand in stands):
            raise RecoveryFailed(self._lost(stands))
        known = [stand.now for stand in stands] if spread is None else [spread]
        num_stages = num_ranks * max(s.num_stages // s.num_ranks for s in known)
        is_same = spread is not None and spread[1:] == (num_ranks, num_stages)
        held = self._held_in(num_stages)
        copies: Iterable[bytes] = ()
        if spread is not None:
            copies = self._copies.fetch(stands, spread, rank, is_same=is_same)
        if is_same and held is self._held:
            (own,) = copies
            keeper.take_back(own)
        elif spread is not None or held is not self._held:
            keeper.move(held, copies)
        self._take(held)
        self._copies.drop_after(keeper.step)

    def _held_in(self, num_stages: int) -> Held:
        """What this rank is to hold in the present group: what it does, or what is cut anew."""
        held, (rank, num_ranks, _) = self._held, self._group
        if self.fits(rank, num_ranks) and len(held.layout.owners) == num_stages:
            return held
        try:
            return held.again(num_stages)
        except ValueError as error:
            raise RecoveryFailed(
                f"the pipeline cannot be cut anew for the {num_ranks} ranks that the group has "
                f"now: {error}. Start as many engines as before (%dist_scale), or make the trainer "
                "anew"
            ) from error

    def _lost(self, stands: Sequence[Stand]) -> str:
        """Why nothing is left to go on with."""
        newest_of_all = max(stand.now for stand in stands)
        step, num_ranks, num_stages = newest_of_all
        there = {stand.rank for stand in stands if stand.now == newest_of_all}
        ranks = [rank for rank in range(num_ranks) if rank not in there]
        owners = self._held.layout.owners
        if isinstance(self._schedule, str):
            owners = owners_of(self._schedule, num_stages, num_ranks)
        stages = [stage for stage, owner in enumerate(owners) if owner in ranks]
        why = (
            "no rank has copies of one step of all stages: neighbours were lost together"
            if self._copy_every
            else "nobody keeps copies, since copy_every is 0"
        )
        return (
            f"stages {stages} were lost with the weights of step {step}: rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {num_ranks} had "
            f"them, and {why}. Make the trainer anew and train from the beginning"
        )

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
        """Of all stages together; what several ranks share counts once.

        Summed parameter by parameter in the model's order, so that it does not depend on the cut.
        """
        held = self._held
        square = torch.zeros(len(held.order), dtype=torch.float64)
        counted = {
            held.order[name]: p.grad.norm()
            for name, p in held.named_parameters()
            if p.grad is not None
            and held.shared.get(name, (held.layout.rank,))[0] == held.layout.rank
        }
        if counted:
            square[list(counted)] = torch.stack(list(counted.values())).cpu().double() ** 2
        self.sum_(square)
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

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """Gradients are summed as they are: nothing is left for later steps."""

    def forget(self) -> None:
        """Nothing is kept of earlier steps but whole copies, which are right for theirs."""

    def restart(self) -> None:
        """Copies of a training that is given up are of no use; new ones are made at once."""
        self._copies = Copies()

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
        self._made.clear()
        self._group = _NO_GROUP
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
