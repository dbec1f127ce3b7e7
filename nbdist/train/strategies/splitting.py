"""From a model to the stages of a pipeline.

A model is a row of blocks: an `nn.Sequential`, or a module whose `pipeline_blocks()` returns them,
or whatever a function of the user's makes of it. Blocks next to each other are put together to
stages, so that the costliest stage costs as little as may be. Every rank comes to the same stages
by itself, so costs are counted and not measured: operations of a forward pass, on tensors without
memory, and bytes. Runs in the engine's main thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from nbdist.train.checks import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

Split = str | Sequence[int] | Sequence[str] | Callable[[nn.Module], Sequence[nn.Module]]
"""How a model is cut: "auto", numbers of blocks, names of blocks, or a function to blocks."""
BYTES_WEIGHT = 0.1
"""What a block's share of all bytes counts, beside its share of all operations."""


class Stage(nn.Module):
    """Blocks that are applied one after the other, as `nn.Sequential` does.

    Args:
        blocks: of the model, in order.
        first: the number of the first of them in the whole model.
    """

    def __init__(self, blocks: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        self.blocks, self._first = nn.ModuleList(blocks), first
        self.comes_to: Callable[[int], None] | None = None
        """Called before each block goes forward, with its number in the whole model."""

    def forward(self, *received: Any) -> Any:
        """What the last block returns; several tensors from the stage before are one tuple."""
        value = received[0] if len(received) == 1 else received
        for number, block in enumerate(self.blocks, self._first):
            if self.comes_to is not None:
                self.comes_to(number)
            value = block(value)
        return value


def check_split(split: Any) -> None:
    """Raise TypeError or ValueError where it cannot be a way to cut a model."""
    if isinstance(split, str):
        if split != "auto":
            raise ValueError(f'split is {split!r}; as a name there is only "auto"')
        return
    is_list = isinstance(split, Sequence) and len(split) > 0
    if is_list and (_are_all(split, str) or (_are_all(split, int) and min(split) >= 1)):
        return
    if not callable(split):
        raise TypeError(
            f'split is {shown(split)}; it must be "auto", the number of blocks of each stage, the '
            "names of the blocks in their order, or a function from the model to its blocks"
        )


def is_counts(split: Split) -> TypeGuard[Sequence[int]]:
    """Whether it says how many blocks each stage has."""
    return not isinstance(split, str) and isinstance(split, Sequence) and _are_all(split, int)


def blocks_of(model: nn.Module, split: Split) -> list[nn.Module]:
    """The row of blocks that a model is."""
    if callable(split):
        return returned("split", split(model), least=1)
    if not isinstance(split, str) and _are_all(split, str):
        row = named("split", model, [str(name) for name in split])
        if isinstance(model, nn.Sequential):
            _check_row(model, [str(name) for name in split])
        return row
    own = getattr(type(model), "pipeline_blocks", None)
    if own is not None:
        return list(own(model))
    if isinstance(model, nn.Sequential):
        return list(model)
    raise TypeError(
        f"model is a {type(model).__name__}, and nothing says how to cut it: give an "
        "nn.Sequential, or a method pipeline_blocks() that returns its blocks in order, or "
        "split=the names of its blocks, or split=a function from the model to its blocks"
    )


def _check_row(model: nn.Sequential, names: Sequence[str]) -> None:
    """Of a model that says itself in which order its parts go, all are named, in that order."""
    left_out = list(_left_out(model, names, ""))
    there = [name for name, _ in model.named_modules(remove_duplicate=False) if name in names]
    if left_out or there != list(names):
        wrong = f"leaves out {', '.join(map(repr, left_out))}" if left_out else "changes the order"
        raise ValueError(
            f"split is {list(names)}, and {wrong} of an nn.Sequential: that would train another "
            f"model. Name {there if not left_out else 'all of its parts'} in their order, or give "
            "a function that returns the blocks that are to be trained"
        )


def _left_out(row: nn.Sequential, names: Sequence[str], prefix: str) -> Iterator[str]:
    for key, part in row._modules.items():  # noqa: SLF001 - named_children leaves out twins
        name = f"{prefix}{key}"
        if name not in names and isinstance(part, nn.Sequential):
            yield from _left_out(part, names, f"{name}.")
        elif name not in names and not any(n.startswith(f"{name}.") for n in names):
            yield name


def named(setting: str, model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The parts of a model that have these names, which the user gave as that setting."""
    parts = dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in names if name not in parts]:
        there = ", ".join(repr(name) for name, _ in model.named_children())
        raise ValueError(
            f"{setting}: no part of the model is named {', '.join(map(repr, unknown))}; a "
            f"{type(model).__name__} has {there or 'no parts'}, and what is in them, as "
            "model.named_modules() names it"
        )
    return [parts[name] for name in names]


def returned(setting: str, blocks: Any, *, least: int = 0) -> list[nn.Module]:
    """What a function of the user's, given as that setting, has returned for a model."""
    row = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    if len(row) >= least and _are_all(row, nn.Module) and row != [blocks]:
        return row
    raise TypeError(f"{setting}(model) returned {shown(blocks)}; it must be a list of Modules")


def counts_of(
    blocks: Sequence[nn.Module], num_stages: int, split: Split, sample: Callable[[], Any]
) -> list[int]:
    """How many blocks each stage has.

    Args:
        blocks: all, in order.
        num_stages: how many stages.
        split: as the user gave it.
        sample: gives an input; asked for where costs are counted.
    """
    if is_counts(split):
        counts = [int(num) for num in split]
        if len(counts) != num_stages or sum(counts) != len(blocks):
            raise ValueError(
                f"split is {counts}, {len(counts)} stages of {sum(counts)} blocks together; there "
                f"are stages={num_stages}, and the model has {len(blocks)} blocks"
            )
        return counts
    if len(blocks) < num_stages:
        raise ValueError(
            f"stages is {num_stages}, and the model has {len(blocks)} blocks; a stage needs one"
        )
    if len(blocks) == num_stages:
        return [1] * num_stages
    return balance(costs_of(blocks, sample), num_stages)


def cut(blocks: Sequence[nn.Module], counts: Sequence[int]) -> list[Stage]:
    """The stages."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    pairs = zip(starts, counts, strict=True)
    return [Stage(blocks[start : start + num], start) for start, num in pairs]


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """The lengths of so many parts of a row, none empty, whose costliest costs least."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[tuple[float, int]]] = [[(sums[end], 0) for end in range(len(sums))]]
    for part in range(1, num_parts):
        row = [(float("inf"), 0)] * (part + 1)
        for end in range(part + 1, len(sums)):
            options = ((max(best[-1][at][0], sums[end] - sums[at]), at) for at in range(part, end))
            row.append(min(options))
        best.append(row)
    lengths, end = [], len(costs)
    for row in reversed(best):
        lengths.append(end - row[end][1])
        end = row[end][1]
    return lengths[::-1]


def costs_of(blocks: Sequence[nn.Module], sample: Callable[[], Any]) -> list[float]:
    """What each block costs, all together about one."""
    num_bytes = [float(sum(p.nbytes for p in block.parameters())) for block in blocks]
    operations = _operations(blocks, sample())
    if sum(operations) == 0:
        return _shares(num_bytes)
    pairs = zip(_shares(operations), _shares(num_bytes), strict=True)
    return [done + BYTES_WEIGHT * held for done, held in pairs]


def _operations(blocks: Sequence[nn.Module], sample: Any) -> list[float]:
    """Of a forward pass, block by block; all 0 where they cannot be run without memory."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - slow, and seldom wanted

    value, counted = without_memory(sample), []
    try:
        for block in blocks:
            with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
                value = bare(block)(value)
            counted.append(float(counter.get_total_flops()))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        # What a user's block does with a tensor without values is not known; bytes are.
        return [0.0] * len(blocks)
    return counted


def bare(block: nn.Module) -> nn.Module:
    """The same without memory."""
    if all(tensor.is_meta for tensor in [*block.parameters(), *block.buffers()]):
        return block
    return copy.deepcopy(block).to("meta")


def without_memory(value: Any) -> Any:
    """The same input, of which only shapes are left."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)):
        return tuple(without_memory(item) for item in value)
    return value


def _shares(costs: Sequence[float]) -> list[float]:
    total = sum(costs)
    return [cost / total if total else 1.0 for cost in costs]


def _are_all(values: Any, kind: type) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def names_in(whole: nn.Module, part: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of names of parameters and buffers: within a part, and within the whole model."""
    names = {id(t): n for n, t in [*whole.named_parameters(), *whole.named_buffers()]}
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        yield name, names[id(tensor)]
