"""The main job, headless: a GPT trains data-parallel while ranks are killed and stopped.

Runs in the process of `nbdist demo`, which is the kernel of its cluster; uses public names as a
notebook would, and the processes' own table to see that none is left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import nbdist
from nbdist.cli.incidents import incident_table
from nbdist.cli.progress import progress
from nbdist.cli.table import columns
from nbdist.cli.transcript import Transcript
from nbdist.cli.verdicts import (
    Expected,
    Fault,
    loss_check,
    record_check,
    replicas_check,
    run_checks,
)
from nbdist.errors import NbdistError
from nbdist.gpus import VISIBLE_DEVICES, count_gpus
from nbdist.processes import processes_by_rundir
from nbdist.rundir import RunDir, runtime_root
from nbdist.supervisor.replay import read
from nbdist.views.facts import Check, story_checks
from nbdist.views.report import write_report

if TYPE_CHECKING:  # loads ipyparallel, which only a job that runs needs
    from nbdist.protocol.story import RunStory
    from nbdist.session.cluster import Cluster
    from nbdist.session.run import Run

GLOBAL_BATCH = 16
CONTEXT = 128
SEED = 0
LOSS_BELOW = 3.0
"""Reached within 60 steps; a shorter run is not asked for it."""
LOSS_STEPS = 60
HANG_TIMEOUT_S = 2.0

MAKE_TRAINER = f"""
from nbdist.data import ByteText, pydoc_text
from nbdist.train import GPT, DataParallel, GPTConfig, Trainer, next_token_loss

def make_trainer():
    config = GPTConfig(context={CONTEXT})
    return Trainer(
        model=lambda: GPT(config),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        loss=next_token_loss,
        data=ByteText(pydoc_text(), config.context),
        global_batch={GLOBAL_BATCH},
        seed={SEED},
        strategy=DataParallel(),
    )
"""

_LOOK_S = 0.05
_LIVE_S = 1.0
_HEALTHY_TIMEOUT_S = 30.0
_RUN_TIMEOUT_S = 150.0
_GONE_TIMEOUT_S = 10.0


class MainJob:
    """The parts, in order; each leaves what the next ones need.

    Args:
        num_engines: at least 2.
        num_steps: of each of the two runs.
        report: where the report goes; the record has the same name and ends with `.jsonl`.
    """

    def __init__(self, *, num_engines: int, num_steps: int, report: Path) -> None:
        self.num_engines, self.num_steps, self.report = num_engines, num_steps, report
        self.record = report.with_suffix(".jsonl")
        self.faults = (
            Fault(step=num_steps // 3, rank=0, signal="KILL", kind="lost"),
            Fault(step=num_steps * 2 // 3, rank=1, signal="STOP", kind="hung"),
        )
        self.transcript = Transcript()
        self.story: RunStory | None = None
        """Of the disturbed run."""
        self.undisturbed: RunStory | None = None
        self.run_id = ""
        """Of the disturbed run, as its record is named."""

    def run(self) -> int:
        """Everything; returns the exit code."""
        with tempfile.TemporaryDirectory(prefix="nbdist-demo-") as folder:
            try:
                self._play(folder)
            except (NbdistError, TimeoutError) as error:
                self._check("the demo ran to its end", f"{type(error).__name__}: {error}")
            if self.story is not None:
                self._keep(self.story, Path(folder))
        return self.transcript.close()

    def _play(self, folder: str) -> None:
        say = self.transcript
        say.heading(f"Starting {self.num_engines} engines")
        use_cpu_if_gpus_are_few(self.num_engines, say)
        with say.timed("started"):
            cluster = nbdist.start(self.num_engines, hang_timeout_s=HANG_TIMEOUT_S, record=folder)
        with cluster:
            say.say(_seats(cluster))
            for warning in cluster.warnings:
                say.say(f"note: {warning}")
            run = self._train(cluster)
            self._look_at(cluster, run)
            self._train_undisturbed(cluster)
            self._end(cluster)

    def _train(self, cluster: Cluster) -> Run:
        """The run in which ranks are killed and stopped."""
        self.transcript.heading(
            f"Training a byte-level GPT for {self.num_steps} steps; "
            + ", ".join(f"rank {f.rank} gets SIG{f.signal} at step {f.step}" for f in self.faults)
        )
        cluster.run(f"{MAKE_TRAINER}\ntrainer = make_trainer()")
        run = cluster.train("trainer", steps=self.num_steps)
        self.run_id = run.id
        try:
            self._follow(cluster, run, self.faults)
        finally:
            self.story = replace(run.story(), title=self._title)
        return run

    def _look_at(self, cluster: Cluster, run: Run) -> None:
        """What must be true after it."""
        say = self.transcript
        cluster.wait_healthy(timeout=_HEALTHY_TIMEOUT_S)
        self.story = replace(run.story(), title=self._title)  # incidents are closed by now
        say.heading("Incidents")
        say.say(incident_table(self.story.incidents))
        say.heading("Checks")
        expected = Expected(
            num_engines=self.num_engines,
            num_steps=self.num_steps,
            global_batch=GLOBAL_BATCH,
            loss_below=LOSS_BELOW if self.num_steps >= LOSS_STEPS else None,
        )
        for check in run_checks(self.story, expected, self.faults):
            say.check(check)
        size = cluster.world_size
        self._check("all seats are filled again", f"{size}", holds=size == self.num_engines)
        say.check(replicas_check(cluster.parameter_digest("trainer"), self.num_engines))

    def _train_undisturbed(self, cluster: Cluster) -> None:
        """The same from the same seed, and nothing happens to it."""
        say = self.transcript
        say.heading("The same run, undisturbed")
        cluster.run("undisturbed = make_trainer()")
        run = cluster.train("undisturbed", steps=self.num_steps)
        self._follow(cluster, run, ())
        self.undisturbed = replace(run.story(), title="the same run, undisturbed")
        num = len(self.undisturbed.incidents)
        self._check("nothing happened to it", f"{num} incidents", holds=not num)
        if self.story is not None:
            say.check(loss_check(self.story, self.undisturbed))

    def _follow(self, cluster: Cluster, run: Run, faults: tuple[Fault, ...]) -> None:
        """Show how far a run is until it is over; do to it what is due."""
        deadline = time.monotonic() + _RUN_TIMEOUT_S
        shown_at = 0.0
        while True:
            is_over = run.state in ("finished", "stopped", "failed")
            now = time.monotonic()
            history = run.history
            num_committed = len(history["step"])
            if is_over or now - shown_at >= _LIVE_S:
                shown_at = now
                line = progress(
                    history,
                    num_steps=self.num_steps,
                    tokens_per_sample=CONTEXT,
                    world_size=cluster.world_size,
                    generation=cluster.generation,
                    state=run.state,
                )
                self.transcript.live(str(line))
            if is_over:
                run = run.wait(timeout=1.0)  # raises what it failed of
                return
            if now > deadline:
                raise TimeoutError(f"{num_committed} steps after {_RUN_TIMEOUT_S:g} s")
            is_whole = cluster.world_size == self.num_engines
            if faults and num_committed >= faults[0].step and is_whole:
                self._strike(cluster, faults[0], num_committed)
                faults = faults[1:]
            time.sleep(_LOOK_S)

    def _strike(self, cluster: Cluster, fault: Fault, num_committed: int) -> None:
        pids = {seat.rank: seat.pid for seat in cluster.status()}
        self.transcript.say(
            f"SIG{fault.signal} to rank {fault.rank}, pid {pids.get(fault.rank)}, "
            f"after {num_committed} steps"
        )
        cluster.kill(fault.rank, signal=fault.signal)

    def _end(self, cluster: Cluster) -> None:
        """Shut down, and look for anything that is left."""
        say = self.transcript
        say.heading("Shutting down")
        path = RunDir(runtime_root() / cluster.id).path
        num = len(processes_by_rundir().get(path, []))
        # Were none found before, finding none afterwards would mean nothing.
        self._check("its processes are found", f"{num}", holds=num > self.num_engines)
        with say.timed("shut down"):
            cluster.shutdown()
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while (left := processes_by_rundir().get(path, [])) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        pids = ", ".join(f"pid {process.pid}" for process in left)
        self._check("no process of the cluster is left", pids or "none", holds=not left)
        self._check("its folder is gone", str(path), holds=not path.exists())

    def _keep(self, story: RunStory, folder: Path) -> None:
        """Write the report; put the record beside it."""
        say = self.transcript
        say.heading("Report and record")
        records = list(folder.glob(f"*-{self.run_id}.jsonl"))
        self._check("the run was recorded", f"{len(records)} file", holds=len(records) == 1)
        for path in records:
            shutil.copyfile(path, self.record)
            recorded = read(self.record).story()
            say.check(record_check(story, recorded))
            notes = [*story.notes, *recorded.notes]
            story = replace(story, series=recorded.series, tables=recorded.tables, notes=notes)
            say.say(f"record: {self.record.absolute()} (nbdist replay shows it)")
        told = {check.name for check in story_checks(story)}  # every report has these
        checks = [check for check in say.checks if check.name not in told]
        record = self.record if records else None
        path = write_report(
            self.report, story, checks=checks, reference=self.undisturbed, record=record
        )
        say.say(f"report: {path.absolute()} (opens offline)")

    @property
    def _title(self) -> str:
        return f"A byte-level GPT on {self.num_engines} engines, one killed, one stopped"

    def _check(self, name: str, detail: str, *, holds: bool = False) -> None:
        self.transcript.check(Check(name=name, detail=detail, holds=holds))


def use_cpu_if_gpus_are_few(num_engines: int, transcript: Transcript) -> None:
    """Hide the GPUs where there are some, but not one for each engine: then all use the CPU."""
    gpus = count_gpus()
    if 0 < gpus.count < num_engines:
        os.environ[VISIBLE_DEVICES] = ""
        transcript.say(f"{gpus.count} GPUs do not do for {num_engines} engines: all use the CPU")


def _seats(cluster: Cluster) -> str:
    header = ("rank", "slot", "pid", "device", "state", "generation")
    seats = cluster.status()
    return columns(
        header, [(s.rank, s.slot, s.pid, s.device, s.state, s.generation) for s in seats]
    )
