"""What slots this host offers, and what an engine's environment says about its device.

Used by the supervisor before it starts engines. Never imports torch and never opens a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.config import LOOPBACK_INTERFACE
from nbdist.gpus import VISIBLE_DEVICES, Gpus, count_gpus, default_num_engines
from nbdist.protocol.ids import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "SlotDevice",
    "count_gpus",
    "default_num_engines",
    "engine_environment",
    "offered_slots",
]


@dataclass(frozen=True, kw_only=True)
class SlotDevice:
    """What the engine on a slot computes on."""

    slot: Slot
    gpu: int | None = None
    """The GPU's index as the notebook counts them; None: the CPU."""
    visible: str = ""
    """What the engine finds in CUDA_VISIBLE_DEVICES; empty: no GPU."""

    @property
    def label(self) -> str:
        """For tables. An engine sees its own GPU alone, so that there it is always `cuda:0`."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"


def offered_slots(
    num_engines: int, devices: Sequence[int] = (), *, environ: Mapping[str, str] | None = None
) -> list[SlotDevice]:
    """The device of each slot.

    Args:
        num_engines: how many slots.
        devices: GPU index of each slot; empty: GPUs 0 … n-1 where there are GPUs, else the CPU.
        environ: the environment that says which GPUs may be used; default: this process's.

    Raises:
        ValueError: more GPUs are asked for than there are, or others; it says how many there are.
    """
    gpus = count_gpus(environ)
    if devices:
        _check_devices(devices, gpus)
        chosen: Sequence[int] = devices
    elif not gpus.count:
        return [SlotDevice(slot=Slot(slot)) for slot in range(num_engines)]
    elif num_engines > gpus.count:
        message = (
            f"{num_engines} engines, one GPU each, but there {_be(gpus.count)}; start at most "
            f"{gpus.count}, or set {VISIBLE_DEVICES} to an empty string for CPU engines"
        )
        raise ValueError(message)
    else:
        chosen = range(num_engines)
    return [
        SlotDevice(slot=Slot(slot), gpu=gpu, visible=gpus.names[gpu])
        for slot, gpu in enumerate(chosen)
    ]


def engine_environment(slot_device: SlotDevice, threads: int) -> dict[str, str]:
    """The variables that pin an engine to its device, its threads and the loopback interface."""
    return {
        VISIBLE_DEVICES: slot_device.visible,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


def _check_devices(devices: Sequence[int], gpus: Gpus) -> None:
    wrong = [gpu for gpu in devices if not 0 <= gpu < gpus.count]
    if not wrong:
        return
    message = f"devices={list(devices)}: "
    if gpus.count:
        message += f"no GPU {wrong[0]}; there {_be(gpus.count)}, numbered from 0"
    else:
        message += f"there is no GPU to use: {gpus.reason}"
    raise ValueError(message)


def _be(count: int) -> str:
    return "is 1 GPU" if count == 1 else f"are {count} GPUs"
