"""Errors: what they say, what IPython shows of them, how they cross the border."""

from __future__ import annotations

import pytest

from nbdist import errors
from nbdist.errors import (
    CellFailed,
    EngineDied,
    GroupGone,
    NbdistError,
    RankError,
    TargetError,
    guess_cause,
    named_error,
)


def test_there_is_one_tree():
    """Every public error is an `NbdistError`, with a docstring that says what happened; an
    interrupt is none, since `except Exception` must not swallow it."""
    others = {"named_error", "CellInterrupted"}
    classes = [getattr(errors, name) for name in errors.__all__ if name not in others]
    assert len(classes) == 17
    assert issubclass(errors.CellInterrupted, KeyboardInterrupt)
    for cls in classes:
        assert issubclass(cls, NbdistError)
        assert cls.__doc__


def test_errors_are_what_python_calls_them_too():
    """A wrong selection is a `ValueError`, a group that is gone a `RuntimeError`."""
    assert issubclass(TargetError, ValueError)
    assert issubclass(GroupGone, RuntimeError)
    assert issubclass(EngineDied, CellFailed)


def test_ipython_shows_the_message_alone():
    """Our own frames say nothing to who made the mistake."""
    assert TargetError("no rank 7")._render_traceback_() == ["TargetError: no rank 7"]


def test_a_rank_error_reads_like_the_exception_on_the_engine():
    """Class and text, or the class alone where there is no text; the traceback is kept."""
    error = RankError(2, "ValueError", "bad", ["line 1", "line 2"])
    assert str(error) == "ValueError: bad"
    assert (error.rank, error.ename, error.evalue) == (2, "ValueError", "bad")
    assert error.traceback == ["line 1", "line 2"]
    assert str(RankError(0, "KeyboardInterrupt", "")) == "KeyboardInterrupt"


def test_a_failed_cell_shows_equal_tracebacks_once_with_the_cause_first():
    """One block for each different traceback, in the order of the errors, then the notes."""
    error = CellFailed(
        "ValueError: bad (ranks 1, 0, 2)",
        {
            1: RankError(1, "ValueError", "bad", ["tb one"]),
            0: RankError(0, "ValueError", "bad", ["tb zero"]),
            2: RankError(2, "ValueError", "bad", ["tb one"]),
        },
        ["rank 3 was released from all_reduce, cell line 2"],
    )
    assert error._render_traceback_() == [
        "CellFailed: ValueError: bad (ranks 1, 0, 2)",
        "",
        "On ranks 1, 2:",
        "tb one",
        "",
        "On rank 0:",
        "tb zero",
        "",
        "rank 3 was released from all_reduce, cell line 2",
    ]


def test_what_all_ranks_say_in_one_line_is_said_once():
    """The first line has it, and the ranks."""
    text = "name 'nope' is not defined"
    raised = {r: RankError(r, "NameError", text, [f"NameError: {text}"]) for r in (0, 1)}
    first = errors.headline(raised)
    assert first == f"NameError: {text} (ranks 0, 1)"
    assert CellFailed(first, raised)._render_traceback_() == [f"CellFailed: {first}"]
    raised[1] = RankError(1, "TypeError", "other", ["TypeError: other"])
    assert CellFailed(errors.headline(raised), raised)._render_traceback_()[2:] == [
        "On rank 0:",
        f"NameError: {text}",
        "",
        "On rank 1:",
        "TypeError: other",
    ]


def test_a_failed_cell_without_particulars_is_its_message():
    """No errors and no notes: one line."""
    error = CellFailed("the group was broken")
    assert (error.errors, error.notes) == ({}, [])
    assert error._render_traceback_() == ["CellFailed: the group was broken"]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"signal": "SIGKILL"}, "rank 1 (slot 3, pid 42) ended by SIGKILL"),
        ({"exit_code": 0}, "rank 1 (slot 3, pid 42) exited with code 0"),
        ({}, "rank 1 (slot 3, pid 42) ended"),
        (
            {"signal": "SIGKILL", "guess": "out of memory"},
            "rank 1 (slot 3, pid 42) ended by SIGKILL; out of memory",
        ),
        (
            {"signal": "SIGKILL", "at": "14:03:07", "guess": "why"},
            "rank 1 (slot 3, pid 42) ended by SIGKILL at 14:03:07; why",
        ),
        (
            {"exit_code": 3, "last_lines": ["a", "b"]},
            "rank 1 (slot 3, pid 42) exited with code 3\nLast lines of its output:\n  a\n  b",
        ),
    ],
)
def test_a_dead_engine_is_described(end, text):
    """Where, how, the likely cause and the end of its output, as far as they are known."""
    assert str(EngineDied(rank=1, slot=3, pid=42, **end)) == text


def test_a_dead_engine_is_a_failed_cell_that_holds_itself():
    """`errors` has its rank; what is shown says everything once."""
    died = EngineDied(rank=1, slot=3, pid=42, signal="SIGKILL", guess="g", last_lines=("a",))
    assert died.errors == {1: died}
    assert (died.slot, died.rank, died.pid, died.signal, died.exit_code) == (
        3,
        1,
        42,
        "SIGKILL",
        None,
    )
    assert (died.guess, died.last_lines) == ("g", ["a"])
    assert died._render_traceback_() == [f"EngineDied: {died}"]


def test_the_first_death_shows_the_others_too():
    """Two engines died: the first is raised, the second described below it."""
    first, second = (EngineDied(rank=r, slot=r, pid=r, signal="SIGKILL") for r in (0, 1))
    first.errors[1] = second
    assert first._render_traceback_() == [f"EngineDied: {first}", "", "On rank 1:", str(second)]


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGBUS"])
def test_signals_have_a_likely_cause(signal):
    """A sentence for each signal that says more than its name."""
    assert len(guess_cause(signal)) > 10


@pytest.mark.parametrize("signal", ["SIGUSR1", None])
def test_where_nothing_can_be_said_nothing_is(signal):
    """No guess without a ground."""
    assert guess_cause(signal) == ""


@pytest.mark.parametrize(
    "kind",
    ["NotStarted", "StartFailed", "TargetError", "WrongState", "RecoveryFailed", "GroupGone"],
)
def test_an_answer_raises_the_error_that_it_names(kind):
    """The class in the kernel is the one that the supervisor meant."""
    error = named_error(kind, "because")
    assert type(error) is getattr(errors, kind)
    assert str(error) == "because"


def test_an_unknown_kind_is_the_root():
    """What an engine's Python raised still raises here, with its class and its message."""
    for kind, text in (("NameError", "NameError: because"), ("NbdistError", "because")):
        error = named_error(kind, "because")
        assert type(error) is NbdistError
        assert str(error) == text
