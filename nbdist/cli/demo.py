"""Start engines, lose one in the middle of a collective, and get it back: the main job, headless.

Prints what it does, how long it took, and a line for each check. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nbdist.cli.incidents import incident_table
from nbdist.cli.table import columns, milliseconds
from nbdist.errors import EngineDied, NbdistError
from nbdist.gpus import VISIBLE_DEVICES, count_gpus
from nbdist.processes import processes_by_rundir
from nbdist.rundir import RunDir, runtime_root

if TYPE_CHECKING:  # loads ipyparallel, which only a demo that runs needs
    from collections.abc import Iterator

    from nbdist.session.cluster import Cluster

_ADD_RANKS = """
total = torch.tensor([float(rank)], device=device)
dist.all_reduce(total)
total.item()
"""
_KEEP_SOMETHING = """
import os
mark = 100 + rank
weights = torch.arange(4.0, device=device) * factor
(mark, weights.tolist())
"""
_LOOK = "(slot, os.getpid(), mark, weights.tolist(), total.item())"
_WAIT_FOR_ONE = """
import time
if rank == {victim}:
    time.sleep(60)
dist.all_reduce(torch.ones(1, device=device))
"""
_FACTOR = 0.5
_WAITING_TIMEOUT_S = 3.0
_CELL_TIMEOUT_S = 30.0
_HEALTHY_TIMEOUT_S = 30.0
_GONE_TIMEOUT_S = 10.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `nbdist demo`."""
    parser.add_argument(
        "-n",
        dest="num_engines",
        type=_at_least_three,
        default=4,
        metavar="ENGINES",
        help="how many engines; at least 3, default %(default)s",
    )


def run(options: Namespace) -> int:
    """Play the demo."""
    report = Report()
    try:
        Demo(options.num_engines, report).play()
    except NbdistError as error:
        report.check("the demo ran to its end", f"{type(error).__name__}: {error}", holds=False)
    return report.close()


class Report:
    """What is printed: headings, facts, and checks that hold or not."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._num_checks = 0
        self._failed: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a part."""
        print(f"\n{text}", flush=True)

    def say(self, text: str) -> None:
        """Print some lines, indented."""
        print("\n".join(f"  {line}" for line in text.splitlines()), flush=True)

    def check(self, name: str, detail: str = "", *, holds: bool) -> None:
        """Print one check."""
        self._num_checks += 1
        if not holds:
            self._failed.append(name)
        print(
            f"  {'ok' if holds else 'FAILED':6}  {name}{f': {detail}' if detail else ''}",
            flush=True,
        )

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Say how long something took."""
        started = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - started:.2f} s")

    def close(self) -> int:
        """Print the verdict; returns the exit code."""
        took = f"{time.monotonic() - self._started:.1f} s"
        if self._failed:
            self.heading(f"{len(self._failed)} of {self._num_checks} checks FAILED, in {took}:")
            self.say("\n".join(self._failed))
        else:
            self.heading(f"All {self._num_checks} checks hold, in {took}.")
        return int(bool(self._failed))


class Demo:
    """The parts, in order; each leaves what the next ones need."""

    def __init__(self, num_engines: int, report: Report) -> None:
        self.num_engines = num_engines
        self.victim = min(2, num_engines - 1)
        self.rank_sum = float(sum(range(num_engines)))
        self.report = report
        self.pids: dict[int, int | None] = {}
        """Rank -> pid, before the loss."""
        self.generation = 0
        """The generation that is broken."""
        self.killed_s = 0.0
        """Monotonic time of the kill."""

    def play(self) -> None:
        """Everything."""
        # Late: it loads ipyparallel, and `nbdist --help` should not.
        from nbdist.session.start import start

        self.report.heading(f"Starting {self.num_engines} engines")
        use_cpu_if_gpus_are_few(self.num_engines, self.report)
        with self.report.timed("started"):
            cluster = start(self.num_engines)
        with cluster:
            self.introduce(cluster)
            self.work(cluster)
            self.lose_one(cluster)
            self.look_at_survivors(cluster)
            self.recover(cluster)
            self.end(cluster)

    def introduce(self, cluster: Cluster) -> None:
        """Who is there."""
        self.pids = {seat.rank: seat.pid for seat in cluster.status() if seat.rank is not None}
        self.report.say(_seats(cluster))
        for warning in cluster.warnings:
            self.report.say(f"note: {warning}")
        self._check_equal("world size", cluster.world_size, self.num_engines)

    def work(self, cluster: Cluster) -> None:
        """A collective and some variables on all ranks."""
        self.report.heading("Running cells on all ranks")
        with self.report.timed("all_reduce of the rank numbers"):
            sums = cluster.run(_ADD_RANKS).values
        self._check_equal("its sum on every rank", sums, self._on_all(self.rank_sum))
        cluster.push(factor=_FACTOR)
        kept = cluster.run(_KEEP_SOMETHING).values
        weights = [index * _FACTOR for index in range(4)]
        wanted = {rank: (100 + rank, weights) for rank in range(self.num_engines)}
        self._check_equal("variables, made from a pushed one", kept, wanted)
        marks = {rank: 100 + rank for rank in range(self.num_engines)}
        self._check_equal("pulled back, one of each rank", cluster.pull("mark"), marks)

    def lose_one(self, cluster: Cluster) -> None:
        """SIGKILL one rank while the others wait for it in a collective."""
        self.report.heading(f"Killing rank {self.victim} while the others wait in an all_reduce")
        self.generation = cluster.generation
        died: EngineDied | None = None
        code = _WAIT_FOR_ONE.format(victim=self.victim)
        with ThreadPoolExecutor(1, thread_name_prefix="nbdist-demo-kill") as other_thread:
            killing = other_thread.submit(self._kill_when_waiting, cluster)
            try:
                cluster.run(code, timeout=_CELL_TIMEOUT_S, once=True)
            except EngineDied as error:
                died = error
            raised_s = time.monotonic()
            waiting = killing.result()
        self.report.say(f"ranks that waited: {waiting or 'none was seen to'}")
        self.report.check("the cell ended with EngineDied", holds=died is not None)
        if died is None:
            return
        self.report.say(str(died))
        self._check_equal(
            "it names rank and signal", (died.rank, died.signal), (self.victim, "SIGKILL")
        )
        self.report.say(f"from the kill to the error: {milliseconds(raised_s - self.killed_s)} ms")

    def look_at_survivors(self, cluster: Cluster) -> None:
        """Their processes and variables are the old ones."""
        seen = cluster.run(_LOOK, timeout=_CELL_TIMEOUT_S, once=True).values
        weights = [index * _FACTOR for index in range(4)]
        # By slot, not by rank: ranks move up while a seat is empty.
        pids = {slot: pid for slot, pid, *_ in seen.values() if slot != self.victim}
        kept = {slot: rest for slot, _, *rest in seen.values() if slot != self.victim}
        survivors = [rank for rank in self.pids if rank != self.victim]
        self._check_equal(
            "survivors are the same processes", pids, {r: self.pids[r] for r in survivors}
        )
        wanted = {rank: [100 + rank, weights, self.rank_sum] for rank in survivors}
        self._check_equal("survivors have their variables", kept, wanted)

    def recover(self, cluster: Cluster) -> None:
        """The seat is filled, and the newcomer has what the others have."""
        self.report.heading(f"Waiting for rank {self.victim} to come back")
        cluster.wait_healthy(timeout=_HEALTHY_TIMEOUT_S, after=self.generation)
        self.report.say(f"healthy {time.monotonic() - self.killed_s:.2f} s after the kill")
        self.report.say(_seats(cluster))
        self.report.say(incident_table(cluster.incidents))
        self.report.check(
            "the generation went up",
            f"{self.generation} → {cluster.generation}",
            holds=cluster.generation > self.generation,
        )
        kinds = {incident.kind for incident in cluster.incidents}
        self.report.check("the loss is on record", ", ".join(sorted(kinds)), holds="lost" in kinds)
        seen = cluster.run(_LOOK, timeout=_CELL_TIMEOUT_S, once=True).values
        newcomer = seen.get(self.victim, (None, None))
        old, new = self.pids[self.victim], newcomer[1]
        self.report.check(
            f"rank {self.victim} is a new process",
            f"pid {old} → {new}",
            holds=new not in (None, old),
        )
        weights = [index * _FACTOR for index in range(4)]
        wanted = (self.victim, 100 + self.victim, weights, self.rank_sum)
        self._check_equal("it has its variables", (newcomer[0], *newcomer[2:]), wanted)
        lacking = {s.rank: s.not_restored for s in cluster.status() if s.not_restored}
        self._check_equal("nothing could not be restored", lacking, {})
        with self.report.timed("all_reduce on the full world"):
            sums = cluster.run(_ADD_RANKS, timeout=_CELL_TIMEOUT_S).values
        self._check_equal("its sum on every rank", sums, self._on_all(self.rank_sum))

    def end(self, cluster: Cluster) -> None:
        """Shut down, and look for anything that is left."""
        self.report.heading("Shutting down")
        path = RunDir(runtime_root() / cluster.id).path
        before = [process.pid for process in processes_by_rundir().get(path, [])]
        # Were none found before, finding none afterwards would mean nothing.
        num_least = self.num_engines + 1
        self.report.check(
            "its processes are found", f"{len(before)}", holds=len(before) >= num_least
        )
        with self.report.timed("shut down"):
            cluster.shutdown()
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while (left := processes_by_rundir().get(path, [])) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._check_equal(
            "no process of the cluster is left", [process.pid for process in left], []
        )
        self.report.check("its folder is gone", str(path), holds=not path.exists())

    def _kill_when_waiting(self, cluster: Cluster) -> str:
        """Kill the victim once all others wait, or after some time; returns who waited."""
        others = self.num_engines - 1
        deadline = time.monotonic() + _WAITING_TIMEOUT_S
        waiting: list[str] = []
        while len(waiting) < others and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = [f"{s.rank}" for s in cluster.status() if "all_reduce" in s.activity]
        self.killed_s = time.monotonic()
        cluster.kill([self.victim])
        return ", ".join(waiting)

    def _on_all(self, value: object) -> dict[int, object]:
        return dict.fromkeys(range(self.num_engines), value)

    def _check_equal(self, name: str, value: object, wanted: object) -> None:
        holds = value == wanted
        shown = _shown(value) if holds else f"{_shown(value)}, not {_shown(wanted)}"
        self.report.check(name, shown, holds=holds)


def use_cpu_if_gpus_are_few(num_engines: int, report: Report) -> None:
    """Hide the GPUs where there are some, but not one for each engine: then all use the CPU."""
    gpus = count_gpus()
    if 0 < gpus.count < num_engines:
        os.environ[VISIBLE_DEVICES] = ""
        report.say(f"{gpus.count} GPUs do not do for {num_engines} engines: all use the CPU")


def _seats(cluster: Cluster) -> str:
    header = ("rank", "slot", "pid", "device", "state", "generation")
    seats = cluster.status()
    return columns(
        header, [(s.rank, s.slot, s.pid, s.device, s.state, s.generation) for s in seats]
    )


def _shown(value: object) -> str:
    """A dict of equal values as that value; anything else as it is."""
    if isinstance(value, dict) and value:
        values = list(value.values())
        if len(values) > 1 and all(one == values[0] for one in values):
            return f"{values[0]!r} on {len(values)} ranks"
        return ", ".join(f"{key}: {one!r}" for key, one in value.items())
    return repr(value) if value not in ({}, []) else "none"


def _at_least_three(text: str) -> int:
    if not text.isdecimal() or int(text) < 3:
        message = f"{text!r}: the demo needs 3 engines or more"
        raise ArgumentTypeError(message)
    return int(text)
