"""From the states of ranks that hold parts of a model, that of a rank that holds another part.

Parameters are told apart by their names in the whole model, and with each goes what the optimizer
keeps of it. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

NAMING = ("params", "param_names")
"""What says of a group of parameters which they are; the rest are its settings."""


class Origin(NamedTuple):
    """Where in a whole tensor the piece of it begins that a rank has."""

    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Origin:
        """Where the piece is all of it."""
        return cls(tuple(tensor.shape), (0,) * tensor.dim())


class InPieces(nn.Module):
    """What a rank holds, where that is pieces of the model's parameters."""

    has_every_name: ClassVar[bool] = True
    """They are of all parameters; else other ranks have the rest."""
    origins: Mapping[str, Origin]
    """By the parameters' names."""


class Piece(NamedTuple):
    """Which numbers of a whole tensor a rank has."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What both have, as this one's numbers and as the other's; empty: nothing."""
        here, there = [], []
        for mine, num, its, its_num in zip(*self, *other, strict=True):
            start, stop = max(mine, its), max(mine, its, min(mine + num, its + its_num))
            here.append(slice(start - mine, stop - mine))
            there.append(slice(start - its, stop - its))
        return tuple(here), tuple(there)


def pieces_of(module: nn.Module) -> dict[str, Piece]:
    """Name -> which piece of the whole parameter a part has."""
    origins = origins_of(module)
    return {n: Piece(origins[n].offsets, tuple(p.shape)) for n, p in module.named_parameters()}


def origins_of(module: nn.Module) -> dict[str, Origin]:
    """Name -> where its piece begins, of all parameters of a part, also of those it has whole."""
    own = module.origins if isinstance(module, InPieces) else {}
    return {name: own.get(name, Origin.whole(p)) for name, p in module.named_parameters()}


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Of the parameters in each of the optimizer's groups, in its order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def gathering(module: nn.Module) -> Gathered:
    """What gathers the state of this part of a model."""
    buffers = [name for name, _ in module.named_buffers()]
    if isinstance(module, InPieces):
        return GatheredPieces(pieces_of(module), buffers)
    return Gathered([name for name, _ in module.named_parameters()], buffers)


class Gathered:
    """What a part needs of other parts' states; the rest is not kept.

    Args:
        parameters: names in the part.
        buffers: likewise.
    """

    def __init__(self, parameters: Iterable[str], buffers: Iterable[str]) -> None:
        self._wanted = {"parameters": set(parameters), "buffers": set(buffers)}
        self._tensors: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}}
        self._moments: dict[str, Any] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        self._by_group: list[dict[str, Any]] = []
        """Settings of each group, where none of its parameters is in the part."""
        self._rest: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Whether a state was added."""
        return bool(self._rest)

    def add(self, state: dict[str, Any]) -> None:
        """One more state, as `snapshot.Whole.copy` has it."""
        for kind, names in self._wanted.items():
            found = {name: value for name, value in state[kind].items() if name in names}
            self._tensors[kind] |= found
        optimizer = state["optimizer"]
        for names, group in zip(state["groups"], optimizer["param_groups"], strict=True):
            settings = {key: value for key, value in group.items() if key not in NAMING}
            for name, number in zip(names, group["params"], strict=True):
                if name in self._wanted["parameters"]:
                    self._settings[name] = settings
                    if number in optimizer["state"]:
                        self._moments[name] = optimizer["state"][number]
        if not self._rest:
            self._rest = {key: state[key] for key in ("counters", "scheduler", "registered")}
            self._by_group = [
                {key: value for key, value in group.items() if key not in NAMING}
                for group in optimizer["param_groups"]
            ]

    def state(self, groups: Sequence[Sequence[str]], optimizer: dict[str, Any]) -> dict[str, Any]:
        """That of the part, as `snapshot.load` takes it.

        Args:
            groups: names in each group of the part's optimizer.
            optimizer: the optimizer's state, with its own numbers of parameters.
        """
        moments: dict[int, Any] = {}
        param_groups = []
        for place, (names, group) in enumerate(zip(groups, optimizer["param_groups"], strict=True)):
            usual = self._by_group[place] if place < len(self._by_group) else {}
            settings = self._settings.get(names[0], usual) if names else usual
            param_groups.append({**group, **settings})
            for name, number in zip(names, group["params"], strict=True):
                if name in self._moments:
                    moments[number] = self._moments[name]
        return {
            **self._tensors,
            **self._rest,
            "optimizer": {"state": moments, "param_groups": param_groups},
        }


class GatheredPieces(Gathered):
    """The same where a part is a piece of each parameter, and so are those that states are of.

    Args:
        pieces: name -> which piece of the whole parameter.
        buffers: names.
    """

    def __init__(self, pieces: Mapping[str, Piece], buffers: Iterable[str]) -> None:
        super().__init__(pieces, buffers)
        self._pieces = pieces

    def add(self, state: dict[str, Any]) -> None:
        """One more state: of other pieces, which may overlap with those before."""
        parameters, optimizer = state["parameters"], state["optimizer"]
        had = self._tensors["parameters"]
        there = {
            name: Piece(tuple(state["offsets"][name]), tuple(parameters[name].shape))
            for name in self._pieces
            if name in parameters  # a part may have some layers only
        }
        moments = dict(optimizer["state"])
        for names, group in zip(state["groups"], optimizer["param_groups"], strict=True):
            for name, number in zip(names, group["params"], strict=True):
                if name in there and number in moments:
                    before = self._moments.get(name, {})
                    moments[number] = {
                        key: self._joined(name, before.get(key), value, there[name])
                        if isinstance(value, Tensor) and value.shape == there[name].shape
                        else value
                        for key, value in moments[number].items()
                    }
        joined = {n: self._joined(n, had.get(n), parameters[n], its) for n, its in there.items()}
        super().add({**state, "parameters": joined, "optimizer": {**optimizer, "state": moments}})

    def _joined(self, name: str, before: Tensor | None, value: Tensor, its: Piece) -> Tensor:
        """What there was of a piece, and what another has of it."""
        own = self._pieces[name]
        joined = value.new_zeros(own.shape) if before is None else before
        here, there = own.common(its)
        joined[here] = value[there]
        return joined
