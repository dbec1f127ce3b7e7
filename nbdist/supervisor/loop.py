"""The supervisor's one thread: feeds the state machine and carries out its instructions.

Everything that comes in (orders of the kernel, events of agents, exits, the hub's notices, time) is turned into a call of
the machine here; everything that the machine wants done is done here. It decides nothing itself.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import msgspec
import psutil
import zmq
from zmq.auth.base import Authenticator

from nbdist.protocol import events as ev
from nbdist.protocol import forks, wire
from nbdist.protocol import orders as od
from nbdist.protocol.ids import Slot
from nbdist.processes import RUNDIR_VARIABLE, end_processes, spawn
from nbdist.rundir import RunDir
from nbdist.supervisor import instructions as do
from nbdist.supervisor.desk import Desk
from nbdist.supervisor.devices import engine_environment, offered_slots
from nbdist.supervisor.hang import HangWatch, Observation
from nbdist.supervisor.hub import HubLink
from nbdist.supervisor.journal import Journal
from nbdist.supervisor.launch import Zygote
from nbdist.supervisor.ledger import Ledger
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import view_of

TICK_MS = 50
LEASE_PERIOD_S = 1.0
LOOK_PERIOD_S = 0.25
"""How often processes are looked at that send no beats, or that no parent of ours watches."""

log = logging.getLogger(__name__)


class Loop:
    """One cluster's supervisor."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.config, self.owner, self.keys = rundir.read()
        self.machine = Machine(self.config)
        self.journal = Journal(rundir.file("journal"), self.config.replay_limit_s)
        self.ledger = Ledger(rundir.file("ledger"))
        self.desk = Desk(self)
        self.zygote = Zygote(rundir)
        self.hub: HubLink | None = None
        self.controller: Any = None
        self.agents: dict[Slot, bytes] = {}
        self.watches: dict[int, HangWatch] = {}
        self.missing_since: dict[int, float] = {}
        self.to_start: list[Slot] = []
        self.is_ending = False
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.authenticator = Authenticator(self.context, encoding="utf-8", log=log)
        self._next_lease = self._next_look = 0.0
        self._shown: od.WorldView | None = None

    # ---- life

    def run(self) -> None:
        """Serve until shut down, or until the kernel is gone and the cluster is not to be kept."""
        self.rundir.renew_lease()
        self._bind()
        self._take_up_or_start(time.monotonic())
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        poller.register(self.authenticator.zap_socket, zmq.POLLIN)
        while not self.is_ending:
            extra = [
                f for f in (self.zygote.fileno(), self.hub.notices if self.hub else -1) if f != -1
            ]
            for source in extra:
                poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(TICK_MS))
            for source in extra:
                poller.unregister(source)
            self._serve(ready, time.monotonic())
        self._end()

    def _bind(self) -> None:
        self.authenticator.start()
        client = self.keys.client_public.encode()
        self.authenticator.configure_curve_callback("nbdist", credentials_provider=_OnlyKey(client))
        self.router.curve_server = True
        self.router.curve_secretkey = self.keys.server_secret.encode()
        self.router.curve_publickey = self.keys.server_public.encode()
        self.router.zap_domain = b"nbdist"
        self.router.router_handover = True
        self.router.linger = 0
        old_mask = os.umask(0o177)
        self.router.bind(self.rundir.endpoint)
        os.umask(old_mask)

    def _take_up_or_start(self, now: float) -> None:
        last = self.ledger.last()
        if last is None:
            self.controller = spawn(self.rundir, "nbdist.supervisor.controller", "controller")
            self.zygote.start()
            self.machine.start(now)
        else:
            log.warning("taking up generation %s from the ledger", last.membership.generation)
            self.machine.journal_length = self.journal.length
            self.machine.take_up(last, now)

    def _serve(self, ready: dict[Any, int], now: float) -> None:
        if self.authenticator.zap_socket in ready:
            self._run_authenticator()
        if self.router in ready:
            self._receive(now)
        if self.zygote.fileno() in ready:
            self._hear_zygote(now)
        if self.hub and self.hub.notices in ready:
            self._hear_hub(now)
        for exited in self.zygote.own_exits():
            self._exited(exited, now)
        self._pass_time(now)
        self._carry_out(now)
        self._show_world()
        self.desk.settle()

    def _run_authenticator(self) -> None:
        message = self.authenticator.zap_socket.recv_multipart()
        coroutine = self.authenticator.handle_zap_message(message)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise RuntimeError("the authenticator waited for something")

    # ---- what comes in

    def _receive(self, now: float) -> None:
        for _ in range(256):
            try:
                identity, data = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            try:
                if identity.startswith(b"kernel"):
                    self.desk.take(identity, wire.decode(data, od.Request), now)
                else:
                    self._agent_says(identity, wire.decode(data, ev.AgentEvent), now)
            except wire.WireError as error:
                log.warning("from %r: %s", identity, error)
            self._carry_out(now)

    def _agent_says(self, identity: bytes, event: Any, now: float) -> None:
        machine = self.machine
        match event:
            case ev.Beat():
                seat = machine.seats.get(event.slot)
                if seat is None or seat.pid != event.pid:
                    return
                self._watch(event.pid, now).beat(now)
                machine.beat(event)
                self._send(identity, od.AcknowledgeBeat(number=event.number))
            case ev.EngineHello():
                self.agents[event.slot] = identity
                self._watch(event.pid, now).beat(now)
                machine.hello(event, now)
            case ev.JournalReplayed():
                machine.replayed(event, now)
            case ev.GroupBroken():
                machine.broken(event, now)
            case ev.GroupFormed():
                machine.formed(event, now)
            case ev.GroupFormFailed():
                log.warning("slot %s could not form: %s", event.slot, event.error)
                machine.form_failed(event, now)
            case ev.NamesFingerprinted():
                machine.fingerprinted(event, now)
            case ev.NamesOffered():
                machine.offered(event)
            case ev.NamesReceived():
                machine.received(event, now)
            case ev.CollectiveFailed():
                self._look_at_processes(now)
                machine.collective_failed(event, now)
            case ev.CellFailedOnRank():
                machine.gate.failed_on(event.cell, event.slot, now)

    def _hear_zygote(self, now: float) -> None:
        messages = self.zygote.read()
        if messages is None:
            log.warning("the zygote is gone; another one is started")
            self.zygote.start()
            return
        for message in messages:
            match message:
                case forks.Ready():
                    self.machine.adopt({c.pid: c.slot for c in message.children})
                    seats = self.machine.seats
                    self.to_start = [
                        s for s in self.to_start if s in seats and seats[s].pid is None
                    ]
                    if message.cannot_fork:
                        log.warning("engines are started without fork: %s", message.cannot_fork)
                case forks.Forked():
                    self._forked(message)
                case forks.Exited():
                    self._exited(message, now)
        self._carry_out(now)

    def _forked(self, message: forks.Forked) -> None:
        self.machine.forked(ev.EngineForked(slot=message.slot, pid=message.pid))

    def _exited(self, message: forks.Exited, now: float) -> None:
        seat = self.machine.seats.get(message.slot)
        hung = seat is not None and seat.killed_why.startswith("hung")
        event = ev.EngineExited(
            slot=message.slot,
            pid=message.pid,
            signal=message.signal,
            exit_code=message.exit_code,
            detector="beat" if hung else "zygote",
            at=message.at,
        )
        self._engine_gone(event, now)

    def _engine_gone(self, event: ev.EngineExited, now: float) -> None:
        seat = self.machine.seats.get(event.slot)
        if seat is not None and seat.pid == event.pid and seat.engine_id is not None and self.hub:
            self.hub.unregister(seat.engine_id)
        self.watches.pop(event.pid, None)
        self.missing_since.pop(event.pid, None)
        self.desk.exited(event.pid)
        self.machine.exited(event, now)

    def _hear_hub(self, now: float) -> None:
        engine_id = self.hub.unregistered() if self.hub else None
        for seat in self.machine.seats.values():
            if engine_id is not None and seat.engine_id == engine_id and seat.pid is not None:
                # The zygote's report, which knows the signal, is on its way; only a process that lives on is news.
                if psutil.pid_exists(seat.pid):
                    self.machine.kill(seat, "ipyparallel dropped its registration")
        self._carry_out(now)

    # ---- time

    def _pass_time(self, now: float) -> None:
        if now >= self._next_lease:
            self.rundir.renew_lease()
            self._next_lease = now + LEASE_PERIOD_S
            if not self.owner.is_alive() and not self.config.keep:
                log.warning("the kernel (pid %s) is gone", self.owner.pid)
                self.is_ending = True
            if self.controller is not None and self.controller.poll() is not None:
                self.machine.fail(
                    f"the ipyparallel controller ended ({self.controller.returncode})", now
                )
                self.controller = None
        if self.hub is None and self.rundir.connection_file("client").exists():
            self._open_hub()
        if not self.zygote.is_ready:
            self.zygote.connect()
        elif self.hub:
            self._start_waiting()
        if now >= self._next_look:
            self._next_look = now + LOOK_PERIOD_S
            self._look_at_processes(now)
        self.machine.tick(now)

    def _open_hub(self) -> None:
        try:
            self.hub = HubLink(self.context, self.rundir)
        except (ValueError, KeyError):
            return  # the controller is in the middle of writing the file

    def _start_waiting(self) -> None:
        waiting, self.to_start = self.to_start, []
        for slot in waiting:
            devices = offered_slots(max(self.machine.size, slot + 1), self.config.devices)
            threads = self.config.threads_per_engine or max(
                1, (os.cpu_count() or 1) // self.machine.size
            )
            env = engine_environment(devices[slot], threads) | {
                RUNDIR_VARIABLE: str(self.rundir.path)
            }
            if (forked := self.zygote.start_engine(slot, env, threads)) is not None:
                self._forked(forked)

    def _look_at_processes(self, now: float) -> None:
        for seat in list(self.machine.seats.values()):
            pid = seat.pid
            if pid is None:
                continue
            seen = _observe(pid)
            if seen is None:
                since = self.missing_since.setdefault(pid, now)
                if now - since > 2 * LOOK_PERIOD_S:
                    event = ev.EngineExited(
                        slot=seat.slot,
                        pid=pid,
                        signal=None,
                        exit_code=None,
                        detector="pidfd",
                        at=since,
                    )
                    self._engine_gone(event, now)
            elif (
                (watch := self.watches.get(pid))
                and watch.is_silent(now)
                and watch.is_hung(seen, now)
            ):
                state = "stopped" if seen.is_stopped else "without any progress"
                seat.ordered_at = watch.last_progress
                self.machine.kill(seat, f"hung: {state} for {self.config.hang_timeout_s:g} s")

    def _watch(self, pid: int, now: float) -> HangWatch:
        if pid not in self.watches:
            self.watches[pid] = HangWatch(self.config.hang_timeout_s, now, now)
        return self.watches[pid]

    # ---- what is to be done

    def _carry_out(self, now: float) -> None:
        while instructions := self.machine.take():
            for instruction in instructions:
                self._carry_out_one(instruction, now)

    def _carry_out_one(self, instruction: do.Instruction, now: float) -> None:
        match instruction:
            case do.StartEngine(slot):
                self.to_start.append(slot)
            case do.KillEngine(slot, pid, why):
                log.warning("slot %s (pid %s) is killed: %s", slot, pid, why)
                self.signal(pid, signal.SIGKILL)
            case do.Tell(slot, order):
                self.tell(slot, order)
            case do.Form(membership):
                order = od.FormGroup(
                    membership=membership,
                    store_host=self.desk.store_host,
                    store_port=self.zygote.store_port,
                )
                for slot in membership.slots:
                    self.tell(slot, order)
            case do.Replay(slot, since, until, rank, world_size):
                order = od.ReplayJournal(
                    entries=self.journal.since(since, slot),
                    until=until,
                    rank=rank,
                    world_size=world_size,
                )
                self.tell(slot, order)
            case do.AdmitCell(cell, membership, ranks):
                self.desk.admitted(cell, od.CellAdmitted(membership=membership, ranks=ranks))
            case do.RefuseCell(cell, kind, message):
                self.desk.admitted(cell, od.Refused(kind=kind, message=message))
            case do.Notify(notice):
                if isinstance(notice, od.EngineLost):
                    notice = msgspec.structs.replace(
                        notice, last_lines=self._last_lines(notice.slot)
                    )
                self.desk.tell_kernels(notice)

    def signal(self, pid: int, number: int) -> None:
        """Signal an engine, through its parent where that is known."""
        try:
            if self.zygote.is_ready or pid in self.zygote.own:
                self.zygote.signal(pid, number)
            else:
                os.kill(pid, number)
        except (ProcessLookupError, ConnectionError) as error:
            log.warning("signal %s to %s: %s", number, pid, error)

    def tell(self, slot: Slot, order: od.AgentOrder) -> None:
        """Send an order to the agent on a slot, if there is one."""
        if identity := self.agents.get(slot):
            self._send(identity, order)

    def _send(self, identity: bytes, message: Any) -> None:
        self.router.send_multipart([identity, wire.encode(message)])

    def _show_world(self) -> None:
        view = view_of(self.machine)
        if view != self._shown:
            self._shown = view
            self.ledger.append(view)
            self.desk.tell_kernels(view)

    def _last_lines(self, slot: Slot, num_lines: int = 8) -> tuple[str, ...]:
        try:
            with self.rundir.log(f"slot-{slot}").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                return tuple(file.read().decode(errors="replace").splitlines()[-num_lines:])
        except OSError:
            return ()

    # ---- the end

    def _end(self) -> None:
        """End everything that this cluster started; bounded whatever the engines do."""
        for slot in self.agents:
            self.tell(slot, od.EndEngine())
        deadline = time.monotonic() + 1.0
        engines = [s.pid for s in self.machine.seats.values() if s.pid is not None]
        while time.monotonic() < deadline and any(_observe(pid) for pid in engines):
            self.zygote.read()
            time.sleep(0.02)
        end_processes(self.rundir.path, timeout_s=5.0)
        if self.controller is not None:
            self.controller.wait(5)
        self.desk.say_goodbye()
        self.context.destroy(linger=500)
        self.rundir.remove()


class _OnlyKey:
    """Lets in whoever proves to hold one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - zmq's interface
        """Whether a client's public key (Z85) may connect."""
        return key == self._key


def _observe(pid: int) -> Observation | None:
    """Look at a process; None where it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE:
            return None
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return Observation(
        is_stopped=status == psutil.STATUS_STOPPED,
        is_traced=status == psutil.STATUS_TRACING_STOP,
        cpu_s=times.user + times.system,
    )
