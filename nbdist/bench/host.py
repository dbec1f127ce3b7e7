"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from nbdist.gpus import num_cores

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Without these, a figure says little."""

    cpu: str
    num_cores: int
    load: float
    """Processes that wanted to run in the minute before."""
    python: str
    torch: str
    ipyparallel: str

    @classmethod
    def this(cls) -> Host:
        """Where this process runs."""
        return cls(
            cpu=cpu_model(_CPU_INFO.read_text() if _CPU_INFO.exists() else ""),
            num_cores=num_cores(),
            load=os.getloadavg()[0],
            python=platform.python_version(),
            torch=version("torch"),
            ipyparallel=version("ipyparallel"),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.num_cores} cores, load {self.load:.1f}; "
            f"Python {self.python}, torch {self.torch}, ipyparallel {self.ipyparallel}"
        )


def cpu_model(cpu_info: str) -> str:
    """The processor's name in the text of /proc/cpuinfo, else its architecture."""
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return f"{platform.machine()} (no model name)"
