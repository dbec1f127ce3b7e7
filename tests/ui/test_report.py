"""A report opened in a real browser, as a file, with the network cut (V6)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stories import synthetic_story
from synthetic import SyntheticRun

from nbdist.cli import main
from nbdist.supervisor.replay import read
from nbdist.views.report import page, write_report

pytestmark = pytest.mark.timeout(300)

LIMIT_MS = 60_000
PANELS = ("sync", "throughput", "loss", "traffic", "memory", "membership")
DRAWN = "name => document.querySelectorAll(`.nbdist-${name} .bk-Figure`).length > 0"
HAS_INK = """name => {
  const canvases = [];
  const look = (root) => root.querySelectorAll("*").forEach((node) => {
    if (node.shadowRoot) look(node.shadowRoot);
    if (node.tagName === "CANVAS") canvases.push(node);
  });
  look(document.querySelector(`.nbdist-${name}`));
  return canvases.some((canvas) => {
    if (!canvas.width || !canvas.height) return false;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const seen = new Set();
    for (let i = 0; i < data.length; i += 4) {
      const [red, green, blue] = [data[i] >> 6, data[i + 1] >> 6, data[i + 2] >> 6];
      if (data[i + 3] > 200) seen.add(red * 16 + green * 4 + blue);
    }
    return seen.size >= 2;
  });
}"""
"""Whether more than one colour is drawn in a panel."""


@pytest.fixture
def opened(browser):
    """`opened(path, …)`: the page; it asks for nothing, and ends without an error."""

    def open_page(path, *, scheme="light", has_scripts=True, width=1300):
        context = browser.new_context(
            color_scheme=scheme,
            java_script_enabled=has_scripts,
            viewport={"width": width, "height": 2600},
            offline=True,
            accept_downloads=True,
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(LIMIT_MS)
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        known.add(path.as_uri())
        return tab

    contexts, errors, asked, known = [], [], [], set()
    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert {url for url in asked if not url.startswith(("blob:", "data:"))} <= known


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a whole run, with one that nothing disturbed beneath."""
    beneath = synthetic_story(SyntheticRun(seed=3), title="the same run, undisturbed")
    path = tmp_path_factory.mktemp("report") / "a report.html"
    return write_report(path, synthetic_story(), reference=beneath)


def wait_ink(tab, panel):
    tab.wait_for_function(HAS_INK, arg=panel, timeout=LIMIT_MS, polling=250)


def wait_drawn(tab):
    for panel in PANELS:
        tab.wait_for_function(DRAWN, arg=panel, timeout=LIMIT_MS)
    for panel in PANELS:
        wait_ink(tab, panel)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_draws_its_views_offline(report, opened, scheme):
    """All four, from the file alone, in the reader's colours; the picture has made room."""
    tab = opened(report, scheme=scheme)
    wait_drawn(tab)
    assert tab.locator("#nbdist-views > img").count() == 0
    said = tab.locator(".nbdist-loss .nbdist-said").inner_text()
    assert "302 steps" in said
    assert "Beneath, in grey: the same run, undisturbed" in said
    assert "4 buckets" in tab.locator(".nbdist-sync .nbdist-said").inner_text()
    assert tab.locator(".nbdist-sync .nbdist-step").inner_text() == "step 301"
    assert "2 incidents" in tab.locator(".nbdist-membership .nbdist-said").inner_text()
    assert tab.locator(".nbdist-chip").inner_text().startswith("finished")
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")


def test_a_reports_panels_can_be_used(report, opened):
    """Table twins open and close, steps can be gone through, a chart is saved as a picture."""
    tab = opened(report)
    wait_drawn(tab)
    for panel in PANELS:
        root = tab.locator(f".nbdist-{panel}")
        root.get_by_role("button", name="Table").click()
        assert root.locator(".nbdist-scroller:not([hidden]) tbody tr").count() >= 2
        assert root.locator(".nbdist-body").is_hidden()
        root.get_by_role("button", name="Chart").click()
        assert root.locator(".nbdist-body").is_visible()
    tab.locator(".nbdist-sync").get_by_title("The step before").click()
    assert tab.locator(".nbdist-sync .nbdist-step").inner_text() == "step 300"
    tab.locator(".nbdist-loss select").select_option("samples")
    with tab.expect_download() as saved:
        tab.locator(".nbdist-loss").get_by_role("button", name="PNG").click()
    assert saved.value.suggested_filename == "nbdist-loss.png"
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("has_scripts", [True, False])
def test_the_record_is_saved_and_makes_the_same_report(report, opened, tmp_path, has_scripts):
    """As lines, or without scripts packed; `nbdist replay` reads both, and reports the same run."""
    tab = opened(report, has_scripts=has_scripts)
    if has_scripts:
        wait_drawn(tab)
    with tab.expect_download() as saved:
        tab.get_by_role("link", name="Save the record").click()
    name = saved.value.suggested_filename
    assert name == ("run.jsonl" if has_scripts else "run.jsonl.gz")
    path = tmp_path / name
    saved.value.save_as(path)
    story = synthetic_story()
    assert read(path).story().rows.tolist() == story.rows.tolist()
    again = tmp_path / "again.html"
    assert main(["replay", str(path), "--report", str(again)]) == 0
    if has_scripts:
        tab = opened(again)
        wait_drawn(tab)
        assert "4 buckets" in tab.locator(".nbdist-sync .nbdist-said").inner_text()


def test_without_scripts_a_picture_and_tables_stand_there(report, opened):
    """Whoever allows no scripts reads all numbers, and sees the charts."""
    tab = opened(report, has_scripts=False)
    image = tab.locator("#nbdist-views > img")
    assert image.is_visible()
    assert image.bounding_box()["width"] > 800
    tab.get_by_text("Steps as a table").click()
    assert tab.locator("details[open] tbody tr").count() > 50
    assert tab.locator(".incidents tbody tr").count() == 2


def test_a_report_of_a_run_of_which_little_is_known_says_so(opened, tmp_path):
    """No buckets, no seats: the panels say why, and the others are drawn."""
    story = replace(synthetic_story(), tables={}, series={})
    path = tmp_path / "little.html"
    path.write_text(page(story), encoding="utf-8")
    tab = opened(path, width=700)
    wait_ink(tab, "loss")
    assert "No bucket of this run is known" in tab.locator(".nbdist-sync").inner_text()
    assert tab.get_by_role("link", name="Save the record").is_visible()
