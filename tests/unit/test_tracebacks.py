"""What a notebook shows of errors that are meant for its user."""

from __future__ import annotations

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nbdist
from nbdist.frontend import tracebacks

LIBRARY = re.compile(r"nbdist/|IPython/")
SETUP = """
from nbdist.protocol.story import ROWS, RunStory
from nbdist.session.status import amount
from nbdist.session.settings import cluster_config
from nbdist.views.chart import Chart
from nbdist.views.report import write_report
import numpy as np

story = RunStory(title="t", rows=np.zeros(0, ROWS))

def mine(ask):
    return ask()

class Unsendable:
    def __reduce__(self):
        raise ArithmeticError("of the user's")
"""


@pytest.fixture(scope="module")
def bare_shell(tmp_path_factory):
    """A shell that has what the cells use."""
    config = Config({"HistoryManager": {"enabled": False}})
    folder = str(tmp_path_factory.mktemp("ipython"))
    shell = InteractiveShell.instance(config=config, ipython_dir=folder)
    shell.run_cell(SETUP).raise_error()
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(bare_shell):
    """The same with the magics loaded."""
    nbdist.load_ipython_extension(bare_shell)
    yield bare_shell
    nbdist.unload_ipython_extension(bare_shell)


def shown(shell, capsys, cell):
    """What the notebook shows of a cell that fails, without colours, and the error."""
    capsys.readouterr()
    result = shell.run_cell(cell)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out), result.error_in_exec


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ('Chart(story, "nosuch")', "ValueError: no chart 'nosuch'"),
        ('amount("lr", float("nan"))', "ValueError: lr=nan: a finite number, at least 0"),
        ('amount("lr", None)', "TypeError: lr=None: a number"),
        ("write_report(5, story)", "TypeError: path=5: the name of a file"),
        ('cluster_config("/no/such")', "ValueError: profile='/no/such' cannot be read"),
    ],
)
def test_a_wrong_argument_is_shown_with_the_users_lines_alone(shell, capsys, cell, words):
    """Those of the cell, and of a function of the user's that it goes through."""
    text, error = shown(shell, capsys, f"mine(lambda: {cell})")
    assert words in text
    assert "return ask()" in text
    assert f"mine(lambda: {cell})" in text
    assert not LIBRARY.search(text), text
    assert type(error).__name__ == words.partition(":")[0]


def test_of_a_cause_our_lines_are_left_out_too(shell, capsys):
    """What the user's own object raised is shown, and that is enough."""
    cell = "from nbdist.protocol.values import pack_named\npack_named({'x': Unsendable()})"
    text, _ = shown(shell, capsys, cell)
    assert "TypeError: x (a Unsendable) cannot be sent: of the user's. Nothing was sent" in text
    assert "raise ArithmeticError" in text
    assert "protocol/values.py" not in text


def test_a_mistake_of_ours_is_shown_as_it_is(shell, capsys):
    """It is for whoever mends it."""
    cell = "from nbdist.frontend.targets import format_ranks\nformat_ranks(5)"
    text, _ = shown(shell, capsys, cell)
    assert "TypeError" in text
    assert "frontend/targets.py" in text


@pytest.mark.parametrize("cell", ["int('x')", "def f():\n    raise ValueError('mine')\nf()"])
def test_errors_of_the_users_own_are_shown_as_ipython_does(shell, capsys, cell):
    """Line for line."""
    ours, _ = shown(shell, capsys, cell)
    tracebacks.uninstall(shell)
    assert shell.custom_exceptions == ()
    theirs, _ = shown(shell, capsys, cell)
    number = re.compile(r"Cell In\[\d+\]|<module>|<ipython-input[^>]*>|line \d+")
    assert number.sub("", ours) == number.sub("", theirs)


def test_a_handler_of_the_users_own_stays(shell):
    """Neither replaced nor taken away."""
    nbdist.unload_ipython_extension(shell)
    theirs = (KeyError,)
    shell.set_custom_exc(theirs, lambda *_, **__: None)
    nbdist.load_ipython_extension(shell)
    assert shell.custom_exceptions is theirs
    nbdist.unload_ipython_extension(shell)
    assert shell.custom_exceptions is theirs
    shell.set_custom_exc((), None)
