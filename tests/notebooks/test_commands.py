"""The first tutorial, run by each of the commands that run notebooks."""

from __future__ import annotations

import base64
import re
from io import BytesIO

import nbclient
import nbformat
import pytest
from PIL import Image

from nbdist.views.widget import TEXT

NAME = "01_first_run.ipynb"
MAX_BYTES = 100_000
PNG = re.compile(r'src="data:image/png;base64,([^"]+)"')
SVG = re.compile(r'src="data:image/svg\+xml;base64,([^"]+)"')

pytestmark = pytest.mark.timeout(200)


def check_picture(data):
    """It is one that a reader can see something in."""
    image = Image.open(BytesIO(base64.b64decode(data)))
    assert image.size[0] > 1000
    assert len(image.convert("RGB").getcolors(1 << 16)) > 8


def check_notebook(path):
    """Where the dashboard stood there is a picture, no widget is left, and the file is small."""
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    assert "widget-view" not in path.read_text()
    assert path.stat().st_size < MAX_BYTES
    (cell,) = [cell for cell in notebook.cells if "run.dashboard()" in cell.source]
    (output,) = cell.outputs
    assert output.data["text/plain"] == TEXT
    check_picture(output.data["image/png"])


def test_jupyter_execute(command, copy):
    """`jupyter execute` leaves pictures, and no process."""
    path = copy(NAME)
    command("jupyter", "execute", "--inplace", path)
    check_notebook(path)


def test_nbconvert_to_html(command, copy):
    """`jupyter nbconvert --execute --to html` makes a page with pictures in it, and no widget."""
    path = copy(NAME)
    command("jupyter", "nbconvert", "--execute", "--to", "html", path)
    page = path.with_suffix(".html").read_text()
    assert "widget-view" not in page
    assert "widget-state" not in page
    (picture,) = PNG.findall(page)
    check_picture(picture)
    (drawing,) = SVG.findall(page)
    assert b"Loss over" in base64.b64decode(drawing)


def test_papermill(command, copy, tmp_path):
    """papermill leaves pictures, and no process."""
    pytest.importorskip("papermill", reason="papermill is not installed")
    made = tmp_path / "made.ipynb"
    command("papermill", "--no-progress-bar", copy(NAME), made)
    check_notebook(made)


def test_without_engines_every_cell_fails(copy, monkeypatch, tmp_path):
    """Commands see each failure: where no cluster was started, no cell passes as if it had worked.

    Those that only define or import are not looked at.
    """
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(copy(NAME), as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (start,) = [cell for cell in notebook.cells if "%dist_init" in cell.source]
    start.source = "%load_ext nbdist"
    nbclient.NotebookClient(notebook, timeout=60, allow_errors=True).execute()
    passed = [
        cell.source
        for cell in notebook.cells[1:]
        if not any(output.output_type == "error" for output in cell.outputs)
    ]
    assert passed == []
