"""A browser and servers for tests of what a page shows; skipped where there is no browser."""

from __future__ import annotations

from contextlib import ExitStack

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
    """`server(app)`: one server of each kind for all tests; each test has its own notebooks."""
    assert browser

    def start(app):
        if app not in started:
            started[app] = stack.enter_context(Server(tmp_path_factory.mktemp(app), app))
        return started[app]

    started = {}
    with ExitStack() as stack:
        yield start


@pytest.fixture
def notebook(server, browser, request):
    """Opens a notebook with these cells; it asks nobody outside, and ends without an error."""

    def open_notebook(*cells, app="jupyterlab", size=(1400, 2000)):
        home = server(app)
        name = f"{request.node.name.partition('[')[0]}.ipynb"
        write_notebook(home.folder / name, *cells)
        opened.append(Notebook(home, browser, name, size))
        return opened[-1]

    opened = []
    yield open_notebook
    for page in opened:
        page.close()
        page.server.end_kernels()
    assert [page.outside for page in opened] == [[]] * len(opened)
    assert [page.errors for page in opened] == [[]] * len(opened)
