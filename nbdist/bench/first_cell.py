"""From a fresh process to the first cell with torch, as often as an import of torch takes.

Run as a module, this is that fresh process; it prints its times as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.bench.figures import Samples

_LIMIT_S = 120.0
_FIRST = "torch.ones(2).sum().item()"
_DDP = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))"
_NUM_EMPTY = 5
_NUM_IMPORTS = 2
"""Before the start, and as many after it."""


def measure(number: int, samples: Samples) -> None:
    """One start between imports of torch; all times count from before the process is made."""
    before = [import_torch() for _ in range(_NUM_IMPORTS)]
    began = time.monotonic()
    times = json.loads(_run("-m", "nbdist.bench.first_cell"))
    for index, first in enumerate(before):
        samples.add_reference("import torch", first, import_torch(), number=number + index)
    # One clock for all processes of a host.
    samples.add("first cell", times["answered_at"] - began)
    samples.add("DDP", times["ddp_s"] - times["empty_s"])


def import_torch() -> float:
    """Seconds that a fresh process takes to import torch and end."""
    began = time.monotonic()
    _run("-c", "import torch")
    return time.monotonic() - began


def _run(*arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - our own interpreter, no shell
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
    )
    return done.stdout


def main() -> None:
    """The fresh process."""
    from nbdist.session.start import start  # noqa: PLC0415 - its import is part of what is timed

    with start(4) as cluster:
        cluster.run(_FIRST)
        answered_at = time.monotonic()
        empty = [cluster.run("pass").seconds for _ in range(_NUM_EMPTY)]
        ddp_s = cluster.run(_DDP).seconds
    times = {"answered_at": answered_at, "empty_s": median(empty), "ddp_s": ddp_s}
    sys.stdout.write(json.dumps(times))


if __name__ == "__main__":
    main()
