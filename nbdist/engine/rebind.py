"""DistributedDataParallel objects live on when the group changes.

They are unbound from the old group and bound to the new. The objects keep their identity,
parameters and hooks. What is rebuilt is the part that holds the group: the reducer, on every rank
in every generation, since ranks whose reducers have different bucket layouts end one another's
processes. Rebuilding goes through the class's own unpickling, which does exactly that. What else
holds the default group lets go of it here, and finds the next one by itself.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import GroupGone

_init = DistributedDataParallel.__init__
_detached: list[DistributedDataParallel] = []


class Holder(Protocol):
    """Something of ours that holds the default group, and gets the next one by itself."""

    def let_go(self) -> None:
        """The group is about to be left: hold it no longer."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(holder: Holder) -> None:
    """Have it told each time that the group is left."""
    _holders.add(holder)


def detach_all() -> None:
    """Let go of the present groups.

    Models on a group of the user's own cannot come back by themselves.
    """
    _detached.clear()
    for holder in list(_holders):
        holder.let_go()
    for model in _models():
        state = model.__dict__
        if state.get("process_group") is None:  # retired
            continue
        is_default = state.get("process_group") is dist.group.WORLD
        state["reducer"] = state["logger"] = state["process_group"] = None
        if is_default:
            _detached.append(model)
        else:
            state["forward"] = _raise_gone


def attach_all() -> None:
    """Bind what was detached to the present default group."""
    for model in _detached:
        state = dict(model.__dict__)
        for name in ("reducer", "logger", "process_group"):
            del state[name]
        hooks = state["_comm_hooks"]
        state["_comm_hooks"] = []
        state["broadcast_buffers"] = model.forward_sync_buffers
        # A new reducer has seen no backward: what a static graph does in its first is due again.
        state["_static_graph_delay_allreduce_enqueued"] = False
        state["_has_rebuilt_buckets"] = state["_lazy_init_ran"] = False
        # Whether a forward exchanges buffers follows from the one before, which differs by rank.
        state["require_forward_param_sync"] = True
        model.__setstate__(state)
        for hook, hook_state in hooks:
            model.register_comm_hook(hook_state, hook)
    _detached.clear()


def retire(model: DistributedDataParallel) -> None:
    """A model is of no more use to whoever made it: its parameters are let go.

    Whoever still holds it, as an error's frames do, does not bring it back.
    """
    for name in ("reducer", "logger", "process_group"):
        model.__dict__[name] = None


def silence() -> None:
    """For a replay, whose group does nothing: models keep their gradients to themselves.

    torch's reducer ends in an internal assertion when nobody answers it.
    """
    for model in _models():
        model.require_backward_grad_sync = False
    DistributedDataParallel.__init__ = _silent_init  # type: ignore[method-assign]


def speak() -> None:
    """The replay is over."""
    DistributedDataParallel.__init__ = _init  # type: ignore[method-assign]
    for model in _models():
        model.require_backward_grad_sync = True


def _silent_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.require_backward_grad_sync = False


def _models() -> list[DistributedDataParallel]:
    """Every such object of this process.

    What was imported before the fork is frozen and not looked through.
    """
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def _raise_gone(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise GroupGone(
        "this DistributedDataParallel model uses a process group of an earlier generation that was "
        "made by hand. Make the group again and wrap the model anew: "
        "DistributedDataParallel(model.module, process_group=…)"
    )
