"""Show a run again from its record, without engines.

Prints a line for each second of the run, the incidents, and what is missing from the record. Exit
code 1 if the file is no record of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cli.incidents import incident_table
from nbdist.cli.table import printable
from nbdist.errors import FileUnwritable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist replay`."""
    parser.add_argument("record", type=Path, metavar="RUN.jsonl", help="what a run wrote down")
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write a report that opens offline, too"
    )


def run(options: Namespace) -> int:
    """Print the run; write its report where one is wanted."""
    from nbdist.cli.seconds import lines
    from nbdist.supervisor.replay import read

    replay = read(options.record)
    if options.report is not None and options.report.resolve() == options.record.resolve():
        raise FileUnwritable(f"{options.report} is the record itself; name another file")
    # Whoever wrote the record has not to be trusted with the terminal.
    print(printable(f"{replay.header.title}, begun {replay.header.started}"))
    for line in lines(replay):
        print(printable(line))
    if replay.ended is not None:
        how = printable(replay.ended.how)
        print(f"{replay.ended.at - replay.header.at:7.0f} s  ended: {how}")
    if replay.incidents:
        print(f"\n{incident_table(replay.incidents)}")
    for note in replay.notes:
        print(printable(f"note: {note}"))
    if options.report is not None:
        from nbdist.views.report import write_report  # loads a plotting library

        path = write_report(options.report, replay.story(), record=options.record)
        print(f"report: {path}")
    return 0
