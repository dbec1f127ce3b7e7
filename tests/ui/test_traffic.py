"""What dashboards cost a notebook and its server, and what stands where they cannot live."""

from __future__ import annotations

import json

import pytest
from synthetic import END, LENGTH_S, SETUP

pytestmark = pytest.mark.timeout(480)

LIMIT_MS = 60_000
STATE_SETTING = "@jupyter-widgets/jupyterlab-manager:plugin"
SESSION = f"""
import nbdist.session.dashboards as ds
from types import SimpleNamespace
from synthetic import SyntheticFeed, SyntheticRun
known = SyntheticRun(length_s={LENGTH_S})
ds.RunFeed = lambda *_: SyntheticFeed(known, start=22.0)
dashboards = ds.Dashboards(SimpleNamespace(feeds=None, runs=[]), print)
"""
MANY = """
from synthetic import SyntheticFeed, SyntheticRun
from nbdist.views.dashboard import Dashboard, listen
listen()
run = SyntheticRun(num_slots=64, length_s=14.0, step_s=0.005, has_details=False)
"""
SHOW = """
feed = SyntheticFeed(run, start=1.0)
dashboard = Dashboard(feed, freezes=False)
dashboard
"""
MAX_PER_S = 20
VIEWS = "[...(window[Symbol.for('nbdist')]?.views ?? [])]"


def drawn(lab, count=1):
    """Wait until so many views have charts."""
    lab.page.wait_for_function(
        f"(n) => {VIEWS}.filter((v) => v.shown?.panels.some((p) => p.isReady)).length >= n",
        arg=count,
        timeout=LIMIT_MS,
    )


def saved_bytes(lab):
    """Of the notebook's file, and of the widgets' state in it."""
    lab.save()
    text = (lab.server.folder / lab.name).read_text()
    return len(text), len(json.dumps(json.loads(text)["metadata"].get("widgets", {})))


def saves_state(lab, wanted):
    """Whether the application stores the state of widgets."""
    lab.page.evaluate(
        "([id, raw]) => window.jupyterapp.serviceManager.settings.save(id, raw)",
        [STATE_SETTING, json.dumps({"saveState": wanted})],
    )


def test_a_notebook_does_not_grow_with_each_run(notebook):
    """V19, V20: a cell run 20 times adds less than 50 kB, ten dashboards less than 0.5 MB."""
    lab = notebook(SESSION, *["dashboards.open()"] * 10)
    saves_state(lab, wanted=True)
    lab.open()
    lab.run(0)
    lab.run(1)
    drawn(lab)
    first, _ = saved_bytes(lab)
    for _ in range(20):
        before = lab.page.evaluate(f"() => {VIEWS}[0].id")
        lab.run(1)
        lab.page.wait_for_function(
            f"(id) => {VIEWS}.length === 1 && {VIEWS}[0].id !== id && {VIEWS}[0].seq > 0",
            arg=before,
            timeout=LIMIT_MS,
        )
    drawn(lab)
    again, _ = saved_bytes(lab)
    assert again - first < 50_000
    for index in range(2, 11):
        lab.run(index)
    lab.page.wait_for_function(f"() => {VIEWS}.length === 10", timeout=LIMIT_MS)
    _, state = saved_bytes(lab)
    saves_state(lab, wanted=False)
    assert 10_000 < state < 500_000
    # JupyterLab says so of each frame that was under way when its cell ran again.
    lab.errors[:] = [text for text in lab.errors if not text.startswith("Comm not found")]


def test_many_ranks_make_few_messages(notebook):
    """V21: 64 ranks at 200 steps a second are fewer than 20 messages a second to the page."""
    lab = notebook(MANY, SHOW)
    lab.run(0)
    lab.run(1)
    drawn(lab)
    warnings = []
    lab.page.on("console", lambda message: warnings.append(message.text))
    counted = lab.page.evaluate(
        """() => new Promise((done) => {
          const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
          const count = { all: 0, frames: 0 };
          kernel.anyMessage.connect((_, { msg, direction }) => {
            if (direction !== "recv" || msg.channel !== "iopub") return;
            count.all++;
            if (msg.content.data?.content?.type === "frame") count.frames++;
          });
          setTimeout(() => done(count), 5000);
        })"""
    )
    assert counted["all"] < MAX_PER_S * 5
    assert counted["frames"] >= 5
    assert not [text for text in warnings if "rate" in text]


def test_two_notebooks_steer_their_own_kernels(notebook):
    """V12: in one page, orders of either notebook reach its own kernel, while both compute."""
    # The cell has to be running while the page steers: it is what keeps the kernel busy.
    lab = notebook(SETUP, "display(dashboard)\ntime.sleep(25)", "print(orders)")
    other = lab.name.replace("-0.", "-other.")
    text = (lab.server.folder / lab.name).read_text()
    (lab.server.folder / other).write_text(text)
    names = (lab.name, other)
    lab.page.evaluate(
        "(path) => window.jupyterapp.commands.execute('docmanager:open', "
        "{ path, options: { mode: 'split-right' } })",
        other,
    )
    lab.page.wait_for_function(
        "(name) => { const w = window.jupyterapp.shell.currentWidget; "
        "return w?.context?.path === name && "
        "w.sessionContext.session?.kernel?.connectionStatus === 'connected'; }",
        arg=other,
        timeout=LIMIT_MS,
    )
    for name in names:
        show(lab, name)
        lab.run(0)
        lab.run(1, wait=False)
    drawn(lab, 2)
    for number, name in enumerate(names):
        show(lab, name)
        panel = lab.page.locator(".jp-NotebookPanel").nth(number)
        panel.locator(".nbdist-actions button", has_text="Kill").nth(number + 1).click()
        panel.locator(".nbdist-answer", has_text="done").wait_for(timeout=LIMIT_MS)
    for number, name in enumerate(names):
        show(lab, name)
        lab.run(2)
        assert f"[({number + 1}, {4001 + number})]" in lab.text(2)


def show(lab, name):
    """Make a notebook of the page the current one."""
    lab.page.evaluate(
        "(name) => { const { shell } = window.jupyterapp; "
        "const w = [...shell.widgets('main')].find((w) => w.context?.path === name); "
        "shell.activateById(w.id); }",
        name,
    )
    lab.page.wait_for_function(
        "(name) => window.jupyterapp.shell.currentWidget?.context?.path === name",
        arg=name,
        timeout=LIMIT_MS,
    )


def test_where_no_page_can_draw_pictures_say_why(notebook):
    """A front end that lets no widget run gets a picture with the reason, again and again."""
    fewer = "import nbdist.views.stills as st\nst.FIRST_WORD_LIMIT_S = 2.0\n"
    # Pictures come until one is of the run that is over: the last is to come after that, too.
    go_on = "any(t.name == 'nbdist-stills' for t in threading.enumerate())"
    end = f"{END}\nwhile {go_on}:\n    time.sleep(0.05)\ndashboard.freeze()"
    lab = notebook(fewer + SETUP, "dashboard", end)
    # As under a policy that forbids scripts from blobs, and where pages open no comms.
    lab.page.evaluate("() => { URL.createObjectURL = () => 'blob:forbidden'; }")
    lab.run(0)
    lab.run(1)
    cell = lab.page.locator(".jp-CodeCell").nth(1)
    cell.locator("p", has_text="no page has answered").wait_for(timeout=LIMIT_MS)
    first = cell.locator("img").get_attribute("src")
    lab.page.wait_for_function(
        "(first) => { const image = document.querySelector('.jp-CodeCell .jp-OutputArea img'); "
        "return image && image.src !== first; }",
        arg=first,
        timeout=LIMIT_MS,
    )
    assert len(lab.text(1)) < 200_000
    lab.run(2)
    assert [set(out["data"]) for out in json.loads(lab.text(1))] == [{"text/plain", "image/png"}]
    lab.errors.clear()  # what a page says that must not run scripts
