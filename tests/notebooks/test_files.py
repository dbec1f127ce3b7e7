"""The tutorials as they are in the repository: complete, small, and strict about what they show."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 100_000
LOOSE = "nbval-ignore-output"
WIDGET = "application/vnd.jupyter.widget-view+json"

pytestmark = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(path):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_small_and_holds_nothing_of_one_machine(path):
    """No state of widgets, no times, no version of an interpreter; under 100 kB."""
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MAX_BYTES
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_it_was_run_from_the_first_cell_to_the_last(path):
    """Its cells were run once and in order; none failed, and none left a widget."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert WIDGET not in kinds
    for cell in cells:
        if "dashboard()" in cell.source:
            assert any("image/png" in output.data for output in cell.outputs)


def test_what_is_not_compared_is_checked(path):
    """Every output is compared, but those of cells that say so, and these assert what must hold."""
    for cell in code_cells(path):
        assert set(cell.metadata.get("tags", ())) <= {LOOSE}
        assert "NBVAL" not in cell.source
        if LOOSE in cell.metadata.get("tags", ()):
            assert "assert " in cell.source
