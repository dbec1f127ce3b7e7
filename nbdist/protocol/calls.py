"""Names of the engine functions that the kernel may invoke. Pure.

They are expressions, which ipyparallel evaluates on the engine. The kernel names them and never
loads them (docs/architecture.md).
"""

from __future__ import annotations

METADATA = "nbdist"
"""Key of our part in the metadata of an execute request and in its reply."""


def _function(name: str, module: str = "entry") -> str:
    return f"__import__('nbdist.engine.{module}', fromlist=['{name}']).{name}"


PUSH = _function("push")
"""(values: dict[str, bytes]) -> None: bind names."""

PULL = _function("pull")
"""(name: str, as_numpy: bool) -> bytes: a packed value; tensors on the CPU."""

PARAMETER_DIGEST = _function("parameter_digest")
"""(name: str) -> str: digest of the parameters of a trainer or module."""

VARIABLES = _function("variables", "variables")
"""(names: Sequence[str]) -> dict[str, Described]: the user's variables; named ones only, if any."""

NUMBERS = _function("numbers", "variables")
"""(names: Sequence[str]) -> dict[str, bytes]: what these variables hold, as float64."""

STANDING = _function("standing", "saving")
"""(name: str | None) -> (str, int): a trainer's name and its committed steps.

None: the one that trains, or the only one there is.
"""

SAVE = _function("save", "saving")
"""(name: str, partial: str) -> int: copy the state, begin to write it; so many bytes."""

READ = _function("read", "saving")
"""(name: str, folder: str) -> (int, list[str]): read a checkpoint; its step, and notes on it."""

TAKE = _function("take", "saving")
"""(name: str, is_wanted: bool) -> None: have what was read, or let go of it."""
