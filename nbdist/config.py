"""Settings of a cluster: frozen, keyword-only, units in names, checked here. Pure.

Also the one place that knows which address our sockets bind to.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

LOOPBACK = "127.0.0.1"
"""Where everything listens while all engines are on this host."""

LOOPBACK_INTERFACE = "lo"
"""Gloo's name for it."""

Policy = Literal["refill", "shrink"]
"""What happens after a loss; `wait` and `raise` are reserved."""

FOREVER_S = 1e9
_LATER = {"wait", "raise"}
_LAUNCHERS = {"local"}
_LATER_LAUNCHERS = {"ssh", "slurm", "mpi"}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What `nbdist.start` and `%dist_init` take."""

    num_engines: int
    """Seats to fill at the start; at least 1."""
    devices: tuple[int, ...] = ()
    """GPU index of each slot, in slot order; empty: GPUs 0 … n-1 where there are any, else CPU."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """torch.distributed backend; auto: nccl where every slot has a GPU, else gloo."""
    launcher: str = "local"
    """How engines are started; local: on this host."""
    hosts: tuple[str, ...] = ()
    """Hosts beside this one; only with launchers that reach them."""
    policy: str = "refill"
    """refill: the survivors go on and the seat is filled again; shrink: it stays empty."""
    min_world: int = 1
    """With fewer survivors than this, recovery fails."""
    hang_timeout_s: float = 10.0
    """A process that makes no progress at all for this long is taken for dead and killed."""
    start_timeout_s: float = 60.0
    """Engines must be ready within this time."""
    replay_limit_s: float = 30.0
    """Cells that ran longer are not replayed to engines that join later."""
    keep: bool = False
    """The cluster outlives the kernel; ended by shutdown only."""
    threads_per_engine: int = 0
    """Intra-op threads of each engine; 0: cores divided by engines, at least 1."""
    max_restarts: int = 3
    """A seat whose engines end this often in a row before they are in a group is given up."""
    telemetry_max_mb: int = 64
    """MB of telemetry in the supervisor's memory; older values are summed up, then forgotten."""
    record: str = ""
    """Folder in which each run is written down for `nbdist replay`; empty: none is."""
    lease_s: float = 15.0
    """Processes end by themselves when no supervisor has renewed their lease for this long."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the field, the value and what is allowed."""
        for name in (
            "num_engines",
            "min_world",
            "max_restarts",
            "telemetry_max_mb",
            "threads_per_engine",
        ):
            value = getattr(self, name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            _check(is_integer, name, value, "an integer")
        is_tuple = isinstance(self.devices, tuple)
        are_integers = is_tuple and all(type(d) is int and d >= 0 for d in self.devices)
        _check(are_integers, "devices", self.devices, "GPU numbers, such as [0, 1]")
        _check(self.num_engines >= 1, "num_engines", self.num_engines, "at least 1")
        _check(self.min_world >= 1, "min_world", self.min_world, "at least 1")
        few = f"at most num_engines={self.num_engines}"
        _check(self.min_world <= self.num_engines, "min_world", self.min_world, few)
        _check(self.max_restarts >= 1, "max_restarts", self.max_restarts, "at least 1")
        _check(self.telemetry_max_mb >= 1, "telemetry_max_mb", self.telemetry_max_mb, "at least 1")
        _check(
            self.threads_per_engine >= 0, "threads_per_engine", self.threads_per_engine, "0 or more"
        )
        for name in ("backend", "policy", "launcher"):
            value = getattr(self, name)
            _check(isinstance(value, str), name, value, "one of its names, a string")
        _check(isinstance(self.record, str), "record", self.record, "a folder, as a string")
        _check(isinstance(self.keep, bool), "keep", self.keep, "True or False")
        for name in ("hang_timeout_s", "start_timeout_s", "replay_limit_s", "lease_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_time = is_number and 0 < value < FOREVER_S
            _check(is_time, name, value, "more than 0 seconds, and finite")
        _check(
            self.backend in ("auto", "gloo", "nccl"), "backend", self.backend, "auto, gloo or nccl"
        )
        if self.policy in _LATER:
            raise ValueError(f"policy={self.policy!r} is not there yet; use refill or shrink")
        _check(self.policy in get_args(Policy), "policy", self.policy, "refill or shrink")
        if self.launcher in _LATER_LAUNCHERS or self.hosts:
            raise ValueError(
                f"launcher={self.launcher!r}, hosts={list(self.hosts)}: "
                "only local engines are there yet"
            )
        _check(self.launcher in _LAUNCHERS, "launcher", self.launcher, "local")
        repeated = len(set(self.devices)) != len(self.devices)
        _check(not repeated, "devices", list(self.devices), "each device once")
        if self.devices:
            _check(
                len(self.devices) == self.num_engines,
                "devices",
                list(self.devices),
                f"{self.num_engines} of them",
            )

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> ClusterConfig:
        """From a profile or a file.

        Raises:
            ValueError: a key is unknown; names it and the known ones.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        tuples: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**tuples)


def _check(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: must be {allowed}")
