"""How the magics' lines are read: arguments and their types, with a sentence where one is wrong.

Runs in the kernel, in the thread that runs the cell. Knows no session.
"""

from __future__ import annotations

import keyword
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_magic
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from nbdist.protocol.tables import View

__all__ = [
    "as_count",
    "as_devices",
    "as_factor",
    "as_hosts",
    "as_name",
    "as_seconds",
    "as_setting",
    "as_text",
    "as_view",
    "magic",
    "option",
    "read_line",
    "without_comment",
]

Method = TypeVar("Method", bound=Callable[..., None])

_SETTINGS = ("lr",)
"""What may be changed while a run goes on."""


def read_line(method: Callable[..., None], line: str) -> Namespace:
    """The arguments of a magic, without a comment behind them; raises UsageError."""
    line = without_comment(line)
    try:
        args = parse_argstring(method, line)  # type: ignore[no-untyped-call]
    except ValueError as error:  # from shlex: a quotation without its end
        message = f"cannot read {line.strip()!r}: {str(error).lower()}"
        raise UsageError(message) from error
    assert isinstance(args, Namespace)
    return args


def without_comment(line: str) -> str:
    """A line up to its comment, which begins as in a shell: outside of quotes, after a blank."""
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def option(*names: str, **settings: object) -> argument:
    """One argument of a magic, as argparse's `add_argument` takes it."""
    return argument(*names, **settings)  # type: ignore[no-untyped-call]


def magic(kind: Literal["line", "cell"], *arguments: argument) -> Callable[[Method], Method]:
    """Register a method as a magic with these arguments; its docstring becomes its help."""

    def mark(method: Method) -> Method:
        marked: Any = (line_magic if kind == "line" else cell_magic)(method)
        for one in reversed(arguments):
            marked = one(marked)
        with_parser: Method = magic_arguments()(marked)  # type: ignore[no-untyped-call]
        return with_parser

    return mark


def as_view(raw: str) -> str:
    """A view of the dashboard."""
    if (name := as_text(raw)) not in get_args(View):
        message = f"{raw} is none of {', '.join(get_args(View))}"
        raise ArgumentTypeError(message)
    return name


def as_text(raw: str) -> str:
    """An argument without the quotes that IPython leaves around it."""
    return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'" else raw


def as_count(raw: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", as_text(raw)) or int(as_text(raw)) < 1:
        message = f"{raw} is not a whole number of at least 1"
        raise ArgumentTypeError(message)
    return int(as_text(raw))


def as_seconds(raw: str) -> float:
    """A number of seconds above 0."""
    if not (number := _number(as_text(raw))) > 0:
        message = f"{raw} is not a number of seconds above 0"
        raise ArgumentTypeError(message)
    return number


def as_factor(raw: str) -> float:
    """A number of at least 1."""
    if not (number := _number(as_text(raw))) >= 1:
        message = f"{raw} is not a number of at least 1"
        raise ArgumentTypeError(message)
    return number


def as_devices(raw: str) -> list[int]:
    """Device numbers with commas between them."""
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", as_text(raw)):
        message = f"{raw} is not a list of device numbers such as 0,1,3"
        raise ArgumentTypeError(message)
    return [int(index) for index in as_text(raw).split(",")]


def as_hosts(raw: str) -> list[str]:
    """Names of hosts with commas between them."""
    return [host.strip() for host in as_text(raw).split(",") if host.strip()]


def as_name(raw: str) -> str:
    """A name that a variable can have."""
    if not as_text(raw).isidentifier() or keyword.iskeyword(as_text(raw)):
        message = f"{raw} is not a name that a variable can have"
        raise ArgumentTypeError(message)
    return as_text(raw)


def as_setting(raw: str) -> tuple[str, float]:
    """A setting of a run and its new value: `lr=3e-4`."""
    name, _, value = as_text(raw).partition("=")
    if name.strip() not in _SETTINGS:
        message = f"{raw} is not one of {', '.join(f'{one}=NUMBER' for one in _SETTINGS)}"
        raise ArgumentTypeError(message)
    if not (number := _number(value)) >= 0:
        message = f"{raw}: its value is not a finite number of at least 0"
        raise ArgumentTypeError(message)
    return name.strip(), number


def _number(text: str) -> float:
    """A finite number as Python writes it: `2`, `.5`, `1e9`; nan where it is none."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
