"""From what the user gives to a `ClusterConfig`: arguments, then a profile, then this host."""

from __future__ import annotations

import operator
import tomllib
from os import PathLike
from pathlib import Path
from typing import Any

from nbdist.config import ClusterConfig
from nbdist.gpus import default_num_engines


def cluster_config(profile: str | None, **given: Any) -> ClusterConfig:
    """Settings of a new cluster.

    Args:
        profile: a TOML file with settings in a table `[nbdist]`, or None.
        **given: fields of `ClusterConfig`; one that is None was not given.

    Raises:
        ValueError: a setting that makes no sense, or a profile that cannot be read.
    """
    settings: dict[str, Any] = {}
    if profile is not None:
        try:
            settings = dict(tomllib.loads(Path(profile).read_text()).get("nbdist", {}))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"profile={profile!r} cannot be read: {error}") from error
    for name, value in given.items():
        if value is not None:
            is_list = name in ("devices", "hosts") and not isinstance(value, str)
            settings[name] = tuple(map(_plain, value)) if is_list else _plain(value)
    if isinstance(folder := settings.get("record"), str | PathLike) and folder:
        settings["record"] = str(Path(folder).absolute())  # the supervisor may stand elsewhere
    settings.setdefault("num_engines", len(settings.get("devices", ())) or default_num_engines())
    return ClusterConfig.from_mapping(settings)


def _plain(value: Any) -> Any:
    """Python's own integer for one of numpy's or the like, which JSON does not know."""
    is_foreign = hasattr(value, "__index__") and not isinstance(value, int)
    return operator.index(value) if is_foreign else value
