"""What a made-up run looks like, compared with pictures in `golden/`.

Blocks of pixels are compared, since no two machines smooth letters alike. After a wanted change:
`NBDIST_WRITE_GOLDENS=1 make test-ui`, look at the pictures, commit them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from agreeing import AgreeingRun
from bare import VIEW
from distant import DriftingRun, ServedRun
from PIL import Image
from piped import PipedRun
from sending import SendingRun
from synthetic import SyntheticRun

pytestmark = pytest.mark.timeout(120)

GOLDEN = Path(__file__).parent / "golden"
BLOCK_PX = 8
MAX_DIFFERENCE = 28
"""Of a block's mean, of 255."""
MAX_SHARE = 0.004
"""Of blocks that differ by more: a bar that is missing is 0.007."""
MAX_BYTES = 150_000
CASES = {
    "four": (4, 1300),
    "many": (64, 1300),
    "narrow": (4, 700),
    "piped": (4, 1300),
    "served": (4, 1300),
    "drifting": (4, 1300),
    "sending": (4, 1300),
    "agreeing": (4, 1300),
}
RUNS = {
    "piped": PipedRun,
    "served": ServedRun,
    "drifting": DriftingRun,
    "sending": SendingRun,
    "agreeing": AgreeingRun,
}
VIEWS = {
    "served": ("loss", "distance"),
    "drifting": ("loss", "distance"),
    "sending": ("loss", "bytes"),
    "agreeing": ("loss", "agreement"),
}
"""Where not all are shown."""


def blocks(image: Image.Image) -> np.ndarray:
    """Mean colours."""
    small = image.convert("RGB").reduce(BLOCK_PX)
    return np.asarray(small, dtype=np.int16)


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("case", CASES)
def test_it_looks_as_before(bare, case, look, tmp_path):
    """The dashboard of a fixed run looks as in the picture, in light and dark."""
    num_slots, width = CASES[case]
    views = {"views": VIEWS[case]} if case in VIEWS else {}
    page = bare(size=(width, 3600), is_dark=look == "dark", **views)
    run = RUNS[case]() if case in RUNS else SyntheticRun(num_slots=num_slots, length_s=45.0)
    page.show(run.frame(min(40.0, run.length_s - 1)))
    # However long the browser took: the freshness clock says "live".
    page.page.evaluate(f"() => {{ {VIEW}.seen = Infinity; {VIEW}.tick(); }}")
    page.drawn()
    shot = Image.open(io.BytesIO(page.page.screenshot(full_page=True))).convert("RGB")
    height = page.page.evaluate("() => document.querySelector('.nbdist').offsetHeight")
    shot = shot.crop((0, 0, width, height)).quantize(64)
    wanted = GOLDEN / f"{case}-{look}.png"
    if os.environ.get("NBDIST_WRITE_GOLDENS"):
        wanted.parent.mkdir(exist_ok=True)
        shot.save(wanted, optimize=True)
    assert wanted.stat().st_size < MAX_BYTES
    with Image.open(wanted) as file:
        golden = file.convert("RGB")
    found = tmp_path / wanted.name
    shot.save(found)
    sizes = f"{found} has {shot.size}, {wanted} {golden.size}"
    assert abs(shot.size[1] - golden.size[1]) <= BLOCK_PX, sizes
    rows = min(shot.size[1], golden.size[1])
    box = (0, 0, width, rows)
    difference = np.abs(blocks(shot.crop(box)) - blocks(golden.crop(box))).max(axis=2)
    share = float((difference > MAX_DIFFERENCE).mean())
    if share > MAX_SHARE:
        marked = Image.fromarray(((difference > MAX_DIFFERENCE) * 255).astype(np.uint8))
        marked.resize((width, rows), Image.Resampling.NEAREST).save(tmp_path / "differs.png")
    assert share <= MAX_SHARE, (
        f"{share:.1%} of {found} differ from {wanted} (white in {tmp_path / 'differs.png'}); "
        "if that is wanted: NBDIST_WRITE_GOLDENS=1 make test-ui"
    )
