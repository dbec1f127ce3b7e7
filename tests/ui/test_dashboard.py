"""The dashboard in JupyterLab, in a real browser, fed with a made-up run."""

from __future__ import annotations

import json

import pytest
from synthetic import END, LENGTH_S, SETUP, SyntheticRun

pytestmark = pytest.mark.timeout(480)

LIMIT_MS = 60_000
BUSY = """
from pathlib import Path
began = time.monotonic()
while time.monotonic() - began < %d:
    pass
while not Path("%s").exists() and time.monotonic() - began < 120:
    pass
"""
"""Computes for so long, and until the test has seen what it wants to see."""
VIEW = "[...window[Symbol.for('nbdist')].views].at(-1)"
LOSSES = SyntheticRun(length_s=LENGTH_S).tables["rows"]["loss"]
DRAWN = ".nbdist-loss .bk-Figure"


def drawn(notebook):
    """Wait until charts are there."""
    notebook.page.locator(".nbdist").first.scroll_into_view_if_needed(timeout=LIMIT_MS)
    notebook.page.wait_for_selector(DRAWN, timeout=LIMIT_MS)


def losses(notebook):
    """The losses that the newest view has."""
    return notebook.page.evaluate(f"() => [...{VIEW}.shown.store.rows.get('loss')]")


def outputs(notebook, index):
    """The mime types of a cell's outputs."""
    return [set(out.get("data", {})) for out in json.loads(notebook.text(index))]


def saved_outputs(notebook, index):
    """Likewise, in the file."""
    notebook.save()
    content = json.loads((notebook.server.folder / notebook.name).read_text())
    return [set(out["data"]) for out in content["cells"][index]["outputs"]]


@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_it_lives_while_the_cell_that_shows_it_runs(notebook, app):
    """V1, V2, V8, V30: charts, frames and a button work although the kernel only computes.

    No cell but the one that displays it, nothing asked of another host, under another base address
    (JupyterLab) or none; at least a frame a second.
    """
    length_s = 20 if app == "jupyterlab" else 10
    busy_cell = f"display(dashboard){BUSY % (length_s, f'{app}.seen')}"
    lab = notebook(SETUP, busy_cell, "print(orders)", app=app)
    lab.run(0)
    lab.run(1, wait=False)
    drawn(lab)
    lab.page.evaluate(f"() => {{ {VIEW}.began = [performance.now(), {VIEW}.counts.frames]; }}")
    before = lab.page.evaluate(f"() => {VIEW}.counts.frames")
    lab.page.locator(".nbdist-actions button", has_text="Kill").first.click()
    lab.page.wait_for_function(
        "() => document.querySelector('.nbdist-answer').textContent === 'Kill rank 0: done'",
        timeout=LIMIT_MS,
    )
    lab.page.wait_for_function(f"() => {VIEW}.counts.frames >= {before + 5}", timeout=LIMIT_MS)
    busy = "() => window.jupyterapp.shell.currentWidget.content.widgets[1].model.executionState"
    assert lab.page.evaluate(busy) == "running"
    assert lab.page.evaluate("() => typeof window.Bokeh") == "undefined"
    seen = losses(lab)
    assert seen == LOSSES[: len(seen)]
    (lab.server.folder / f"{app}.seen").touch()
    lab.page.wait_for_function(f"() => !({busy[6:]} === 'running')", timeout=LIMIT_MS)
    per_s = lab.page.evaluate(
        f"() => {{ const v = {VIEW}; const [at, n] = v.began; "
        "return (v.counts.frames - n) / (performance.now() - at) * 1000; }"
    )
    assert per_s >= 1
    lab.run(2)
    assert "(0, 4000)" in lab.text(2)


def test_the_users_own_bokeh_stays(notebook):
    """A page where the user draws with bokeh keeps that BokehJS, and both draw."""
    theirs = """
from bokeh.io import output_notebook, show
from bokeh.plotting import figure
from bokeh.resources import INLINE
output_notebook(INLINE, hide_banner=True)
plot = figure(height=100)
plot.line([1, 2], [1, 2])
show(plot)
"""
    lab = notebook(SETUP, theirs, "dashboard", "show(plot)")
    lab.run(0)
    lab.run(1)
    lab.page.wait_for_selector(".bk-Figure", timeout=LIMIT_MS)
    lab.page.evaluate("() => { window.theirs = window.Bokeh; }")
    lab.run(2)
    drawn(lab)
    lab.run(3)
    cell = lab.page.locator(".jp-CodeCell").nth(3)
    cell.locator(".bk-Figure").wait_for(timeout=LIMIT_MS)
    assert lab.page.evaluate("() => window.Bokeh === window.theirs")


def test_reloaded_it_has_the_whole_history_and_freezes(notebook):
    """V37: after a reload, too, a picture stands in page and file at the end, readable again."""
    lab = notebook(SETUP, "dashboard", f"{END}; feed.ended('the run is over')")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.save()
    lab.open()
    drawn(lab)
    seen = losses(lab)
    assert len(seen) > 90
    assert seen == LOSSES[: len(seen)]
    lab.run(2)
    picture = {"text/plain", "image/png"}
    cell = lab.page.locator(".jp-CodeCell").nth(1)
    cell.locator("img").wait_for(timeout=LIMIT_MS)
    assert outputs(lab, 1) == saved_outputs(lab, 1) == [picture]
    lab.server.end_kernels()
    lab.open()
    cell.locator("img").wait_for(timeout=LIMIT_MS)


def test_when_the_kernel_goes_the_page_keeps_a_picture(notebook):
    """A kernel that is shut down leaves the last values as a picture."""
    lab = notebook(SETUP, "dashboard")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.server.end_kernels()
    lab.page.locator(".jp-CodeCell").nth(1).locator("img").wait_for(timeout=LIMIT_MS)
    assert saved_outputs(lab, 1) == [{"text/plain", "image/png"}]


def test_every_chart_has_a_twin_and_a_picture(notebook):
    """Each panel shows its numbers as a table, says what it shows, and saves a picture."""
    lab = notebook(SETUP, "dashboard")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    panels = lab.page.locator(".nbdist-grid > .nbdist-panel:not([hidden])")
    assert panels.count() == 6
    for number in range(6):
        panel = panels.nth(number)
        panel.scroll_into_view_if_needed()
        panel.locator(".bk-Figure").first.wait_for(timeout=LIMIT_MS)
        assert panel.locator("h3").inner_text().endswith("?")
        assert len(panel.locator("[role=img]").first.get_attribute("aria-label")) > 60
        with lab.page.expect_download() as saved:
            panel.locator("button", has_text="PNG").click()
        assert saved.value.suggested_filename.endswith(".png")
        panel.locator("button", has_text="Table").click()
        assert panel.locator(".nbdist-scroller tbody tr").first.is_visible()
        panel.locator("button", has_text="Chart").click()


def luminance(colour):
    """As the guidelines for accessible pages define it."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_it_follows_the_theme(notebook):
    """V26: text has enough contrast in each theme, which is changed without a reload."""
    lab = notebook(SETUP, "dashboard")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            theme,
        )
        lab.page.wait_for_function(
            "(theme) => document.body.dataset.jpThemeName === theme", arg=theme, timeout=LIMIT_MS
        )
        ground, *inks = lab.page.evaluate(
            "() => { const style = (name) => getComputedStyle(document.querySelector(name)); "
            "return [style('.nbdist').backgroundColor, style('.nbdist').color, "
            "style('.nbdist-said').color, style('.nbdist-head .nbdist-button').color]; }"
        )
        for ink in inks:
            high, low = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, ink, ground)
        assert (luminance(ground) < 0.2) == (theme == "JupyterLab Dark")
