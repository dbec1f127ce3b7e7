"""The first tutorial, clicked through in a browser; ranks die by the dashboard and by a cell.

With `NBDIST_SHOTS=FOLDER` in the environment, pictures of the pages are put there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from lab import ROOT, Notebook

from nbdist.processes import processes_by_rundir

pytestmark = pytest.mark.timeout(300)

NAME = "01_first_run.ipynb"
LIMIT_MS = 60_000
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
MODEL = "window.jupyterapp.shell.currentWidget.content.widgets[i].model"
ANSWER = "document.querySelector('.nbdist-answer').textContent"
RUN_BUTTON = (
    "[data-command='notebook:run-cell-and-select-next'], .jp-ToolbarButton button[title^='Run']"
)


class Reader:
    """Somebody who goes through the tutorial, cell by cell."""

    def __init__(self, lab, shots, name):
        self.lab, self.page = lab, lab.page
        self.shots, self.name = shots, name
        notebook = nbformat.read(ROOT / "notebooks" / NAME, as_version=4)
        self.sources = [cell.source for cell in notebook.cells]
        self.is_code = [cell.cell_type == "code" for cell in notebook.cells]
        self.at = 0

    def select_next(self):
        """Click on the cell that is to be run next: a click in an output has selected its cell."""
        cell = self.page.locator(".jp-Notebook .jp-Cell").nth(self.at)
        cell.click(position={"x": 20, "y": 10})

    def look_at(self, selector):
        """Have it at the top of the page."""
        self.page.locator(selector).first.evaluate("(node) => node.scrollIntoView()")

    def run_to(self, part, *, by_button):
        """Run the cells up to the one that has these words, and see each end without an error."""
        last = next(
            i for i, source in enumerate(self.sources) if part in source and self.is_code[i]
        )
        while self.at <= last:
            self._run_one(by_button=by_button)

    def _run_one(self, *, by_button):
        i, is_code = self.at, self.is_code[self.at]
        if is_code:  # the file's outputs and numbers must not be taken for new ones
            self.page.evaluate(f"(i) => {{ {MODEL}.clearExecution(); }}", i)
        if by_button:
            self.page.locator(RUN_BUTTON).first.click()
        else:
            self.page.keyboard.press("Shift+Enter")
        if is_code:
            self.page.wait_for_function(
                f"(i) => {MODEL}.executionState === 'idle' && {MODEL}.executionCount !== null",
                arg=i,
                timeout=LIMIT_MS,
            )
            assert '"error"' not in self.lab.text(i), self.lab.text(i)
        self.at += 1

    def wait_for_cards(self, what, condition):
        """Wait until a card of the dashboard says something."""
        self.page.wait_for_function(
            "([what, condition]) => { const card = document.querySelector(`.nbdist-card-${what}`);"
            " return Boolean(card) && new RegExp(condition).test(card.textContent); }",
            arg=[what, condition],
            timeout=LIMIT_MS,
        )

    def wait_for_chart(self, panel):
        """Scroll to a panel until its chart is there: charts are made when they are seen."""
        self.page.wait_for_function(
            "(panel) => { const node = document.querySelector(panel); node?.scrollIntoView();"
            " return Boolean(node?.querySelector('.bk-Figure')); }",
            arg=f".nbdist-{panel}",
            timeout=LIMIT_MS,
            polling=250,
        )

    def wait_until(self, condition):
        """Wait until an expression of the page is true."""
        self.page.wait_for_function(f"() => {condition}", timeout=LIMIT_MS)

    def saved(self):
        """The notebook's file, as it is now."""
        self.lab.save()
        return Path(self.lab.server.folder / self.lab.name)

    def shoot(self, moment):
        """Keep a picture, where somebody wants to look at it."""
        if self.shots:
            self.page.wait_for_timeout(700)  # what moves has come to rest; nothing waits for it
            self.page.screenshot(path=f"{self.shots}/01_{self.name}_{moment}.png")


@pytest.fixture
def reader(server, browser):
    """`reader(app, theme)`: the tutorial, open in a page; asks nobody outside, ends in order."""

    def read(app, theme):
        home = server(app)
        name = f"{app}-{theme}-{NAME}"
        shutil.copy(ROOT / "notebooks" / NAME, home.folder / name)
        lab = Notebook(home, browser, name, size=(1300, 1500))
        opened.append(lab)
        lab.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            THEMES[theme],
        )
        shown = str(theme == "light").lower()
        lab.page.wait_for_selector(
            f"body[data-jp-theme-light={shown}]", state="attached", timeout=LIMIT_MS
        )
        return Reader(lab, os.environ.get("NBDIST_SHOTS"), f"{app}_{theme}")

    opened = []
    yield read
    for lab in opened:
        lab.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            THEMES["light"],
        )
        lab.close()
        lab.server.end_kernels()
    assert [lab.outside for lab in opened] == [[]] * len(opened)
    assert [lab.errors for lab in opened] == [[]] * len(opened)


@pytest.mark.parametrize(
    ("app", "theme"), [("jupyterlab", "light"), ("jupyterlab", "dark"), ("notebook", "light")]
)
def test_a_rank_is_killed_in_the_dashboard(reader, app, theme):
    """Kill in the widget, a kill by a cell: the page shows both recoveries; a picture stays."""
    me = reader(app, theme)
    page, by_button = me.page, app == "jupyterlab"
    me.select_next()
    me.run_to("run.dashboard()", by_button=by_button)
    dashboard = me.at - 1
    for panel in ("sync", "throughput", "loss", "membership"):
        me.wait_for_chart(panel)
    me.run_to("wait_for_steps(30)", by_button=by_button)
    me.look_at(".nbdist")
    me.wait_for_cards("ranks", "3of 3; generation 1$")
    rows = page.locator(".nbdist-ranks tbody tr")
    pids = [row.locator("td").nth(5).inner_text() for row in rows.all()]
    me.shoot("before")
    rows.nth(1).locator("button", has_text="Kill").click()
    me.wait_until(f"{ANSWER} === 'Kill rank 1: done'")
    me.wait_for_cards("ranks", "3of 3; generation 3$")
    now = [row.locator("td").nth(5).inner_text() for row in rows.all()]
    assert [one == other for one, other in zip(pids, now, strict=True)] == [True, False, True]
    me.shoot("after")
    me.look_at(".nbdist-membership")
    me.wait_until("document.querySelectorAll('.nbdist-incidents tbody tr').length === 2")
    cells = [row.locator("td") for row in page.locator(".nbdist-incidents tbody tr").all()]
    assert [cell.nth(1).inner_text().split()[-1] for cell in cells] == ["joined", "lost"]
    assert [cell.nth(8).inner_text() for cell in cells] == ["2 → 3", "1 → 2"]
    me.shoot("incidents")
    me.select_next()
    me.run_to("%dist_kill 1", by_button=by_button)
    me.look_at(".nbdist")
    me.wait_for_cards("ranks", "3of 3; generation 5$")
    me.run_to("%dist_shutdown", by_button=by_button)
    place = page.locator(".jp-Notebook .jp-Cell").nth(dashboard)
    place.locator("img").wait_for(timeout=LIMIT_MS)
    me.shoot("end")
    place.evaluate("(node) => node.scrollIntoView()")
    me.shoot("picture")
    path = me.saved()
    assert path.stat().st_size < 100_000
    assert "widget-view" not in path.read_text()
    assert not processes_by_rundir()
