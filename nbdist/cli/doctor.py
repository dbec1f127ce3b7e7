"""Say what this machine offers, what would not work, and why.

One line for each finding: ok, warn (something will be slower, or missing) or fail (engines will
not start), with the next step. Exit code 1 if a finding failed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.cli import installed, machine
from nbdist.cli.clusters import Cluster, find_clusters
from nbdist.cli.findings import Finding
from nbdist.gpus import count_gpus, num_cores

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Iterator


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist doctor`."""
    parser.add_argument("--json", action="store_true", help="print a JSON list, for programs")


def run(options: Namespace) -> int:
    """Print each finding as soon as it is known."""
    found = []
    for finding in findings():
        found.append(finding)
        if not options.json:
            _show(finding)
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        num = {level: sum(f.level == level for f in found) for level in ("warn", "fail")}
        print(f"\n{len(found)} findings: {num['warn']} to look at, {num['fail']} failed")
    return int(any(finding.level == "fail" for finding in found))


def _show(finding: Finding) -> None:
    print(f"{finding.level:4}  {finding.name:12}  {finding.text}", flush=True)
    if finding.next_step:
        print(f"{'':4}  {'':12}  → {finding.next_step}", flush=True)


def findings() -> Iterator[Finding]:
    """Everything, quick things first."""
    gpus = count_gpus()
    yield machine.system(sys.platform, os.environ)
    yield machine.pidfd()
    yield from installed.packages()
    yield machine.cores(num_cores(), gpus)
    yield machine.memory(psutil.virtual_memory().available)
    yield from machine.runtime_folder(os.environ)
    yield machine.shared_memory(Path("/dev/shm"))  # noqa: S108 - looked at, not written to
    yield machine.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield machine.loopback()
    yield machine.gloo_interface(os.environ.get("GLOO_SOCKET_IFNAME"), psutil.net_if_addrs())
    yield from leftovers()
    build = installed.ask_torch()
    yield installed.torch_build(build)
    yield installed.gpu_finding(gpus, build)


def leftovers() -> Iterator[Finding]:
    """Whether clusters are left whose owner is gone; nothing where there is no folder."""
    try:
        yield judge_leftovers(find_clusters())
    except PermissionError:  # runtime_folder said so
        return


def judge_leftovers(clusters: Iterable[Cluster]) -> Finding:
    """Clusters that `nbdist clean` would end."""
    left = [c for c in clusters if c.state not in ("owned", "kept")]
    if not left:
        return Finding(name="leftovers", level="ok", text="none")
    num_processes = sum(len(cluster.processes) for cluster in left)
    ids = ", ".join(cluster.rundir.cluster_id for cluster in left)
    text = f"{ids}, with {num_processes} processes"
    return Finding(name="leftovers", level="warn", text=text, next_step="nbdist clean")
