"""The user's names on this engine: packed for a newcomer, taken over by one.

Runs in the main thread. A newcomer's own modules, optimizers and trainers, made by the replay, are
loaded rather than replaced, so that an optimizer goes on to hold the parameters of the very model
beside it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.port import Drivable, is_trainer
from nbdist.protocol import values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

log = logging.getLogger(__name__)


def user_names(user_ns: Mapping[str, Any], hidden: Iterable[str]) -> list[str]:
    """Names that the user made: not IPython's, not ours, not private."""
    ignored = values.OURS | set(hidden) | {"In", "Out", "exit", "quit", "get_ipython", "open"}
    return sorted(n for n in user_ns if not n.startswith("_") and n not in ignored)


def pack_names(user_ns: Mapping[str, Any], names: Iterable[str]) -> tuple[bytes, dict[str, str]]:
    """One bundle of names -> packed value or state, and what cannot be packed, with the reason."""
    bundle: dict[str, tuple[str, bytes]] = {}
    failed: dict[str, str] = {}
    for name in names:
        value = user_ns.get(name)
        try:
            if is_trainer(value):
                bundle[name] = ("trainer", values.pack((value.pack(), _whole(value))))
            elif _has_state(value):
                bundle[name] = ("state", values.pack((value.state_dict(), _rebuild(value))))
            else:
                bundle[name] = ("value", values.pack(value))
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            failed[name] = f"cannot be sent: {type(error).__name__}: {error}"
    return values.pack(bundle), failed


def take_names(user_ns: dict[str, Any], data: bytes, names: Iterable[str]) -> dict[str, str]:
    """Bind or load what a donor packed; returns what failed, with the reason."""
    bundle: dict[str, tuple[str, bytes]] = values.unpack(data)
    failed: dict[str, str] = {}
    for name in names:
        if name not in bundle:
            continue
        kind, packed = bundle[name]
        try:
            if kind == "value":
                user_ns[name] = values.unpack(packed)
            elif not _load(user_ns, name, *values.unpack(packed)):
                failed[name] = (
                    "missing, and only its state could be sent: run the cell that makes it"
                )
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            failed[name] = f"could not be taken over: {type(error).__name__}: {error}"
    return failed


def push_again(
    push: Callable[[dict[str, bytes]], None], packed: Mapping[str, bytes], failed: dict[str, str]
) -> None:
    """In a replay: bind what was pushed; note the names that cannot be, until they can."""
    for name, data in packed.items():
        try:
            push({name: data})
        except Exception as error:  # noqa: BLE001 - as above; the reason is told
            failed[name] = f"push of {name}: {type(error).__name__}: {error}"
        else:
            failed.pop(name, None)


def to_cpu(value: Any) -> Any:
    """Tensors on the CPU, cut loose from their graph, also inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(to_cpu(v) for v in value)
    if type(value) is dict:
        return {k: to_cpu(v) for k, v in value.items()}
    return value


def _load(user_ns: dict[str, Any], name: str, state: Any, rebuilt: Any) -> bool:
    """Load a state into what has the name here, since other names may hold its parts.

    Else bind what was sent whole; False where it was not.
    """
    here = user_ns.get(name)
    if is_trainer(here):
        here.unpack(state)
    elif _has_state(here):
        here.load_state_dict(state)
    elif rebuilt is not None:
        user_ns[name] = values.unpack(rebuilt) if isinstance(rebuilt, bytes) else rebuilt
    else:
        return False
    return True


def _whole(trainer: Drivable) -> bytes | None:
    """A trainer for a newcomer that lacks it; None where its data or functions cannot be sent."""
    try:
        return values.pack(trainer)
    except Exception:  # noqa: BLE001 - as above; who lacks it is told that only its state came
        return None


def _has_state(value: Any) -> TypeGuard[torch.nn.Module]:
    return isinstance(
        value,
        (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    )


def _rebuild(value: Any) -> Any:
    """The object itself, where a newcomer that lacks it can be given it whole, else None.

    An optimizer would lose its model.
    """
    is_whole = isinstance(value, torch.nn.Module) and not isinstance(value, DistributedDataParallel)
    return value if is_whole else None
