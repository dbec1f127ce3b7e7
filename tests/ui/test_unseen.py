"""Notebooks with a dashboard that a command runs, without a page: text and picture, no widget."""

from __future__ import annotations

import os

import nbclient
import nbformat
from lab import KERNEL_PATHS
from synthetic import END, SETUP

from nbdist.views.widget import TEXT


def test_a_notebook_that_a_command_runs_keeps_pictures(monkeypatch):
    """No widget is left hanging: where the dashboard stood, there are text and picture."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(KERNEL_PATHS))
    notebook = nbformat.v4.new_notebook()
    cells = (SETUP, "dashboard", f"{END}; dashboard.freeze()", "print(feed.asked)")
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (output,) = notebook.cells[1].outputs
    assert set(output["data"]) == {"text/plain", "image/png"}
    assert output["data"]["text/plain"] == TEXT
    assert notebook.cells[2].outputs == []
    assert notebook.cells[3].outputs[0]["text"] == "[]\n"
    assert "widgets" not in notebook.metadata
    assert len(nbformat.writes(notebook)) < 100_000
