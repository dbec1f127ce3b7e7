"""Checks of what users hand over; messages name the argument, its value and what may be.

Pure in effect; runs in any process.
"""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 80
"""A value whose text is longer is shown as its type."""


def shown(value: Any) -> str:
    """A value in a message: the same on all ranks, so without addresses, and short."""
    text = repr(value)
    if " at 0x" in text or len(text) > MAX_SHOWN or "\n" in text:
        return f"a {type(value).__name__}"
    return text


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless a value is a whole number, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number, {least} or more")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a finite number, more than 0."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{name} is {shown(value)}; it must be a number, more than 0")


def check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless a value is among the allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {shown(value)}; it must be one of {list(allowed)}")


def check_share(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a number, more than 0 and at most 1."""
    check_positive(name, value)
    if value > 1:
        raise ValueError(f"{name} is {shown(value)}; it must be a share, at most 1")
