"""Phases of the world, one at a time; `state` says how one leads to the other. Pure."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Phase of the world."""

    STARTING = "starting"
    FORMING = "forming"
    RESTORING = "restoring"
    RUNNING = "running"
    BREAKING = "breaking"
    FAILED = "failed"
