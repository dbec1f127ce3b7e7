"""The supervisor's one thread: feeds the state machine and carries out its instructions.

Everything that comes in (orders of kernels, events of agents, exits, the hub's notices, time) is
turned into a call of the machine here; everything that the machine wants done is done here. It
decides nothing itself. What the machine has come to is written to the ledger before it is done.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import zmq

from nbdist.processes import end_processes, spawn
from nbdist.protocol import events as ev
from nbdist.protocol import forks, wire
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import saves as sv
from nbdist.rundir import Owner, RunDir, log_mark
from nbdist.supervisor import instructions as do
from nbdist.supervisor.changes import Changes
from nbdist.supervisor.collector import Collector
from nbdist.supervisor.desk import Desk
from nbdist.supervisor.door import Door
from nbdist.supervisor.feeds import Feeds
from nbdist.supervisor.hub import HubLink
from nbdist.supervisor.journal import Journal
from nbdist.supervisor.launch import Zygote
from nbdist.supervisor.ledger import Ledger, StepLedger
from nbdist.supervisor.packing import Sources
from nbdist.supervisor.scribe import Scribe
from nbdist.supervisor.series import Series
from nbdist.supervisor.starter import Starter
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import last_words, view_of
from nbdist.supervisor.watchdog import Hung, Watchdog, observe

if TYPE_CHECKING:
    from nbdist.protocol.ids import Slot

TICK_MS = 50
LEASE_PERIOD_S = 1.0
FAREWELL_S = 1.0
"""How long engines have to end by themselves at a shutdown."""

_FROM_AGENTS = ev.AgentEvent | rn.RunEvent | sv.PartFailed
LOG_END_BYTES = 16_384
"""Of a dead engine's log this much is looked at."""

log = logging.getLogger(__name__)


class Loop:
    """One cluster's supervisor."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._config, self._owner, keys = rundir.read()
        self._context: zmq.Context[Any] = zmq.Context()
        self._door = Door(self._context, rundir, keys)
        self._machine = Machine(self._config)
        self._journal = Journal(rundir.file("journal"), self._config.replay_limit_s)
        self._ledger = Ledger(rundir.file("ledger"))
        self._steps = StepLedger(rundir)
        self._watchdog = Watchdog(self._config.hang_timeout_s)
        self._collector = Collector(Series(self._config.telemetry_max_mb))
        sources = Sources(rundir.cluster_id, self._machine, self._collector, Changes())
        self._feeds = Feeds(sources, self._door.send)
        self._desk = Desk(
            self._machine,
            self._journal,
            self._feeds,
            send=self._door.send,
            signal_engine=self._signal,
        )
        self._scribe = Scribe(self._config.record, rundir.cluster_id, self._collector)
        self._zygote = Zygote(rundir)
        self._starter = Starter(rundir, self._config, self._machine, self._zygote)
        self._hub: HubLink | None = None
        self._agents: dict[Slot, bytes] = {}
        self._form_later: do.Form | None = None
        self._is_ending = False
        self._controller_end = ""
        """What became of the controller, in words."""
        self._next_lease = 0.0
        self._shown: od.WorldView | None = None

    # ---- life

    def run(self) -> None:
        """Serve until shut down, or until the kernel is gone and the cluster is not to be kept."""
        self._rundir.renew_lease()
        self._take_up_or_start(time.monotonic())
        while not self._is_ending and not self._desk.is_shutdown_ordered:
            self._serve(self._poll(), time.monotonic())
        self._end()

    def _take_up_or_start(self, now: float) -> None:
        last = self._ledger.last()
        if last is None:
            controller = spawn(self._rundir, "nbdist.supervisor.controller", "controller")
            self._rundir.write_owner("controller", Owner.of(controller.pid))
            self._zygote.start()
            self._machine.start(now)
        else:
            log.warning("taking up generation %s from the ledger", last.membership.generation)
            self._machine.take_up(last, self._journal.length, now, self._steps.read)

    def _poll(self) -> dict[Any, int]:
        poller = zmq.Poller()
        poller.register(self._door.socket, zmq.POLLIN)
        poller.register(self._door.knocking, zmq.POLLIN)
        if self._zygote.fileno() >= 0:
            poller.register(self._zygote.fileno(), zmq.POLLIN)
        if self._hub is not None:
            poller.register(self._hub.notices, zmq.POLLIN)
        return dict(poller.poll(TICK_MS))

    def _serve(self, ready: dict[Any, int], now: float) -> None:
        if self._door.knocking in ready:
            self._door.let_in()
        if self._door.socket in ready:
            self._receive(now)
        if self._zygote.fileno() in ready:
            self._hear_zygote(now)
        if self._hub is not None and self._hub.notices in ready:
            self._hear_hub()
        for exited in self._zygote.own_exits():
            self._child_exited(exited, now)
        self._pass_time(now)
        self._carry_out()
        if self._shown is not None:
            self._scribe.look(self._machine.runs, self._shown, now)
            self._feeds.look(self._shown, now)
        self._desk.settle()

    # ---- what comes in

    def _receive(self, now: float) -> None:
        for identity, data in self._door.messages():
            try:
                if identity.startswith(b"kernel"):
                    self._desk.take(identity, wire.decode(data, od.Request), now)
                else:
                    self._agent_says(identity, wire.decode(data, _FROM_AGENTS), now)
            except wire.WireError as error:
                log.warning("from %r: %s", identity, error)
            self._carry_out()

    def _agent_says(self, identity: bytes, event: ev.Event, now: float) -> None:
        match event:
            case ev.Beat():
                self._beat(identity, event, now)
            case ev.Telemetry() if event.slot in self._machine.seats:
                self._collector.take(event, self._machine.generation)
            case ev.EngineHello():
                self._agents[event.slot] = identity
                self._watchdog.beat(event.pid, now)
                self._machine.hello(event, now)
            case ev.ReplayBegins():
                self._machine.replay_begins(event)
            case ev.JournalReplayed():
                self._machine.replayed(event, now)
            case rn.StepsCommitted() | rn.RunBound() | rn.RunEntered() | rn.RunHeld():
                self._run_says(event, now)
            case rn.StepBroken() | rn.RunEvaluated() | rn.RunRaised() | rn.RunLeft():
                self._run_says(event, now)
            case ev.NamesFingerprinted() | ev.NamesOffered() | ev.NamesReceived():
                self._machine.handed_over(event, now)
            case _:
                self._group_says(event, now)

    def _group_says(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.GroupBroken():
                self._machine.broken(event, now)
            case ev.GroupFormed():
                self._machine.formed(event, now)
            case ev.GroupFormFailed():
                log.warning("slot %s could not form: %s", event.slot, event.error)
                self._machine.form_failed(event, now)
            case ev.CollectiveFailed():
                log.info("slot %s: a collective failed: %s", event.slot, event.error)
                self._machine.collective_failed(event, now)
            case ev.CellFailedOnRank():
                self._machine.cell_failed(event, now)
            case sv.PartFailed():
                self._desk.saves.failed(event)

    def _run_says(self, event: rn.RunEvent, now: float) -> None:
        if isinstance(event, rn.StepsCommitted):
            self._steps.append(event.run, self._machine.committed(event, now))
        else:
            self._machine.run_says(event, now)

    def _beat(self, identity: bytes, event: ev.Beat, now: float) -> None:
        seat = self._machine.seats.get(event.slot)
        if seat is not None and seat.pid == event.pid:
            self._watchdog.beat(event.pid, now)
            self._machine.beat(event, now)
            self._door.send(identity, od.AcknowledgeBeat(number=event.number))

    def _hear_zygote(self, now: float) -> None:
        messages = self._zygote.read()
        if messages is None:
            log.warning("the zygote is gone; another one is started")
            self._zygote.start()
            return
        for message in messages:
            match message:
                case forks.Ready():
                    self._machine.notes = self._zygote.notes
                    self._machine.adopt({c.pid: c.slot for c in message.children})
                    self._starter.begin_again()
                case forks.Forked(slot=slot, pid=pid):
                    self._machine.forked(ev.EngineForked(slot=slot, pid=pid))
                case forks.Exited():
                    self._child_exited(message, now)
        self._carry_out()

    def _child_exited(self, message: forks.Exited, now: float) -> None:
        seat = self._machine.seats.get(message.slot)
        is_hung = seat is not None and seat.killed_why.startswith("hung")
        event = ev.EngineExited(
            slot=message.slot,
            pid=message.pid,
            signal=message.signal,
            exit_code=message.exit_code,
            detector="beat" if is_hung else "zygote",
            at=message.at,
        )
        self._engine_gone(event, now)

    def _engine_gone(self, event: ev.EngineExited, now: float) -> None:
        seat = self._machine.seats.get(event.slot)
        is_seated = seat is not None and seat.pid == event.pid
        if seat is not None and is_seated and seat.engine_id is not None and self._hub is not None:
            self._hub.unregister(seat.engine_id)
        self._watchdog.forget(event.pid)
        self._desk.exited(event.pid)
        self._machine.exited(event, now)

    def _hear_hub(self) -> None:
        engine_id = self._hub.unregistered() if self._hub is not None else None
        for seat in self._machine.seats.values():
            # Of an engine that died the zygote tells more. One that lives on is news, and of no
            # use.
            is_dropped = engine_id is not None and seat.engine_id == engine_id
            if is_dropped and seat.pid is not None and observe(seat.pid) is not None:
                self._machine.kill(seat, "ipyparallel dropped its registration")

    # ---- time

    def _pass_time(self, now: float) -> None:
        if now >= self._next_lease:
            self._next_lease = now + LEASE_PERIOD_S
            self._rundir.renew_lease()
            self._look_at_others(now)
        if self._hub is None and not self._controller_end:
            self._hub = HubLink.open(self._context, self._rundir)
        if not self._zygote.is_ready:
            self._zygote.connect()
            self._machine.cannot_form(now)
        elif self._hub is not None:
            self._starter.start(now)
            self._form_now()
        for found in self._watchdog.look(list(self._machine.seats.values()), now):
            if isinstance(found, Hung):
                found.seat.ordered_at = found.since
                self._machine.kill(found.seat, found.how)
            else:
                self._engine_gone(found, now)
        self._machine.tick(now)

    def _look_at_others(self, now: float) -> None:
        if not self._config.keep and not self._owner.is_alive():
            log.warning("the kernel (pid %s) is gone", self._owner.pid)
            self._is_ending = True
        if self._controller_end:
            return
        controller = self._rundir.read_owner("controller")
        self._controller_end = self._watchdog.what_ails(controller, now)
        if self._controller_end:
            self._machine.fail(f"the ipyparallel controller {self._controller_end}", now)

    # ---- what is to be done

    def _carry_out(self) -> None:
        while instructions := self._machine.take():
            self._show_world()
            for instruction in instructions:
                self._do(instruction)
        self._show_world()

    def _do(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.StartEngine(slot):
                self._starter.want(slot)
            case do.KillEngine(slot, pid, why):
                log.warning("slot %s (pid %s) is killed: %s", slot, pid, why)
                self._signal(pid, signal.SIGKILL)
            case do.Notify(notice):
                if isinstance(notice, od.EngineLost):
                    lines = self._last_lines(notice.slot, notice.pid)
                    notice = msgspec.structs.replace(notice, last_lines=lines)
                self._desk.tell_kernels(notice)
            case do.ForgetCell(cell):
                self._journal.forget(cell)
            case do.AnswerRun(run, begun):
                self._desk.begun(run, begun)
            case do.AdmitCell(cell, membership, ranks, between):
                answer = od.CellAdmitted(membership=membership, ranks=ranks, between=between)
                answer = msgspec.structs.replace(answer, over=self._machine.runs.over)
                self._desk.admitted(cell, answer)
            case do.RefuseCell(cell, kind, message):
                self._desk.admitted(cell, od.Refused(kind=kind, message=message))
            case do.Tell() | do.Form() | do.Replay():
                self._tell(instruction)

    def _tell(self, instruction: do.Tell | do.Form | do.Replay) -> None:
        match instruction:
            case do.Tell(slot, order):
                self._order(slot, order)
            case do.Form() if not self._zygote.is_ready:
                self._form_later = instruction  # the zygote says where the store is
            case do.Form(membership, run, others_come):
                host, port = self._zygote.store_address
                form = partial(
                    od.FormGroup, membership=membership, run=run, others_come=others_come
                )
                for slot in membership.slots:
                    self._order(slot, form(store_host=host, store_port=port))
            case do.Replay(slot, since, until, rank, world_size):
                entries = self._journal.since(since, slot)
                replay = partial(od.ReplayJournal, entries=entries, until=until)
                self._order(slot, replay(rank=rank, world_size=world_size))

    def _form_now(self) -> None:
        """Carry out a formation that had to wait for the zygote, if it is still wanted."""
        later, self._form_later = self._form_later, None
        if later is not None and later.membership == self._machine.membership:
            self._tell(later)

    def _order(self, slot: Slot, order: od.AgentOrder) -> None:
        if identity := self._agents.get(slot):
            self._door.send(identity, order)

    def _signal(self, pid: int, number: int) -> None:
        """Directly, since the parent may be stopped; it holds the pid until it reports the end."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            log.info("signal %s to %s: it has ended", number, pid)

    def _show_world(self) -> None:
        view = view_of(self._machine)
        if view != self._shown:
            if self._shown is None or view.phase != self._shown.phase:
                generation = view.membership.generation
                log.info("%s, generation %s: %s", view.phase, generation, view.reason or "whole")
            self._shown = view
            self._ledger.append(view)
            self._desk.tell_kernels(view)

    def _last_lines(self, slot: Slot, pid: int) -> tuple[str, ...]:
        try:
            with self._rundir.log(f"slot-{slot}").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_END_BYTES))
                text = file.read().decode(errors="replace")
                return last_words(text.rpartition(f"{log_mark(pid)}\n")[2])
        except OSError:
            return ()

    # ---- the end

    def _end(self) -> None:
        """End everything that this cluster started; bounded whatever the engines do."""
        self._scribe.close()
        for slot in self._agents:
            self._order(slot, od.EndEngine())
        deadline, seats = time.monotonic() + FAREWELL_S, self._machine.seats.values()
        while time.monotonic() < deadline and any(s.pid and observe(s.pid) for s in seats):
            self._zygote.read()
            time.sleep(0.02)
        end_processes(self._rundir.path, timeout_s=5.0)
        psutil.wait_procs(psutil.Process().children(), timeout=1.0)  # zombies are left to nobody
        if self._hub is not None:
            self._hub.close()  # what waits for the controller is not waited for: it is gone
        self._desk.say_goodbye()
        self._context.destroy(linger=500)
        self._rundir.remove()
