"""Run notebooks and write their outputs anew, in a form that stays the same from run to run.

A notebook of which a cell fails is left as it was. The engines use the CPU, so that what is written
does not depend on the machine; times, versions and the state of widgets are not kept.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

MAX_BYTES = 100_000
"""A larger notebook has something in it that should not be stored."""
CELL_LIMIT_S = 120
_LANGUAGE = {"name": "python"}


def run(path: Path) -> None:
    """Run one notebook and write it.

    Raises:
        CellExecutionError: a cell failed.
        ValueError: it would be too large.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": _LANGUAGE,
    }
    text = nbformat.writes(notebook) + "\n"  # type: ignore[no-untyped-call]
    if (size := len(text.encode())) >= MAX_BYTES:
        raise ValueError(f"{path} would have {size:,} bytes, and may have {MAX_BYTES:,}")
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {size:,} bytes")


def main(names: list[str]) -> None:
    """Run each of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in names:
        run(Path(name))


if __name__ == "__main__":
    main(sys.argv[1:])
