"""What `nbdist doctor` says: one fact about this machine, judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this machine, judged."""

    name: str
    level: Level
    text: str
    next_step: str = ""
    """What to do about it; empty where nothing needs doing."""
