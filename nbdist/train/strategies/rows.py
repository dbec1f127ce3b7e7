"""Rows of the parameters of a rank's stages; the others are there while batches go through.

A stage is gathered as a whole before the first micro-batch of a step goes through it, and its
gradients are summed as a whole after the last one: a pipeline has several micro-batches on their
way at once, and to gather blocks for each of them anew would be sent as often. What stays between
steps is a rank's rows, and what the optimizer keeps of these. Runs in the engine's main thread.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.division import Division
from nbdist.train.strategies.slices import check_rows
from nbdist.train.strategies.spreading import gather_, scatter_sum_
from nbdist.train.strategies.twins import BUCKET_BYTES, buckets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.train.strategies.axes import Axes, Portion


class Rows(Division):
    """A rank's rows of the parameters of its stages."""

    def __init__(self, portion: Portion, axes: Axes) -> None:
        super().__init__(portion)
        self._axes = axes
        self._whole: dict[str, nn.Parameter] = {}
        """As the layers compute with them; between steps they have no memory."""
        self._is_here = portion.num_ranks == 1

    @property
    def _is_cut(self) -> bool:
        return self.portion.num_ranks > 1

    def layer(self, name: str, old: nn.Parameter, value: Tensor) -> nn.Parameter:
        """Keep the rows of a parameter; what its layer is to compute with."""
        check_rows({name: old})
        whole = nn.Parameter(torch.empty_like(value), requires_grad=old.requires_grad)
        if self._is_cut:
            rows = value[self.portion.rows(len(value))].clone()
            self.own[name] = nn.Parameter(rows, requires_grad=old.requires_grad)
            _free(whole)
        else:
            whole.data.copy_(value)
            self.own[name] = whole
        self.origins[name] = self.portion.origin(value)
        self._whole[name] = whole
        return whole

    def bind(self, *, is_new: bool) -> None:
        """An attempt begins, with nothing left of the one before."""
        del is_new
        if self._is_cut:
            self._forget()

    def come(self) -> None:
        """Gather the stages from all ranks that have rows of them; these come here together."""
        if self._is_here:
            return
        num = self.portion.num_ranks
        with torch.no_grad():
            for names in self._bucketed(list(self._whole)):
                mine = torch.cat([self._padded(name, self.own[name].detach()) for name in names])
                lines = mine.new_empty(num, len(mine))
                with emit.exchange(Op.ALL_GATHER, Axis.DATA, num, mine.nbytes):
                    gather_(lines.view(-1), mine, self._axes.of_pieces)
                sizes = [self._num_padded(name) // num for name in names]
                for name, rows in zip(names, lines.split(sizes, 1), strict=True):
                    whole = self._whole[name]
                    whole.untyped_storage().resize_(whole.nbytes)
                    whole.copy_(rows.reshape(-1)[: whole.numel()].view(whole.shape))
        self._is_here = True

    def go(self) -> None:
        """Between steps there are only rows."""
        if self._is_cut and self._is_here:
            for whole in self._whole.values():
                _free(whole)
            self._is_here = False

    def take_gradients(self) -> None:
        """Sum those of the stages over the ranks; each keeps what is of its rows."""
        if not self._is_cut:
            return
        ready_ns, num = perf_counter_ns(), self.portion.num_ranks
        trained = {name: whole for name, whole in self._whole.items() if whole.requires_grad}
        has = torch.tensor([float(whole.grad is not None) for whole in trained.values()])
        self._axes.sum_places_(has)  # what one rank's samples do not need, another's may
        needed = [name for name, its in zip(trained, has.tolist(), strict=True) if its]
        for index, names in enumerate(self._bucketed(needed)):
            lines = [self._gradient(name) for name in names]
            together = torch.cat(lines, 1)
            began_ns = perf_counter_ns()
            emit.span(Kind.BUCKET_READY, ready_ns, ready_ns, ident=index)
            emit.span(Kind.BUCKET_LAUNCH, began_ns, began_ns, ident=index)
            mine = together.new_empty(together.shape[1])
            scatter_sum_(mine, together.view(-1), self._axes.of_pieces)
            emit.bucket_done(Op.REDUCE_SCATTER, num, began_ns, index, together.nbytes)
            sizes = [line.shape[1] for line in lines]
            for name, rows in zip(names, mine.split(sizes), strict=True):
                own = self.own[name]
                own.grad = rows[: own.numel()].view(own.shape).clone()
        self._forget()

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of what all ranks have rows of."""
        if not self._is_cut:
            return piece.clone()
        self._axes.form(*place_of_rank())
        mine, whole = self._padded(name, piece), self._whole[name]
        together = mine.new_empty(self.portion.num_ranks * len(mine))
        gather_(together, mine, self._axes.of_pieces)
        return together[: whole.numel()].view(whole.shape)

    # ---- how they travel

    def _forget(self) -> None:
        for whole in self._whole.values():
            whole.grad = None
        self.go()

    def _num_padded(self, name: str) -> int:
        """Numbers that collectives carry for a parameter: as many rows for each rank."""
        whole = self._whole[name]
        return self.portion.num_padded(len(whole)) * whole.shape[1:].numel()

    def _padded(self, name: str, rows: Tensor) -> Tensor:
        """A rank's rows as they travel."""
        padded = rows.new_zeros(self._num_padded(name) // self.portion.num_ranks)
        padded[: rows.numel()] = rows.flatten()
        return padded

    def _gradient(self, name: str) -> Tensor:
        """Of a stage's parameter, as it travels: a line of numbers for each rank."""
        whole = self._whole[name]
        padded = torch.zeros(self._num_padded(name), dtype=whole.dtype, device=whole.device)
        if whole.grad is not None:
            padded[: whole.numel()] = whole.grad.flatten()
        return padded.view(self.portion.num_ranks, -1)

    def _bucketed(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Names of parameters of one type that travel together."""
        left = iter(names)
        for bucket in buckets([self._whole[name] for name in names], BUCKET_BYTES):
            yield [next(left) for _ in bucket]


def _free(whole: nn.Parameter) -> None:
    """It keeps its shape, and has no memory."""
    whole.untyped_storage().resize_(0)
