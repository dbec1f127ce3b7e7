"""The widget's life in JupyterLab: loaded again, shown twice, out of sight, its kernel gone."""

from __future__ import annotations

import json
import time
from statistics import median

import pytest
from lab import PLAIN_KERNEL
from synthetic import END, LENGTH_S, SETUP, SyntheticRun

pytestmark = pytest.mark.timeout(480)

LIMIT_MS = 60_000
RELOAD_LIMIT_MS = 2000
NUM_RELOADS = 10
APPLICATION_MS = 1300
"""JupyterLab's own, on a quiet machine, until the notebook is on screen."""
BUSY = """
from pathlib import Path
began = time.monotonic()
while not Path("%s").exists() and time.monotonic() - began < 100:
    pass
"""
"""Computes until the test has seen what it wants to see: no machine is too slow for that."""
VIEWS = "[...(window[Symbol.for('nbdist')]?.views ?? [])]"
LOSSES = SyntheticRun(length_s=LENGTH_S).tables["rows"]["loss"]
PICTURE = {"text/plain", "image/png"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

WATCH = """
(() => {
  const seen = (window.seen = {});
  const look = () => {
    const now = performance.now();
    const cell = document.querySelector(".jp-Notebook .jp-Cell");
    if (cell?.getBoundingClientRect().height) seen.notebook ??= now;
    const [view] = window[Symbol.for("nbdist")]?.views ?? [];
    const loss = view?.shown?.panels?.find((panel) => panel.name === "loss");
    if (loss?.charts[0].sources.loss?.data.x?.length) seen.history ??= now;
    if (!seen.history || !seen.notebook) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""


def drawn(lab, count=1):
    """Wait until so many views are there, all with charts."""
    lab.page.wait_for_function(
        f"(n) => {{ const views = {VIEWS}; return views.length === n && "
        "views.every((v) => v.shown?.panels.some((p) => p.isReady)); }",
        arg=count,
        timeout=LIMIT_MS,
    )


def look_at(lab, index):
    """Scroll to the second view, which moves while charts above it appear, until both are drawn."""
    lab.page.wait_for_function(f"() => {VIEWS}.length === 2", timeout=LIMIT_MS)
    deadline = time.monotonic() + LIMIT_MS / 1000
    for_both = f"() => {VIEWS}.every((v) => v.shown?.panels.some((p) => p.isReady))"
    while not lab.page.evaluate(for_both):
        assert time.monotonic() < deadline
        lab.scroll_to(1)
        lab.page.wait_for_timeout(300)
        lab.scroll_to(index)
        lab.page.wait_for_timeout(300)


def has_true_rows(lab, at_least=0):
    """Every view of a page has the same losses as the run, from its first one."""
    for seen in lab.page.evaluate(f"() => {VIEWS}.map((v) => [...v.shown.store.rows.get('loss')])"):
        assert len(seen) >= at_least
        assert seen == LOSSES[: len(seen)]


def more_frames(lab, count=4):
    """Wait until every view has so many more."""
    before = lab.page.evaluate(f"() => {VIEWS}.map((v) => v.counts.frames)")
    lab.page.wait_for_function(
        f"([before, n]) => {VIEWS}.every((v, i) => v.counts.frames >= before[i] + n)",
        arg=[before, count],
        timeout=LIMIT_MS,
    )


def count_drawings(lab):
    """From now on in `window.drawings`."""
    lab.page.evaluate(
        f"""() => {{
          window.drawings = 0;
          for (const {{ shown }} of {VIEWS})
            for (const panel of shown.panels) {{
              const update = panel.update.bind(panel);
              panel.update = (store) => (window.drawings++, update(store));
            }}
        }}"""
    )


def out_of_sight(lab):
    """Frames come, and nothing is drawn."""
    lab.page.wait_for_function(f"() => {VIEWS}.every((v) => !v.shown.seen.size)", timeout=LIMIT_MS)
    before = lab.page.evaluate("() => drawings")
    more_frames(lab)
    assert lab.page.evaluate("() => drawings") == before


def in_sight(lab):
    """What is seen is drawn again, at its full size."""
    before = lab.page.evaluate("() => drawings")
    lab.page.wait_for_function("(n) => drawings > n", arg=before, timeout=LIMIT_MS)
    fits(lab)
    has_true_rows(lab)


def fits(lab):
    """A chart is as wide as its place."""
    lab.page.wait_for_function(
        """() => [...document.querySelectorAll(".nbdist-chart")].some((place) => {
          const box = place.getBoundingClientRect();
          const chart = place.querySelector(".bk-Figure")?.getBoundingClientRect();
          return box.width > 100 && chart?.height > 100 && Math.abs(box.width - chart.width) < 4;
        })""",
        timeout=LIMIT_MS,
    )


def test_loaded_again_it_has_the_whole_history_soon(notebook):
    """V3: ten times the page is loaded again in mid-run: all rows are there; the aim is 2 s."""
    lab = notebook(SETUP, "dashboard")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.save()
    lab.page.add_init_script(WATCH)
    times = []
    for _ in range(NUM_RELOADS):
        known = lab.page.evaluate(f"() => {VIEWS}[0].shown.store.rows.length")
        lab.page.reload()
        lab.page.wait_for_function("() => window.seen?.history && seen.notebook", timeout=LIMIT_MS)
        times.append(lab.page.evaluate("() => [seen.notebook, seen.history]"))
        has_true_rows(lab, at_least=known)
    application, history = map(median, zip(*times, strict=True))
    # How slow the machine is just now is told by what the application takes for itself.
    assert history < 4 * RELOAD_LIMIT_MS * max(1.0, application / APPLICATION_MS), times


def test_views_of_one_dashboard_all_have_the_same_history(notebook, browser):
    """V5, V11, V14, V32, V36: another output, a view beside, another client, hidden, scrolled away.

    Each has all rows at all times; what is out of sight draws nothing; no text strays into a cell.
    """
    hook = "ip = get_ipython(); ip.events.register('post_execute', lambda: print('hook'))"
    filler = [f"# {i}\n" * 20 for i in range(12)]
    lab = notebook(SETUP + hook, "dashboard", "feed.start += 100", "dashboard", *filler)
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.run(2)
    lab.page.wait_for_function(f"() => {VIEWS}[0].shown.store.rows.length > 500", timeout=LIMIT_MS)
    lab.run(3)
    look_at(lab, 3)
    has_true_rows(lab, at_least=500)
    lab.command("notebook:create-output-view")
    drawn(lab, 3)
    more_frames(lab)
    has_true_rows(lab, at_least=500)
    somebody_else_looks(lab, notebook, browser)
    lab.page.evaluate("() => [...window.jupyterapp.shell.widgets('main')].at(-1).close()")
    lab.page.wait_for_function(f"() => {VIEWS}.length === 2", timeout=LIMIT_MS)
    count_drawings(lab)
    it_scrolls_away(lab)
    it_is_hidden_and_resized(lab)
    lab.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.reconnect()"
    )
    more_frames(lab)
    has_true_rows(lab, at_least=500)
    texts = [[out["text"] for out in json.loads(lab.text(i)) if "text" in out] for i in range(1, 4)]
    assert texts == [["hook\n"]] * 3


def somebody_else_looks(lab, notebook, browser):
    """Another client of the same notebook has the same, and takes nothing from the first."""
    lab.save()
    person = browser.new_context()
    try:
        other = notebook(of=lab, browser=person)
        look_at(other, 3)
        has_true_rows(other, at_least=500)
        more_frames(lab)
        more_frames(other)
    finally:
        other.close()
        person.close()
    more_frames(lab)


def it_scrolls_away(lab):
    """And back, in both ways in which the application hides what is far away."""
    for mode in ("contentVisibility", "full"):
        lab.page.evaluate(
            "(windowingMode) => { const { content } = window.jupyterapp.shell.currentWidget; "
            "content.notebookConfig = { ...content.notebookConfig, windowingMode }; }",
            mode,
        )
        lab.scroll_to(15)
        out_of_sight(lab)
        lab.scroll_to(1)
        in_sight(lab)


def it_is_hidden_and_resized(lab):
    """Behind another tab, and in a window of another size."""
    lab.command("launcher:create")
    out_of_sight(lab)
    lab.page.evaluate(
        "() => { const { shell } = window.jupyterapp; "
        "shell.activateById([...shell.widgets('main')][0].id); }"
    )
    in_sight(lab)
    for width in (900, 1400):
        lab.page.set_viewport_size({"width": width, "height": 1200})
        more_frames(lab)
        in_sight(lab)


def test_kernels_come_and_go(notebook):
    """V8, V34: a restarted kernel leaves banner and picture; another kernel's dashboard is live.

    That one has no subshells: while its cell runs, an order is said to be queued, and acts then.
    """
    seen = "queued.seen"
    lab = notebook(SETUP, "dashboard", "display(dashboard)" + (BUSY % seen), "print(orders)")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    cell = lab.page.locator(".jp-CodeCell").nth(1)
    cell.locator("img").wait_for(timeout=LIMIT_MS)
    assert [set(out["data"]) for out in json.loads(lab.text(1))] == [PICTURE]
    lab.run(0)
    lab.run(1)
    drawn(lab)
    has_true_rows(lab, at_least=90)
    lab.page.evaluate(
        "(name) => window.jupyterapp.shell.currentWidget.sessionContext.changeKernel({ name })",
        PLAIN_KERNEL,
    )
    cell.locator("img").wait_for(timeout=LIMIT_MS)
    lab.run(0)
    lab.run(2, wait=False)
    lab.page.locator(".nbdist-loss").scroll_into_view_if_needed()  # below the picture
    drawn(lab)
    has_true_rows(lab, at_least=90)
    lab.page.locator(".nbdist-actions button", has_text="Kill").first.click()
    said = "() => document.querySelector('.nbdist-answer').textContent"
    lab.page.wait_for_function(f"{said}.includes('queued')", timeout=LIMIT_MS)
    more_frames(lab)
    (lab.server.folder / seen).touch()
    lab.page.wait_for_function(f"{said} === 'Kill rank 0: done'", timeout=LIMIT_MS)
    lab.run(3)
    assert "(0, 4000)" in lab.text(3)
    # The application's own words about what it had asked the kernels that are gone.
    lab.errors[:] = [error for error in lab.errors if "Canceled future" not in error]


def test_a_kernel_that_somebody_else_restarts_leaves_a_picture(notebook):
    """This page is told nothing: it knows the new process by what that says to anybody."""
    lab = notebook(SETUP, "dashboard")
    lab.run(0)
    lab.run(1)
    drawn(lab)
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    kernel_id = lab.page.evaluate(f"() => {kernel}.id")
    lab.server.ask(f"api/kernels/{kernel_id}/restart", "POST")
    lab.page.evaluate(f"() => {{ {kernel}.requestKernelInfo(); }}")  # it would ask in 12 s itself
    lab.page.locator(".jp-CodeCell").nth(1).locator("img").wait_for(timeout=LIMIT_MS)
    assert [set(out["data"]) for out in json.loads(lab.text(1))] == [PICTURE]
    lab.errors[:] = [error for error in lab.errors if "Canceled future" not in error]


UNSEEN = BUSY + "display(dashboard)"
"""A cell that shows the dashboard when somebody has scrolled away from it."""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("is_over", [True, False])
def test_a_view_that_was_never_seen_leaves_a_picture(notebook, is_over):
    """V8: whatever was scrolled into sight, notebook and file keep text and picture.

    Of a run that was over the kernel's picture, which stood beside the view; of another one that
    the page draws of all charts, although the kernel was killed and said nothing.
    """
    feed = f"{END if is_over else ''}\ndashboard.freezes = {not is_over}"
    gone = f"{'over' if is_over else 'live'}.gone"
    filler = [f"# {i}\n" * 20 for i in range(12)]
    lab = notebook(SETUP + feed, *filler[:6], UNSEEN % gone, *filler, KILL, size=(1300, 600))
    lab.run(0)
    lab.run(7, wait=False)
    lab.scroll_to(0)
    (lab.server.folder / gone).touch()
    known = f"() => {VIEWS}.length === 1 && {VIEWS}[0].seq >= 0"
    lab.page.wait_for_function(known, timeout=LIMIT_MS)
    assert lab.page.evaluate(f"() => {VIEWS}[0].shown === null")
    before = [set(out["data"]) for out in json.loads(lab.text(7))]
    assert before == [PICTURE | {WIDGET_VIEW} if is_over else {"text/plain", WIDGET_VIEW}]
    lab.run(len(filler) + 8, wait=False)
    lab.page.wait_for_function(
        "(i) => { const outs = window.jupyterapp.shell.currentWidget.content.widgets[i]"
        ".model.outputs.toJSON(); return outs.length === 1 && outs[0].data"
        " && !('application/vnd.jupyter.widget-view+json' in outs[0].data); }",
        arg=7,
        timeout=LIMIT_MS,
    )
    lab.save()
    content = json.loads((lab.server.folder / lab.name).read_text())
    (output,) = content["cells"][7]["outputs"]
    assert set(output["data"]) == PICTURE
    assert output["metadata"]["image/png"]["width"] >= 960
    lab.scroll_to(7)
    lab.page.locator(".jp-CodeCell").nth(7).locator("img").wait_for(timeout=LIMIT_MS)
    lab.errors[:] = [error for error in lab.errors if "Canceled future" not in error]


@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_who_opens_a_notebook_whose_kernel_is_gone_sees_the_picture(notebook, app):
    """V8: of a run that was over the view lives in the page, and the file holds the picture alone:
    no page was there when the kernel ended, and none is told of a model that is missing."""
    lab = notebook(f"{SETUP}{END}; dashboard.freezes = False", "dashboard", app=app)
    lab.run(0)
    lab.run(1)
    drawn(lab)
    lab.save()
    lab.close()
    lab.server.end_kernels()
    content = json.loads((lab.server.folder / lab.name).read_text())
    (output,) = content["cells"][1]["outputs"]
    assert set(output["data"]) == PICTURE
    again = notebook(of=lab, app=app)
    cell = again.page.locator(".jp-CodeCell").nth(1)
    cell.locator("img").wait_for(timeout=LIMIT_MS)
    assert "model not found" not in cell.inner_text()


def test_a_picture_thaws_when_another_run_begins(notebook):
    """What follows the newest run is a picture after a run, saved with the notebook, and live again
    with the next one: on the page that saw it displayed, and on one that was loaded again."""
    lab = notebook(SETUP, "dashboard", "dashboard.freeze()", "dashboard.thaw()")
    for index in (0, 1):
        lab.run(index)
    cell = lab.page.locator(".jp-CodeCell").nth(1)
    for reloads in (False, True):
        drawn(lab)
        lab.run(2)
        cell.locator("img").wait_for(timeout=LIMIT_MS)
        if reloads:
            lab.save()
            lab.open()
            cell.locator("img").wait_for(timeout=LIMIT_MS)
        lab.run(3)
        drawn(lab)
        assert cell.locator("img").count() == 0
        more_frames(lab)
    has_true_rows(lab)
