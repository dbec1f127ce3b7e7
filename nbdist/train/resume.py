"""A trainer's state read again from disk, by any number of ranks and with any strategy.

Each rank reads what it holds of the model, wherever it was written. Reading changes nothing; what
was read is taken over in a second call, so that all ranks do it or none. Runs in the engine's main
thread; does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist import checkpoints
from nbdist.errors import CheckpointUnreadable, WrongState
from nbdist.train import snapshot, tensors
from nbdist.train.checkpoint import (
    MISFIT,
    REST,
    first_line,
    places_of,
    sampling_of,
    unpack,
)
from nbdist.train.parting import InPieces, Origin, names_by_group, origins_of
from nbdist.train.strategies.apart import Apart
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.outer import Kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from nbdist.train.state import State

MAX_NAMED = 8
"""Names in a message."""
_APART = (
    "the ranks had trained apart; this goes on with the mean of their parameters, and with what "
    "the optimizer of the first had kept"
)


class Loaded(NamedTuple):
    """A state that was read, and fits a trainer; it is not the trainer's yet."""

    parts: dict[str, Any]
    """As `snapshot.whole` gives them."""
    notes: list[str]
    """What does not go on as it was."""
    kept: Kept | None = None
    """Where ranks had trained apart: what belongs to their outer steps."""

    @property
    def step(self) -> int:
        """Committed steps."""
        step: int = self.parts["counters"]["step"]
        return step


def read(state: State, folder: Path) -> Loaded:
    """Read of a checkpoint what this rank holds; changes nothing.

    Args:
        state: the trainer's.
        folder: a checkpoint that is whole.

    Raises:
        WrongState: the rank holds its part in a group of another size.
        CheckpointUnreadable: it is of another model or optimizer, or lacks something.
    """
    rank, num_ranks = place_of_rank()
    if not state.exchange.fits(rank, num_ranks):
        raise WrongState(MISFIT.format(num_ranks, "load"))
    manifest = checkpoints.read_manifest(folder)
    rests = [_unpacked(folder / part / REST) for part in manifest.parts]
    steps = {rest["counters"]["step"] for rest in rests}
    if steps != {manifest.step}:
        raise CheckpointUnreadable(f"{folder} has parts of steps {sorted(steps)}; it is of no use")
    index = tensors.Index(folder, manifest.parts)
    named = dict(state.module.named_parameters())
    buffers = dict(state.module.named_buffers())
    _check_names(state, folder, index, rests)
    is_own = _is_own(state, rests, num_ranks)
    source, states = index, _states(rests)
    own, origins = _own_part(rests, state), origins_of(state.module)
    if is_own:
        own, states = rests[rank], _states([rests[rank]])
        source = tensors.Index(folder, [manifest.parts[rank]])
    wanted: dict[str, tuple[Tensor, Origin]] = {}
    wanted |= {f"parameters/{name}": (t, origins[name]) for name, t in named.items()}
    wanted |= {f"buffers/{name}": (t, Origin.whole(t)) for name, t in buffers.items()}
    for name, parameter in named.items():
        for key in states[name]["tensors"]:
            wanted[f"optimizer/{name}/{key}"] = parameter, origins[name]
    targets = source.read(wanted)
    if "apart" in own and not is_own:
        targets |= _means(folder, manifest.parts, rests, wanted)
    for name, found in states.items():
        found["all"] = dict(found["others"])
        if name in named:
            found["all"] |= {k: targets[f"optimizer/{name}/{k}"] for k in found["tensors"]}
    parts = {
        "counters": own["counters"],
        "parameters": {name: targets[f"parameters/{name}"] for name in named},
        "buffers": {name: targets[f"buffers/{name}"] for name in buffers},
        "optimizer": _optimizer(state, rests, states),
        "scheduler": own["scheduler"],
        "registered": own["registered"],
    }
    notes = _notes(state, rests[0]["sampling"])
    if "apart" in own and not is_own and len(rests) > 1:
        notes.append(_APART)
    return Loaded(parts, notes, _kept(state, index, own, is_own=is_own))


def take(state: State, loaded: Loaded) -> None:
    """Have a state that was read. Every rank does it, or none."""
    snapshot.load(state, loaded.parts, is_other=True)
    if isinstance(state.exchange, Apart):
        state.exchange.resume(loaded.step, loaded.kept)
    state.loader.forget()
    state.settled_in = None


def _is_own(state: State, rests: list[dict[str, Any]], num_ranks: int) -> bool:
    """Whether ranks had trained apart as they do here, so that each goes on from its own."""
    exchange, saved = state.exchange, rests[0].get("apart")
    if saved is None or not isinstance(exchange, Apart):
        return False
    return saved["kind"] == exchange.kind and len(rests) == num_ranks


def _means(
    folder: Path,
    parts: Sequence[str],
    rests: list[dict[str, Any]],
    wanted: Mapping[str, tuple[Tensor, Origin]],
) -> dict[str, Tensor]:
    """Parameters of ranks that had trained apart: the mean, weighted by what each had trained on.

    What all have alike is the mean bit by bit.
    """
    weights = [rest["apart"]["weights"] for rest in rests]
    totals = {name: sum(its[name] for its in weights) for name in weights[0]}
    keys = {f"parameters/{name}": name for name in totals if f"parameters/{name}" in wanted}
    of_first: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for part, its in zip(parts, weights, strict=True):
        found = tensors.Index(folder, [part]).read({key: wanted[key] for key in keys})
        if not of_first:
            of_first, means = found, {key: tensor.clone() for key, tensor in found.items()}
        for key, name in keys.items():
            weight = its[name] / totals[name] if totals[name] else 1 / len(parts)
            means[key] += (found[key] - of_first[key]) * weight
    return means


def _kept(state: State, index: tensors.Index, own: dict[str, Any], *, is_own: bool) -> Kept | None:
    """What belongs to outer steps; where this rank is none of those that wrote, the momentum."""
    if "apart" not in own or not isinstance(state.exchange, Apart):
        return None
    wanted: dict[str, tuple[Tensor, Origin]] = {}
    for name, parameter in state.module.named_parameters():
        for kind in ("anchors", "momenta") if is_own else ("momenta",):
            if (key := f"outer/{kind}/{name}") in index:
                wanted[key] = parameter, Origin.whole(parameter)
    found = {key.removeprefix("outer/"): t for key, t in index.read(wanted).items()}
    saved = own["apart"]
    return Kept(found, saved["num_lost"], saved if is_own else None)


def _unpacked(file: Path) -> dict[str, Any]:
    try:
        rest: dict[str, Any] = unpack(file.read_bytes())
    except Exception as error:
        raise CheckpointUnreadable(f"{file} cannot be read: {first_line(error)}") from error
    return rest


def _states(rests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name -> what the optimizer keeps of each parameter: of its tensors the names.

    A rank that has no rows of a parameter may keep nothing of it; then others say what there is.
    """
    states: dict[str, dict[str, Any]] = {}
    for rest in rests:
        for name, found in rest["states"].items():
            if name not in states or any(found.values()):
                states[name] = found
    return states


def _own_part(rests: list[dict[str, Any]], state: State) -> dict[str, Any]:
    """Where ranks had registered something of their own: that of the rank that held the same."""
    having = [rest for rest in rests if "registered" in rest]
    places = places_of(state.module)
    same = [rest for rest in having if rest["parameters"] == places]
    rank, _ = place_of_rank()
    own = [rest for rest in same if rest is rests[min(rank, len(rests) - 1)]]
    return (own or same or having)[0]


def _check_names(
    state: State, folder: Path, index: tensors.Index, rests: list[dict[str, Any]]
) -> None:
    """Raise CheckpointUnreadable where the checkpoint is of something else than this trainer."""
    here = {f"parameters/{name}": origin.shape for name, origin in origins_of(state.module).items()}
    here |= {f"buffers/{name}": tuple(t.shape) for name, t in state.module.named_buffers()}
    faults = []
    if missing := [key for key in here if key not in index]:
        faults.append(f"lacks {_list(missing)}")
    there = {f"parameters/{name}" for rest in rests for name in rest["parameters"]}
    module = state.module
    has_all = isinstance(module, InPieces) and module.has_every_name
    has_all = has_all or state.recipe.strategy.is_replicated
    surplus = sorted(there - set(here)) if has_all else []
    if surplus:
        faults.append(f"has {_list(surplus)}, which this trainer's model has not")
    shapes = [
        f"{key} {index.shape(key)} instead of {shape}"
        for key, shape in here.items()
        if key in index and index.shape(key) != shape
    ]
    if shapes:
        faults.append(f"has other shapes: {_list(shapes)}")
    if (kind := rests[0]["optimizer"]) != type(state.optimizer).__name__:
        faults.append(
            f"has the state of {kind}, and the optimizer is {type(state.optimizer).__name__}"
        )
    own = _own_part(rests, state)
    differing = sorted(set(own["registered"]) ^ set(state.registered))
    if differing:
        faults.append(f"and the trainer differ in what was registered: {_list(differing)}")
    if (own["scheduler"] is None) != (state.scheduler is None):
        faults.append("and the trainer differ: only one of them has a scheduler")
    if faults:
        raise CheckpointUnreadable(
            f"{folder} does not fit this trainer: it {'; it '.join(faults)}. Make the trainer as "
            "it was made when it was saved; its strategy may be another"
        )


def _optimizer(
    state: State, rests: list[dict[str, Any]], states: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The state of this rank's optimizer, as it loads it."""
    optimizer = state.optimizer
    settings = {
        name: group["settings"]
        for rest in rests
        for group in rest["groups"]
        for name in group["names"]
    }
    packed = optimizer.state_dict()
    loaded: dict[str, Any] = {"state": {}, "param_groups": []}
    names = names_by_group(state.module, optimizer)
    for its, group in zip(names, packed["param_groups"], strict=True):
        if len({repr(settings[name]) for name in its}) > 1:
            raise CheckpointUnreadable(
                f"a parameter group of the optimizer holds {_list(its)}, which had different "
                "settings when they were saved. Make the groups as they were made then"
            )
        loaded["param_groups"].append(group | (settings[its[0]] if its else {}))
        for number, name in zip(group["params"], its, strict=True):
            if states[name]["all"]:
                loaded["state"][number] = states[name]["all"]
    return loaded


def _notes(state: State, saved: dict[str, Any]) -> list[str]:
    """In words, what makes the samples to come others than they would have been."""
    here = sampling_of(state)
    return [
        f"{name} is {here[name]} here and was {saved[name]} when it was saved: the samples to come "
        "are others than they would have been"
        for name in here
        if here[name] != saved[name]
    ]


def _list(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else ""
    return ", ".join(name.removeprefix("parameters/") for name in shown[:MAX_NAMED]) + more
