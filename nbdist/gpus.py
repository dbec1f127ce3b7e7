"""What this host has to compute on: how many GPUs, how many CPU cores. Any process may ask.

GPUs are counted by NVML, which does not open them: after this a process may still be forked. Never
imports torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_FIRST_GPU = Path("/dev/nvidia0")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that a process may use, in torch's order; where there are none, why."""

    names: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls each of them: its number on the host, or a UUID."""
    reason: str = ""
    """Why there are none; empty where there are some."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)


def count_gpus(environ: Mapping[str, str] | None = None) -> Gpus:
    """The GPUs that a process with this environment (default: this one's) may use."""
    num_devices, reason = _ask_nvml()
    if not num_devices:
        return Gpus(reason=reason)
    value = (os.environ if environ is None else environ).get(VISIBLE_DEVICES)
    names = visible_names(num_devices, value)
    if not names:
        return Gpus(reason=f"{VISIBLE_DEVICES}={value!r} hides all {num_devices} of this host")
    return Gpus(names=names)


def visible_names(num_devices: int, value: str | None) -> tuple[str, ...]:
    """What a value of CUDA_VISIBLE_DEVICES leaves of so many GPUs; None: it is not set.

    CUDA's rules: the list ends before the first entry that means nothing, and a list that names a
    GPU twice names none.
    """
    if value is None:
        return tuple(str(index) for index in range(num_devices))
    names: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        is_index = entry.isdecimal() and int(entry) < num_devices
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        names.append(str(int(entry)) if is_index else entry)
    return tuple(names) if len(set(names)) == len(names) else ()


def num_cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control group (v2), or its quota is "max"
        return cores


def default_num_engines(environ: Mapping[str, str] | None = None) -> int:
    """How many engines to start where nobody says: one for each GPU, else for each CPU core."""
    return count_gpus(environ).count or num_cores()


def own_use() -> tuple[str, ...]:
    """What the user should know where this very process, a notebook, computes on GPUs itself.

    Nothing is imported for it: whoever uses them has torch loaded.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return ()
    held_bytes = sum(cuda.memory_reserved(gpu) for gpu in range(cuda.device_count()))
    held = f"torch holds {held_bytes / 2**20:.0f} MiB there and its context some hundred more"
    return (f"the notebook's own process uses a GPU: {held}, which engines cannot have",)


def _ask_nvml() -> tuple[int, str]:
    """How many GPUs the driver has, or 0 and why."""
    try:
        import pynvml  # noqa: PLC0415 - optional
    except ImportError:
        if _FIRST_GPU.exists():
            return 0, "nvidia-ml-py is not installed, so the GPUs here cannot be counted"
        return 0, "no NVIDIA device"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return 0, f"no NVIDIA driver answers ({error})"
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        return 0, f"the NVIDIA driver does not tell its GPUs ({error})"
    finally:
        pynvml.nvmlShutdown()
    return count, "" if count else "the NVIDIA driver has no GPU"
