"""A browser and servers for tests of what a page shows; skipped where there is no browser."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from bare import BarePage
from lab import CHROMIUM, FLAGS, Notebook, Server, write_notebook

BASES = {"jupyterlab": "/u/x/", "notebook": "/"}
"""One of the servers is not at the root of its host, as behind a hub."""


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
def context(browser):
    """One person's browser: what it has loaded once it need not load for each test."""
    context = browser.new_context()
    yield context
    context.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    """`server(app)`: one server of each kind for all tests; each test has its own notebooks."""
    assert browser

    def start(app):
        if app not in started:
            folder = tmp_path_factory.mktemp(app)
            started[app] = stack.enter_context(Server(folder, app, base=BASES[app]))
        return started[app]

    started = {}
    with ExitStack() as stack:
        yield start


@pytest.fixture
def notebook(server, context, request):
    """Opens a notebook with these cells; it asks nobody outside, and ends without an error.

    With `of`, opens a notebook that is open already, in another tab or, with `browser`, for
    somebody else.
    """

    def open_notebook(
        *cells, app="jupyterlab", size=(1400, 2000), kernel="python3", of=None, browser=context
    ):
        home = server(app)
        number = len({page.name for page in opened})
        name = of.name if of else f"{request.node.name.partition('[')[0]}-{number}.ipynb"
        if not of:
            write_notebook(home.folder / name, *cells, kernel=kernel)
        opened.append(Notebook(home, browser, name, size))
        return opened[-1]

    opened = []
    yield open_notebook
    for page in opened:
        page.close()
    for home in {page.server for page in opened}:
        home.end_kernels()
    assert [page.outside for page in opened] == [[]] * len(opened)
    assert [page.errors for page in opened] == [[]] * len(opened)


@pytest.fixture
def bare(browser):
    """Opens pages with the widget alone; each ends without an error."""

    def open_page(**options):
        opened.append(BarePage(browser, **options))
        return opened[-1]

    opened = []
    yield open_page
    for page in opened:
        page.close()
    assert [page.errors for page in opened] == [[]] * len(opened)
