"""A browser and a server for tests of what a page shows; skipped where there is none."""

from __future__ import annotations

import pytest
from lab import CHROMIUM, FLAGS, Notebook, Server, write_notebook


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; NBDIST_CHROMIUM names one that is not on the path."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium, or set NBDIST_CHROMIUM")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    """One JupyterLab for all tests; each has a notebook of its own."""
    assert browser
    with Server(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture
def notebook(server, browser, request):
    """Opens a notebook with these cells; asks nobody outside, and ends without an error."""

    def open_notebook(*cells, size=(1400, 2000)):
        name = f"{request.node.name.partition('[')[0]}.ipynb"
        write_notebook(server.folder / name, *cells)
        opened.append(Notebook(server, browser, name, size))
        return opened[-1]

    opened = []
    yield open_notebook
    for page in opened:
        page.close()
    for session in server.ask("api/sessions"):
        server.ask(f"api/sessions/{session['id']}", "DELETE")
    assert [page.outside for page in opened] == [[]] * len(opened)
    assert [page.errors for page in opened] == [[]] * len(opened)
