"""Samples what this process uses: memory, cores, memory of its GPU. Runs in the agent's thread.

Nothing here asks a driver or waits for a device: an agent that waits is taken for hung.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from pathlib import Path

import psutil
import torch

from nbdist.engine.emit import scalar
from nbdist.protocol.telemetry import Kind

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = "memory.max", "memory/memory.limit_in_bytes"
"""Of its second version and of its first; in a container they stand at the top."""

log = logging.getLogger(__name__)


class Probe:
    """One process's."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._since_s, self._used_s = time.monotonic(), time.process_time()
        self._is_well = True
        self._limit_bytes = limit_bytes(_CGROUP)

    def sample(self) -> None:
        """Write a record of each; what this process does not have is left out."""
        if not self._is_well:
            return
        try:
            scalar(Kind.MEMORY_RSS, self._process.memory_info().rss)
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            scalar(Kind.MEMORY_PEAK, peak_kib * 1024)
            scalar(Kind.MEMORY_LIMIT, self._limit_bytes)
            if torch.cuda.is_initialized():
                scalar(Kind.MEMORY_DEVICE, torch.cuda.memory_reserved())
                scalar(Kind.MEMORY_DEVICE_USED, torch.cuda.memory_allocated())
                device = torch.cuda.get_device_properties(torch.cuda.current_device())
                scalar(Kind.MEMORY_DEVICE_LIMIT, device.total_memory)
        except (OSError, RuntimeError, psutil.Error):
            log.exception("this process cannot be sampled; there will be no figures of it")
            self._is_well = False
            return
        now_s, used_s = time.monotonic(), time.process_time()
        if now_s > self._since_s:
            scalar(Kind.CPU, (used_s - self._used_s) / (now_s - self._since_s))
        self._since_s, self._used_s = now_s, used_s


def limit_bytes(cgroup: Path) -> int:
    """What this process can have: all of the host's memory, or what its control group allows."""
    limits = [psutil.virtual_memory().total]
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int((cgroup / name).read_text()))
    return min(limits)
