"""`python -m nbdist.engine RUNDIR SLOT NUM_THREADS`: an engine that was not forked."""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.engine.entry import main
from nbdist.rundir import RunDir

if __name__ == "__main__":
    rundir = RunDir(Path(sys.argv[1]))
    sys.path[:] = rundir.read_surroundings().path
    sys.exit(main(rundir, int(sys.argv[2]), int(sys.argv[3])))
