"""The supervisor's process: `python -m nbdist.supervisor RUNDIR`.

Wires the rooms together, nothing else.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from nbdist.rundir import RunDir
from nbdist.supervisor.loop import Loop


def main() -> None:
    """Run one cluster's supervisor until it is shut down or its kernel is gone."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Loop(RunDir(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
