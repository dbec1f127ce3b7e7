"""Run the benchmarks and say which bounds hold."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.bench.figures import FIGURES, Samples, evaluate, failed
from nbdist.bench.host import Host
from nbdist.bench.plan import Plan
from nbdist.bench.report import as_json, as_text
from nbdist.bench.rounds import play
from nbdist.cli import bench as command
from nbdist.gpus import VISIBLE_DEVICES

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; 1 if a bound is missed or something could not be measured."""
    parser = argparse.ArgumentParser(
        prog="nbdist bench",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    options = parser.parse_args(argv)
    plan = Plan.of(only=options.only, rounds=options.rounds, is_quick=options.quick)
    os.environ[VISIBLE_DEVICES] = ""  # the bounds are those of engines on the CPU
    host, samples = Host.this(), Samples()
    _say(f"{host}\n{plan}")
    failures = play(plan, samples, say=_say)
    rows = evaluate([f for f in FIGURES if plan.wants(f.benchmark)], samples)
    sys.stdout.write(f"\n{as_text(rows, failures)}\n")
    if options.json is not None:
        record = as_json(host, plan, rows, samples, failures)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(failed(rows) or bool(failures))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)
