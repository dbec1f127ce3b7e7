"""What an engine tells of one of its variables, in place of its value. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NAMES = 500
"""Of so many variables an engine tells; the first in alphabetical order."""
MAX_NUMBERS = 1 << 16
"""How far variables are from each other is worked out where they hold so many numbers at most."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """One variable on one rank."""

    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    text: str = ""
    """The value of a number or a short text; how far a trainer is."""
    digest: str = ""
    """Equal for equal values on all engines; empty where it was not made."""
    not_compared: str = ""
    """Why there is no digest."""
    not_sent: str = ""
    """What keeps it from being sent, with the member at fault."""
    num_numbers: int = 0
    """So many numbers can be asked for, to tell how far it is from another rank's; 0: none."""

    @property
    def form(self) -> tuple[str, str, str]:
        """Variables of different form are different; values need not be looked at."""
        return self.type, self.shape, self.dtype
