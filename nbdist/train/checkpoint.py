"""A trainer's state on disk: what each rank writes. How it is read again: `train.resume`.

A rank copies what it is to write at a step boundary (`Part`), and a thread writes the copies while
training goes on; neither does any communication. Everything is kept by the names of the model's
parameters, and what is a piece of one says where in the whole it lies, so it can be read by other
numbers of ranks, and with another strategy. Copying runs in the engine's main thread.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checkpoints
from nbdist.errors import WrongState
from nbdist.train import snapshot, tensors
from nbdist.train.parting import NAMING, Origin, names_by_group, origins_of
from nbdist.train.strategies.apart import Apart
from nbdist.train.strategies.axes import place_of_rank
from nbdist.train.strategies.service import Service

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from nbdist.train.state import State

MISFIT = (
    "what this rank holds of the model is its part in a group of another size than the present "
    "one, of {0}: train a step, with which it is cut anew, then {1}"
)
REST = "rest.pt"
"""What is no tensor of the model or its optimizer; read with `weights_only`."""


class Part:
    """What one rank writes, as it is now.

    Args:
        state: the trainer's.
        rank: this one.
        num_ranks: that write.

    Raises:
        WrongState: nothing is trained yet, or the optimizer keeps something of a piece of a
            parameter that cannot be put together with that of the others.
        TypeError: something has a state that could not be read without running code.
    """

    def __init__(self, state: State, rank: int, num_ranks: int) -> None:
        if state.step == 0:
            raise WrongState(
                "nothing is trained yet, and before the first step the ranks' weights may differ: "
                "train a step, then save"
            )
        if not state.exchange.fits(rank, num_ranks):
            raise WrongState(MISFIT.format(num_ranks, "save"))
        self.rank, self.step = rank, state.step
        is_replicated = state.recipe.strategy.is_replicated
        twins = state.exchange.twins(rank, num_ranks)
        module, optimizer = state.module, state.optimizer
        named = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        # Each writes a share of what it and others hold.
        parameters, buffers = _share(named, *twins), _share(buffers, *twins)
        is_server = _is_server(state, rank, num_ranks)
        if is_server is False:  # what it has, the server writes
            parameters, buffers = {}, {}
        origins = origins_of(module)
        found: dict[str, Tensor] = {}
        found |= {f"parameters/{name}": tensor for name, tensor in parameters.items()}
        found |= {f"buffers/{name}": tensor for name, tensor in buffers.items()}
        self._origins = {f"parameters/{name}": origins[name] for name in parameters}
        states = {}
        for name, parameter in parameters.items():
            own = optimizer.state.get(parameter, {})
            of_torch = {key for key, value in own.items() if isinstance(value, torch.Tensor)}
            for key in of_torch:
                found[f"optimizer/{name}/{key}"] = own[key]
                origin = _origin_of(own[key], name, key, parameter, origins[name])
                self._origins[f"optimizer/{name}/{key}"] = origin
            states[name] = {
                "tensors": sorted(of_torch),
                "others": {key: value for key, value in own.items() if key not in of_torch},
            }
        rest: dict[str, Any] = {
            "counters": {name: getattr(state, name) for name in snapshot.COUNTERS},
            "sampling": sampling_of(state),
            "parameters": places_of(module),
            "optimizer": type(optimizer).__name__,
            "groups": [] if is_server is False else _groups(module, optimizer),
            "states": states,
        }
        if isinstance(state.exchange, Apart):
            rest["apart"] = state.exchange.own_state()
            shared = _share(state.exchange.shared_tensors(), rank, num_ranks)
            found |= {f"outer/{key}": tensor for key, tensor in shared.items()}
        if is_server or (is_server is None and (rank == 0 or not is_replicated)):
            rest["scheduler"] = state.scheduler.state_dict() if state.scheduler else None
            rest["registered"] = {n: obj.state_dict() for n, obj in state.registered.items()}
        self._rest = _packed(rest)
        self._tensors = {key: _copy(tensor) for key, tensor in found.items()}

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return len(self._rest) + sum(t.nbytes for t in self._tensors.values())

    def write(self, partial: Path) -> None:
        """Write it into the folder of a checkpoint, and leave the receipt.

        From any thread.

        Raises:
            OSError: it cannot be written.
        """
        name = checkpoints.part_name(self.rank)
        folder = partial / name
        try:
            folder.mkdir()
            (folder / REST).write_bytes(self._rest)
            tensors.write(folder, self._tensors, self._origins)
            checkpoints.acknowledge(partial, name)
        except OSError as error:
            error.filename = error.filename or str(folder)  # a write does not say where
            raise


def save(state: State, path: Path, keep: int | None) -> checkpoints.Found | None:
    """Write a whole checkpoint without a supervisor: rank 0 does, the others write nothing.

    Raises:
        WrongState: nothing is trained yet, or each rank holds something of its own.
        FileUnwritable: it cannot be written.
    """
    checkpoints.check_kept(keep)
    rank, num_ranks = place_of_rank()
    if num_ranks > 1 and not state.recipe.strategy.is_replicated:
        raise WrongState(
            f"each rank holds a part of its own ({state.recipe.strategy!r}), and without a "
            "supervisor nobody sees that all of them are written: save with cluster.save(path)"
        )
    if rank > 0:
        return None
    part = Part(state, 0, 1)
    with checkpoints.telling(path):
        partial = checkpoints.begin(path, step=part.step, generation=0)
        try:
            part.write(partial)
            names = [checkpoints.part_name(0)]
            return checkpoints.commit(partial, names, step=part.step, generation=0, keep=keep)
        finally:
            checkpoints.discard(partial)  # where it has its name, nothing is there any more


# ---- what is written


def _is_server(state: State, rank: int, num_ranks: int) -> bool | None:
    """Whether a rank is a parameter server; None: there is none."""
    exchange = state.exchange
    return exchange.server_of(num_ranks) == rank if isinstance(exchange, Service) else None


def _share(named: Mapping[str, Tensor], at: int, num: int) -> dict[str, Any]:
    """Of what so many ranks hold this one's share, by bytes; the same cut on all of them."""
    loads, mine = [0] * num, set()
    for name in sorted(named, key=lambda name: (-named[name].nbytes, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += named[name].nbytes
        if lightest == at:
            mine.add(name)
    return {name: tensor for name, tensor in named.items() if name in mine}


def _origin_of(value: Tensor, name: str, key: str, parameter: Tensor, origin: Origin) -> Origin:
    """Where something that the optimizer keeps of a parameter lies: as that does, or it is whole.

    Raises:
        WrongState: of a piece it keeps neither numbers for each of the piece's nor a single one.
    """
    if value.shape == parameter.shape:
        return origin
    if parameter.shape != origin.shape and value.numel() > 1:
        raise WrongState(
            f"of {name}, of which this rank has a piece of shape {tuple(parameter.shape)}, the "
            f"optimizer keeps {key} of shape {tuple(value.shape)}. How to put that together with "
            "what other ranks keep is not known: save with an optimizer that keeps tensors of its "
            "parameters' shapes (AdamW, SGD), or with a strategy that leaves them whole"
        )
    return Origin.whole(value)


def places_of(module: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Name -> offsets and shape of what a rank has of each parameter."""
    origins = origins_of(module)
    return {n: [origins[n].offsets, tuple(p.shape)] for n, p in module.named_parameters()}


def _groups(module: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups: names of parameters, and the settings that they share."""
    return [
        {"names": names, "settings": {k: v for k, v in group.items() if k not in NAMING}}
        for names, group in zip(
            names_by_group(module, optimizer), optimizer.param_groups, strict=True
        )
    ]


def sampling_of(state: State) -> dict[str, Any]:
    """What the order of samples, and everything random, follows from beside the step."""
    recipe = state.recipe
    return {
        "seed": recipe.seed,
        "global_batch": recipe.global_batch,
        "tail": recipe.tail,
        "num_samples": state.sampling.num_samples,
    }


def _copy(tensor: Tensor) -> Tensor:
    """In the memory of this process, whatever becomes of the original."""
    plain = tensor.detach()
    return plain.clone() if plain.device.type == "cpu" else plain.cpu()


def _packed(rest: dict[str, Any]) -> bytes:
    """As torch writes it; sees that it can be read again without running anything of it."""
    users = {f"register({n!r}, …)": s for n, s in (rest.get("registered") or {}).items()}
    parts = {
        "the optimizer": [rest["groups"], rest["states"]],
        "the scheduler": rest.get("scheduler"),
    }
    for what, part in (parts | users).items():
        try:
            unpack(_pack(snapshot.without_tensors(part)))
        except Exception as error:
            raise TypeError(
                f"{what}: its state_dict() cannot be kept in a checkpoint, of which nothing is "
                f"unpickled: {first_line(error)}. Numbers, strings, tensors, lists and dicts can"
            ) from error
    return _pack(rest)


def _pack(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """A value again; nothing in the bytes is run."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def first_line(error: BaseException) -> str:
    """What torch says has many."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
