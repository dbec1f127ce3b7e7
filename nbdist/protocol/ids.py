"""Types of the numbers that name things, so that a rank is never passed where a slot is meant.

Pure.
"""

from __future__ import annotations

from typing import NewType

Slot = NewType("Slot", int)
"""A stable seat, 0 … n-1: device, environment, log, colour. Outlives the engines that sit on it."""

Rank = NewType("Rank", int)
"""Place among the occupied slots of one generation, in slot order; torch.distributed's meaning."""

EngineId = NewType("EngineId", int)
"""ipyparallel's integer for a registered engine. Says nothing about order."""

Generation = NewType("Generation", int)
"""Counts the groups formed by this cluster, from 1; 0 means none yet."""

CellId = NewType("CellId", str)
"""Names one cell run."""

RunId = NewType("RunId", str)
"""Names one training run."""
