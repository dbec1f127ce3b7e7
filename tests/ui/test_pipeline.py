"""The page's view of a pipeline: what was measured beside what was planned."""

from __future__ import annotations

from itertools import pairwise

import pytest
from bare import VIEW
from piped import PipedRun
from synthetic import SyntheticRun

from nbdist.protocol.frames import unpack
from nbdist.views.passages import newest_passage

pytestmark = pytest.mark.timeout(120)

PANEL = ".nbdist-pipeline.nbdist-panel"
CHART = f"{VIEW}.shown.panels.find((p) => p.name === 'pipeline').charts[0]"


@pytest.fixture(scope="module")
def frame():
    """Four ranks, 1F1B, eight micro-batches."""
    return PipedRun().frame(12.0)


def column(page, source, name):
    return page.page.evaluate(f"() => [...{CHART}.sources['{source}'].data['{name}']]")


def test_a_pipeline_is_drawn_beside_its_plan(bare, frame):
    """In the place of gradient sync; the page reckons as Python does."""
    page = bare()
    page.show(frame)
    assert not page.page.locator(".nbdist-sync.nbdist-panel").is_visible()
    passage = newest_passage(unpack(frame)[1])
    said = page.page.locator(f"{PANEL} .nbdist-said").inner_text()
    assert f"The bubble is {passage.idle * 100:.0f} % of the ranks' time" in said
    assert "planned are 27 % = (p−1)/(m+p−1) with p = 4, m = 8" in said
    assert "slot 0 holds 4 micro-batches at once" in said
    assert page.page.locator(f"{PANEL} .nbdist-step").inner_text() == f"step {passage.step}"
    what = column(page, "bars", "what")
    assert len([text for text in what if text.startswith("planned")]) == 64
    waits = [text for text in what if text.startswith("waits for micro-batch")]
    assert len(waits) == len(passage.waits)
    assert len(what) == 128 + len(waits)
    chain = list(zip(column(page, "chain", "left"), column(page, "chain", "right"), strict=True))
    assert chain[-1][0] == pytest.approx(0, abs=1e-6)
    assert chain[0][1] == pytest.approx(passage.end * 1000)
    assert all(later[0] >= earlier[1] - 1e-6 for later, earlier in pairwise(chain))


def test_its_numbers_are_a_table_too(bare, frame):
    """A row for each slot, with what it sent; a step before can be looked at."""
    page = bare()
    page.show(frame)
    panel = page.page.locator(PANEL)
    before = panel.locator(".nbdist-step").inner_text()
    panel.get_by_title("The step before").click()
    assert panel.locator(".nbdist-step").inner_text() != before
    panel.locator("button", has_text="Table").click()
    rows = panel.locator(".nbdist-scroller tbody tr")
    assert rows.count() == 4
    cells = rows.nth(1).locator("td").all_inner_texts()
    assert cells[:2] == ["1", "1"]
    assert cells[5:] == ["27 %", "3", "1.0 MiB", "1.0 MiB"]
    with page.page.expect_download() as saved:
        panel.locator("button", has_text="PNG").click()
    assert saved.value.suggested_filename == "nbdist-pipeline.png"


def test_its_overview_tells_the_bubble(bare, frame):
    """Of sums that are hidden there is nothing to say."""
    page = bare()
    page.show(frame)
    card = page.page.locator(".nbdist-card-overlap")
    assert card.inner_text().startswith("bubble")
    assert card.locator(".nbdist-detail").inner_text() == "27 % planned"


def test_other_runs_show_no_pipeline(bare):
    """They have no such card; who asks for it alone is told why it is empty."""
    frame = SyntheticRun().frame(12.0)
    page = bare()
    page.show(frame)
    assert not page.page.locator(PANEL).is_visible()
    assert page.page.locator(".nbdist-sync.nbdist-panel").is_visible()
    page = bare(views=("pipeline",))
    page.show(frame)
    assert "This run is no pipeline" in page.page.locator(PANEL).inner_text()


def test_before_its_first_step_it_says_so(bare):
    """The plan is known by then."""
    page = bare()
    page.show(PipedRun().frame(1.2))
    assert "what is planned is known" in page.page.locator(PANEL).inner_text()
    assert not page.page.locator(".nbdist-sync.nbdist-panel").is_visible()


def test_without_its_plan_it_is_drawn_all_the_same(bare):
    """Another supervisor may have been told it."""
    run = PipedRun()
    run._when["plans"] += 1e9  # it is never told
    page = bare()
    page.show(run.frame(12.0))
    said = page.page.locator(f"{PANEL} .nbdist-said").inner_text()
    assert "what was planned is not known" in said
    assert not [text for text in column(page, "bars", "what") if text.startswith("planned")]
