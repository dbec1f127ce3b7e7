"""Starts a cluster, and knows the one of this kernel.

Runs in the kernel; never imports torch.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from nbdist.errors import NotStarted, StartFailed, WrongState
from nbdist.rundir import Owner, RunDir
from nbdist.session.cluster import Cluster
from nbdist.session.settings import cluster_config

__all__ = ["Cluster", "current", "start"]

_current: Cluster | None = None


def start(
    num_engines: int | None = None, *, profile: str | None = None, **settings: Any
) -> Cluster:
    """Start engines and form their group; returns when cells can run.

    Args:
        num_engines: how many; None: as many as `devices`, else GPUs, else CPU cores.
        profile: a TOML file with settings in a table `[nbdist]`; arguments stand over it.
        **settings: fields of `nbdist.config.ClusterConfig`, such as `devices=[0, 1]`,
            `backend="gloo"`, `policy="shrink"`, `min_world=2`, `hang_timeout_s=10.0`,
            `start_timeout_s=60.0`, `keep=True`, `threads_per_engine=1`,
            `record="runs"`. None: the default.

    Raises:
        WrongState: a cluster runs already in this kernel.
        ValueError: a setting that makes no sense; names it, its value, and what is allowed.
        StartFailed: something did not come up; names it and shows the end of its log.
    """
    global _current  # noqa: PLW0603 - one current cluster per kernel
    if sys.platform == "win32":
        raise StartFailed("nbdist does not run on Windows; in WSL it does")
    if _current is not None:
        how = "shutdown() or %dist_shutdown end it"
        raise WrongState(f"cluster {_current.id} runs already in this kernel; {how}")
    config = cluster_config(profile, num_engines=num_engines, **settings)
    try:
        rundir = RunDir.create(config, Owner.this())
    except OSError as error:
        raise StartFailed(f"the cluster's directory cannot be made: {error}") from error
    cluster = Cluster(rundir, config)
    try:
        cluster.bring_up()
    except BaseException:
        cluster.shutdown()
        raise
    if not config.keep:
        atexit.register(cluster.shutdown)
    cluster.on_shutdown = _forget
    _current = cluster
    return cluster


def current() -> Cluster:
    """The cluster of this kernel; raises `NotStarted` where there is none."""
    if _current is None:
        raise NotStarted(
            "no cluster runs in this kernel; start one with %dist_init or nbdist.start()"
        )
    return _current


def _forget() -> None:
    global _current  # noqa: PLW0603 - as above
    if _current is not None:
        atexit.unregister(_current.shutdown)
    _current = None
