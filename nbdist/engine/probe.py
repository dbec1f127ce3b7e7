"""Samples what this process uses: memory, cores, memory of its GPU. Runs in the agent's thread.

Nothing here asks a driver or waits for a device: an agent that waits is taken for hung.
"""

from __future__ import annotations

import logging
import time

import psutil
import torch

from nbdist.engine.emit import scalar
from nbdist.protocol.telemetry import Kind

log = logging.getLogger(__name__)


class Probe:
    """One process's."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._since_s, self._used_s = time.monotonic(), time.process_time()
        self._is_well = True

    def sample(self) -> None:
        """Write a record of each; what this process does not have is left out."""
        if not self._is_well:
            return
        try:
            scalar(Kind.MEMORY_RSS, self._process.memory_info().rss)
            if torch.cuda.is_initialized():
                scalar(Kind.MEMORY_DEVICE, torch.cuda.memory_reserved())
        except (OSError, RuntimeError, psutil.Error):
            log.exception("this process cannot be sampled; there will be no figures of it")
            self._is_well = False
            return
        now_s, used_s = time.monotonic(), time.process_time()
        if now_s > self._since_s:
            scalar(Kind.CPU, (used_s - self._used_s) / (now_s - self._since_s))
        self._since_s, self._used_s = now_s, used_s
