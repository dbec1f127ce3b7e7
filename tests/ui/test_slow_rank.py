"""On real engines, in JupyterLab: who is slow is said, in words and soon."""

import time

import pytest
import training

NAMED_S = 4 * 5.0
LIMIT_MS = 60_000
SETUP = "%load_ext nbdist\n%dist_init -n 3\nimport nbdist\ncluster = nbdist.current()"
TRAIN = "run = cluster.train('trainer', steps=100_000)\nrun.dashboard('throughput')"


def says(notebook, words, limit_ms):
    """Wait until the view says so."""
    notebook.page.wait_for_function(
        "(words) => document.querySelector('.nbdist')?.innerText.includes(words)",
        arg=words,
        timeout=limit_ms,
    )


@pytest.mark.timeout(240)
def test_the_slowed_rank_is_named(notebook):
    """Nobody is slow; one is slowed by the magic, and the view names it and says why; it is made
    quick again, and nobody is named."""
    lab = notebook(
        SETUP,
        f"%%distributed\n{training.SLEEPING}",
        TRAIN,
        "%dist_slow 1 3",
        "%dist_slow 1 1",
        "run.stop()\n%dist_shutdown",
    )
    for index in range(3):
        lab.run(index)
    says(lab, "Nobody holds the others up", LIMIT_MS)
    lab.run(3)
    began_at = time.monotonic()
    says(lab, "Slot 1 holds the others up", NAMED_S * 1000)
    assert time.monotonic() - began_at < NAMED_S
    says(lab, "it was made 3 times as slow", LIMIT_MS)
    lab.run(4)
    says(lab, "Nobody holds the others up", LIMIT_MS)
    lab.run(5)
