"""The lifecycle machine under random events: a few things hold whatever happens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from nbdist.config import ClusterConfig
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.story import ROWS
from nbdist.supervisor import instructions as do
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import SeatState
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import view_of

MAX_SEATS = 6
NAMES = {"x": "int:1", "model": "module:1"}
THE_TRAINER = "trainer"
"""Name of the variable that holds the trainer."""


@dataclass(eq=False)
class Port:
    """A run on an engine, as `engine.port` has it."""

    spec: rn.RunSpec
    said: ev.Event | None = None
    go_until: int | None = None
    number: int = 0
    is_over: bool = False
    wants_hold: bool = False
    settings: list[float] = field(default_factory=list)
    vote: tuple[int, int] | None = None
    """Generation and step for which the main thread stands in a collective."""
    since: float = 0.0
    rows: list[tuple] = field(default_factory=list)
    recent: list[tuple] = field(default_factory=list)

    def stand(self):
        self.go_until, self.wants_hold, self.vote = None, False, None


@dataclass(eq=False)
class Engine:
    """A process as the supervisor meets it: it takes orders one after the other, and reports."""

    slot: int
    pid: int
    is_alive: bool = True
    group: int = 0
    replayed: int = 0
    cell: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    has_trainer: bool = True
    has_stepped: bool = False
    steps: tuple[int, ...] = ()
    """The trainer's state: the generation that committed each step."""
    lr: float = 0.1
    port: Port | None = None
    over: rn.RunSpec | None = None
    """A run that ended in mid-step, whose trainer is to be made even in the next group."""
    formed_under: rn.RunSpec | None = None
    num_loops: dict[str, int] = field(default_factory=dict)
    """Cell -> own loops that it has come to."""
    inbox: deque[od.AgentOrder] = field(default_factory=deque)
    outbox: deque[ev.Event] = field(default_factory=deque)

    @property
    def hello(self):
        return ev.EngineHello(
            slot=self.slot,
            pid=self.pid,
            engine_id=self.pid,
            host="here",
            generation=self.group,
            device="cpu",
            replayed=self.replayed,
        )

    @property
    def trains(self):
        """Its main thread is in a run that is not over."""
        return self.is_alive and self.port is not None and not self.port.is_over

    def is_over(self, run):
        """Whether this is the run that ended in mid-step here."""
        return self.over is not None and self.over.run == run

    @property
    def can_obey(self):
        """Its main thread takes orders, or is freed by one."""
        is_blocked = self.trains and self.port.vote is not None
        is_freed = any(isinstance(order, od.BreakGroup) for order in self.inbox)
        return bool(self.inbox) and (is_freed or not is_blocked)

    @property
    def can_enter(self):
        """Its cell may come to a training loop now."""
        return self.is_alive and self.cell is not None and not self.trains and self.group > 0

    @property
    def can_step(self):
        """Its loop has something to do."""
        return self.trains and (self.port.go_until is not None or bool(self.port.settings))

    def say(self, event):
        """Report it, to a supervisor that takes over too."""
        self.port.said = event
        self.outbox.append(event)

    def flush(self):
        """Report committed steps."""
        if self.port is not None and self.port.rows:
            self.report(self.port.rows)
            self.port.recent += self.port.rows
            self.port.rows = []

    def report(self, rows):
        data = np.array(rows, ROWS).tobytes()
        event = rn.StepsCommitted(slot=self.slot, run=self.port.spec.run, rows=data)
        self.outbox.append(event)

    def greet(self):
        """Another supervisor is there."""
        self.outbox.append(self.hello)
        if self.port is not None:
            if self.port.said is not None:
                self.outbox.append(self.port.said)
            if self.port.recent:
                self.report(self.port.recent)


class Life:
    """One cluster: engines that come and go, a kernel that runs cells, roads with delays.

    What an engine says arrives in its own order, and so does what the zygote says; the two roads
    know nothing of one another. Methods named in `EVENTS` are what may happen.
    """

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        size = rng.randint(1 + seed % 2, 4)
        self.config = ClusterConfig(
            num_engines=size,
            policy=rng.choice(["refill", "refill", "shrink"]),
            min_world=rng.choice([1, 1, min(size, 2)]),
            max_restarts=rng.randint(1, 4),
        )
        self.machine = Machine(self.config)
        self.now, self.next_pid, self.journal = 100.0, 1, 0
        self.engines, self.to_start, self.zygote = {}, deque(), deque()
        self.reported_dead, self.told_to_end = set(), set()
        self.last_generation, self.formed_with, self.was_taken_over = 0, set(), False
        self.asked, self.withdrawn, self.open_cells, self.answers = [], set(), set(), {}
        self.is_attached = True
        self.members, self.votes, self.results, self.packed = {}, {}, {}, {}
        self.told, self.plans, self.training = {}, {}, set()
        self.begun, self.ledger, self.last_run, self.num_runs = {}, {}, None, 0
        self.machine.start(self.now)
        self.carry_out()
        while seed % 2 and self.step():  # a life of runs begins with a world that is whole
            pass

    num_waits = 0

    def happen(self, event, seed):
        """Something happens, if it can; what is left open about it follows from the seed."""
        self.random.seed(seed)
        method, engines = EVENTS[event]
        if engines is None:
            method(self)
        elif fit := [e for e in self.engines.values() if engines(e)]:
            method(self, self.random.choice(fit))
        self.check()

    def carry_out(self):
        """Do what the machine wants, and check each instruction."""
        instructions = self.machine.take()
        assert len(instructions) < 100
        for instruction in instructions:
            match instruction:
                case do.StartEngine(slot):
                    self.to_start.append(slot)
                case do.KillEngine(_, pid, why):
                    assert why
                    if pid in self.engines:
                        self.end(self.engines[pid], "SIGKILL")
                case do.AdmitCell() | do.RefuseCell():
                    self.answer(instruction)
                case do.AnswerRun(run, answer):
                    assert self.begun.pop(run, None) is not None
                    if isinstance(answer, rn.RunBegun):
                        self.last_run = run
                case do.Notify(notice):
                    self.check_notice(notice)
                case _:
                    self.send(instruction)

    def send(self, instruction):
        match instruction:
            case do.Tell(slot, order):
                self.tell(slot, order)
            case do.Form(membership, run, _):
                self.check_group(membership)
                form = od.FormGroup(membership=membership, store_host="", store_port=0, run=run)
                for slot in membership.slots:
                    self.tell(slot, form)
            case do.Replay(slot, since, until, rank, world_size):
                assert 0 <= since <= until == self.journal
                assert 0 <= rank < world_size
                order = od.ReplayJournal(entries=(), until=until, rank=rank, world_size=world_size)
                self.tell(slot, order)

    def check_group(self, membership):
        assert membership.generation > self.last_generation
        self.last_generation = membership.generation
        self.members[membership.generation] = {m.pid for m in membership.members}
        pids = [m.pid for m in membership.members]
        assert len(set(pids)) == len(pids) >= 1
        assert not set(pids) & (self.reported_dead | self.told_to_end)
        for member in membership.members:
            engine = self.engines[member.pid]
            assert engine.slot == member.slot
            assert engine.group == 0 or not engine.is_alive  # one group at a time
            if self.machine.was_running and member.pid not in self.formed_with:
                assert engine.replayed == self.journal
        self.formed_with |= set(pids)
        beyond = set(membership.slots) - set(range(self.machine.size))
        run = self.machine.runs.present
        assert not beyond or (run is not None and run.will_go)  # they leave one after the other

    def check_notice(self, notice):
        if isinstance(notice, od.RanksReleased):
            assert notice.generation == self.last_generation
            if notice.reason.startswith("the world changes"):
                assert not self.open_cells - self.training or not self.is_attached
                self.check_stand()
        elif isinstance(notice, rn.CellTrains):
            (self.training.add if notice.is_training else self.training.discard)(notice.cell)
        elif isinstance(notice, rn.SendCellTo):
            engine = self.engines[notice.pid]
            assert engine.replayed == self.journal
            if engine.is_alive and notice.cell in self.open_cells:
                engine.cell = notice.cell
        else:
            assert notice.pid in self.reported_dead

    def answer(self, instruction):
        cell = instruction.cell
        assert cell not in self.answers
        self.answers[cell] = instruction
        if isinstance(instruction, do.RefuseCell):
            assert instruction.kind in ("TargetError", "RecoveryFailed")
            return
        if cell in self.withdrawn:
            self.machine.end_cell(cell, self.journal, self.now)
            return
        assert self.machine.phase is Phase.RUNNING
        assert instruction.membership == self.machine.membership
        assert instruction.membership.generation == self.last_generation
        assert set(instruction.ranks) <= set(range(instruction.membership.world_size))
        run = self.machine.runs.present
        assert run is None or run.spec.cell is None
        if run is not None and run.state != "binding":
            num = self.check_stand()
            if num is not None:
                assert instruction.between == ((num - 1, num) if num else None)
        else:
            assert instruction.between is None
        earlier = self.asked[: self.asked.index(cell)]
        assert all(c in self.answers or c in self.withdrawn for c in earlier)  # in order
        self.open_cells.add(cell)
        for rank in instruction.ranks:
            engine = self.engines[instruction.membership.members[rank].pid]
            assert engine.group == self.last_generation or not engine.is_alive
            engine.cell = cell

    def tell(self, slot, order):
        if isinstance(order, rn.GoOn):
            self.check_go_on(order)
            self.told[slot] = order
        seat = self.machine.seats.get(slot)
        engine = self.engines.get(seat.pid) if seat is not None else None
        if engine is not None and engine.is_alive:
            if isinstance(order, od.EndEngine):
                self.told_to_end.add(engine.pid)
            engine.inbox.append(order)

    def of_group(self):
        """Living members of the present group."""
        pids = [m.pid for m in self.machine.membership.members]
        return [self.engines[pid] for pid in pids if self.engines[pid].is_alive]

    def check_stand(self):
        """All members stand at one step; how many are committed, where it can be said."""
        run = self.machine.runs.present
        if run is None or run.state == "binding":
            return None
        assert not run.is_going
        here = self.of_group()
        assert all(e.port is None or e.port.go_until is None for e in here)
        trained = {e.steps for e in here if e.trains and e.port.spec.run == run.spec.run}
        assert len(trained) <= 1
        return len(trained.pop()) if trained else None

    def check_go_on(self, order):
        """A group that is told to go on is formed, and all in it have the same state."""
        assert self.machine.phase is Phase.RUNNING
        assert order.generation == self.last_generation
        assert all(e.group == order.generation for e in self.of_group())
        if order.spec.cell is None:
            assert not self.open_cells
        if not self.told and not self.was_taken_over:
            assert len({e.steps for e in self.of_group()}) <= 1

    def end(self, engine, signal):
        """A process ends; what it has sent is still on the road."""
        if engine.is_alive:
            engine.is_alive = False
            engine.inbox.clear()
            event = ev.EngineExited(
                slot=engine.slot,
                pid=engine.pid,
                signal=signal,
                exit_code=None if signal else 0,
                detector="zygote",
                at=self.now,
            )
            self.zygote.append(event)

    # ---- engines

    def fork(self):
        if not self.to_start:
            return
        slot, pid = self.to_start.popleft(), self.next_pid
        self.next_pid += 1
        engine = self.engines[pid] = Engine(slot, pid)
        engine.has_trainer = not self.machine.was_running  # made by the replay
        self.zygote.append(ev.EngineForked(slot=slot, pid=pid))
        engine.outbox.append(engine.hello)

    def fail_to_fork(self):
        if self.to_start:
            event = ev.EngineStartFailed(slot=self.to_start.popleft(), reason="no memory")
            self.machine.start_failed(event, self.now)
            self.carry_out()

    def obey(self, engine):
        if engine.trains and engine.port.vote is not None:
            if engine.port.vote in self.results and self.random.random() < 0.5:
                self.apply(engine)
            else:
                self.break_off(engine)
        self.carry_out_order(engine, goes_well=self.random.random() < 0.95)

    def carry_out_order(self, engine, *, goes_well=True):
        """The next order of an engine; it fails now and then where it can."""
        order, own = engine.inbox.popleft(), {"slot": engine.slot, "pid": engine.pid}
        match order:
            case rn.RunMessage():
                self.obey_run(engine, order)
            case od.ReplayJournal():
                engine.replayed = order.until
                failed = () if goes_well else ("cell 'f()'",)
                engine.names = dict(NAMES) if goes_well else {}
                engine.has_trainer |= goes_well
                engine.outbox.append(ev.JournalReplayed(**own, failed=failed))
            case od.BreakGroup(generation=generation):
                engine.group = 0
                if engine.trains:
                    self.stand(engine)
                else:
                    engine.cell = None
                engine.outbox.append(ev.GroupBroken(**own, generation=generation))
            case od.FormGroup():
                engine.outbox.append(self.form(engine, order, goes_well=goes_well))
            case od.InterruptMain(cell=cell):
                if engine.trains and engine.port.spec.cell == cell == engine.cell:
                    self.raise_in_a_loop(engine)
            case od.EndEngine():
                self.end(engine, None)
            case _:
                self.hand_over(engine, order, goes_well=goes_well)

    def form(self, engine, order, *, goes_well):
        generation = order.membership.generation
        about = {"slot": engine.slot, "pid": engine.pid, "generation": generation}
        if not goes_well:
            return ev.GroupFormFailed(**about, error="no route")
        assert engine.group == 0
        engine.group = generation
        step = self.prepare(engine, order.run)
        return ev.GroupFormed(**about, cuttable=engine.pid % 5 > 0, step=step)

    def hand_over(self, engine, order, *, goes_well):
        """An engine's part of a hand-over."""
        here = {"slot": engine.slot}
        match order:
            case od.FingerprintNames(generation=generation):
                digests = dict(engine.names)
                is_owned = engine.over is not None and engine.over == engine.formed_under
                if engine.has_trainer and engine.port is None and not is_owned:
                    digests[THE_TRAINER] = f"module:{engine.steps}"
                event = ev.NamesFingerprinted(**here, generation=generation, digests=digests)
                engine.outbox.append(event)
            case od.OfferNames(generation=generation, names=names):
                has_it = engine.port is not None or engine.over == engine.formed_under
                assert rn.TRAINER not in names or has_it
                ours = [n for n in names if n != rn.TRAINER]
                failed = {} if goes_well else dict.fromkeys(ours[:1], "cannot be sent")
                self.packed[generation] = engine.steps, engine.lr
                event = ev.NamesOffered(
                    **here,
                    generation=generation,
                    sha256="ab",
                    num_bytes=1,
                    failed=failed,
                    trainer_digest=f"{engine.steps}" if rn.TRAINER in names else "",
                )
                engine.outbox.append(event)
            case od.ReceiveNames():
                engine.outbox.append(self.receive(engine, order, goes_well=goes_well))

    # ---- engines in a run

    def receive(self, engine, order, *, goes_well):
        """Names that a newcomer is given, the trainer's state among them."""
        failed = dict.fromkeys(order.names if not goes_well else (), "it cannot be loaded")
        engine.names |= {n: NAMES[n] for n in order.names if n in NAMES}
        steps, lr = self.packed[order.generation]
        if THE_TRAINER in order.names:
            engine.has_trainer, engine.steps, engine.lr = True, steps, lr
        digest = ""
        if rn.TRAINER in order.names and goes_well:
            if engine.over is None:
                self.bind_if_here(engine, engine.formed_under)
            has_it = engine.port is not None or engine.over == engine.formed_under
            assert has_it or not engine.has_trainer
            if has_it:
                assert engine.steps == steps[: len(engine.steps)] or not engine.has_stepped
                engine.steps, engine.lr, digest = steps, lr, f"{steps}"
        return ev.NamesReceived(
            slot=engine.slot, generation=order.generation, failed=failed, trainer_digest=digest
        )

    def prepare(self, engine, spec):
        """A group was formed under a run."""
        engine.formed_under = spec
        if spec is None:
            return None
        if engine.over == spec:
            return len(engine.steps)
        if engine.port is not None and engine.port.spec.run != spec.run:
            engine.port = None
        self.bind_if_here(engine, spec)
        return len(engine.steps) if engine.port is not None else None

    def bind_if_here(self, engine, spec):
        if engine.port is None and spec.cell is None and engine.has_trainer:
            self.bind_to(engine, spec)

    def bind_to(self, engine, spec):
        engine.port = Port(spec)
        about = {"slot": engine.slot, "pid": engine.pid, "run": spec.run}
        engine.say(rn.RunBound(**about, step=len(engine.steps)))

    def obey_run(self, engine, order):
        port = engine.port
        if isinstance(order, rn.BindRun):
            self.bind(engine, order.spec)
            return
        if isinstance(order, rn.EndRun):
            self.end_run(engine, order)
            return
        run = order.spec.run if isinstance(order, rn.GoOn) else order.run
        if port is None or port.spec.run != run:
            return
        match order:
            case rn.GoOn(generation=generation, until=until, number=number, lr=lr):
                if generation != engine.group:
                    return
                if number != port.number:
                    port.go_until, port.wants_hold, port.number = until, False, number
                    port.settings += [lr] if lr is not None else []
                elif port.go_until is None:
                    self.say_held(engine)
            case rn.HoldRun():
                port.wants_hold = True

    def end_run(self, engine, order):
        port = engine.port
        if order.is_even and engine.is_over(order.run):
            engine.over = None
        if port is None or port.spec.run != order.run:
            return
        was_over = port.is_over
        self.stand(engine)
        engine.port, engine.over = None, None if order.is_even else port.spec
        if port.spec.cell is not None and order.fault is not None and not was_over:
            self.fail_cell(engine)

    def bind(self, engine, spec):
        port, kind = engine.port, ""
        is_other = port is not None and port.spec.run != spec.run
        if is_other and (port.is_over or port.spec.cell is None):
            engine.port, is_other = None, False
        if not engine.has_trainer:
            kind = "NameError"
        elif is_other:
            kind = "WrongState"
        elif engine.port is None:
            self.bind_to(engine, spec)
        else:
            engine.outbox.append(engine.port.said)
        if kind:
            about = {"slot": engine.slot, "pid": engine.pid, "run": spec.run}
            fault = rn.RunFault(kind=kind, message="no trainer")
            engine.outbox.append(rn.RunBound(**about, step=0, fault=fault))

    def stand(self, engine):
        engine.port.stand()
        engine.flush()

    def train(self, engine):
        """The trainer's loop does what is next."""
        port = engine.port
        if port.settings:
            engine.lr, port.settings = port.settings[-1], []
        if port.vote is not None:
            if port.vote in self.results:
                self.apply(engine)
        elif port.go_until is None:
            return
        elif len(engine.steps) >= port.go_until:
            self.hold(engine)
        elif self.plan_of(engine)[1] == len(engine.steps):
            self.leave(engine)
        else:
            self.vote(engine)

    def plan_of(self, engine):
        """(steps, the step at which all leave early) of the loop that an engine is in."""
        spec = engine.port.spec
        return self.plans[spec.cell][int(spec.run[-1])] if spec.cell is not None else (0, None)

    def vote(self, engine):
        """It stands in the collective at a step's end, until all members have come."""
        step, generation, port = len(engine.steps), engine.group, engine.port
        assert generation > 0
        port.vote, port.since = (generation, step), self.now
        votes = self.votes.setdefault(generation, {})
        votes[engine.pid] = step, engine.lr, port.wants_hold
        assert len({step for step, _, _ in votes.values()}) == 1
        if set(votes) == self.members[generation]:
            assert len({lr for _, lr, _ in votes.values()}) == 1
            self.results[generation, step] = any(hold for _, _, hold in votes.values())
            self.votes[generation] = {}

    def apply(self, engine):
        """It has the vote's result."""
        port, (generation, step) = engine.port, engine.port.vote
        is_hold, port.vote = self.results[generation, step], None
        engine.steps, engine.has_stepped = (*engine.steps, generation), True
        size = len(self.members[generation])
        port.rows.append((step, 0.5, 60, 0.1, generation, size, engine.lr, self.now))
        if is_hold:
            self.hold(engine)

    def hold(self, engine):
        self.stand(engine)
        self.say_held(engine)

    def say_held(self, engine):
        event = rn.RunHeld(
            slot=engine.slot,
            pid=engine.pid,
            generation=engine.group,
            run=engine.port.spec.run,
            step=len(engine.steps),
            number=engine.port.number,
        )
        engine.outbox.append(event)

    def break_off(self, engine):
        """The collective failed: the step will be repeated."""
        generation, step = engine.port.vote
        self.votes.get(generation, {}).pop(engine.pid, None)
        self.stand(engine)
        run = engine.port.spec.run
        event = rn.StepBroken(slot=engine.slot, run=run, generation=generation, step=step)
        engine.outbox.append(event)

    def enter(self, engine):
        """A cell comes to its own loop, or to its end."""
        cell, loop = engine.cell, engine.num_loops.get(engine.cell, 0)
        if loop >= len(self.plans[cell]) or not engine.has_trainer:
            engine.cell = None
            return
        engine.num_loops[cell] = loop + 1
        if engine.port is not None and engine.port.spec.cell is None:
            self.fail_cell(engine)  # WrongState: a run goes on
            return
        spec = rn.RunSpec(run=rn.cell_run(cell, loop), name="", cell=cell)
        engine.over = engine.port.spec if engine.port is not None else engine.over
        engine.port = Port(spec)
        event = rn.RunEntered(
            slot=engine.slot,
            pid=engine.pid,
            cell=cell,
            loop=loop,
            step=len(engine.steps),
            steps=self.plans[cell][loop][0],
        )
        engine.say(event)

    def leave(self, engine):
        """An own loop is left early."""
        self.give_up_vote(engine)
        engine.port.is_over = True
        self.stand(engine)
        about = {"slot": engine.slot, "pid": engine.pid, "run": engine.port.spec.run}
        engine.say(rn.RunLeft(**about, step=len(engine.steps)))

    def raise_in_a_loop(self, engine):
        """The user's code raises in a step, or between steps."""
        self.give_up_vote(engine)
        engine.port.is_over = True
        self.stand(engine)
        fault = rn.RunFault(kind="ValueError", message="bad batch", rank=0)
        about = {"slot": engine.slot, "pid": engine.pid, "run": engine.port.spec.run}
        engine.say(rn.RunRaised(**about, fault=fault))
        if engine.port.spec.cell is not None:
            self.fail_cell(engine)

    def give_up_vote(self, engine):
        if engine.port.vote is not None:
            self.votes.get(engine.port.vote[0], {}).pop(engine.pid, None)

    def fail_cell(self, engine):
        if engine.cell is not None:
            engine.outbox.append(ev.CellFailedOnRank(slot=engine.slot, cell=engine.cell))
        engine.cell = None

    def flush(self, engine):
        engine.flush()

    def die(self, engine):
        self.end(engine, self.random.choice(["SIGKILL", None]))

    def beat(self, engine):
        port = engine.port if engine.trains else None
        waits = self.random.random() < 0.5 if port is None else port.vote is not None
        waits = waits and (port is None or port.vote not in self.results)
        since = self.now if port is None else port.since
        where = ev.Where(operation="all_reduce", line="line 1", since_s=since)
        beat = ev.Beat(
            slot=engine.slot,
            pid=engine.pid,
            number=1,
            generation=engine.group,
            cell=engine.cell,
            waiting=where if waits else None,
            step=len(engine.steps) if port is not None and port.go_until is not None else None,
            rss_bytes=1,
        )
        engine.outbox.append(beat)

    def fail_in_a_collective(self, engine):
        event = ev.CollectiveFailed(
            slot=engine.slot, pid=engine.pid, generation=engine.group, error="reset"
        )
        engine.outbox.append(event)
        if engine.trains and engine.port.vote is not None:
            if engine.port.vote in self.results:
                self.apply(engine)
            else:
                self.break_off(engine)

    def raise_in_a_cell(self, engine):
        if engine.trains:
            self.raise_in_a_loop(engine)
            return
        engine.outbox.append(ev.CellFailedOnRank(slot=engine.slot, cell=engine.cell))
        engine.cell = None

    # ---- roads

    def hear_zygote(self):
        if not self.zygote:
            return
        event = self.zygote.popleft()
        if isinstance(event, ev.EngineForked):
            self.machine.forked(event)
        else:
            self.reported_dead.add(event.pid)
            self.machine.exited(event, self.now)
        self.carry_out()

    def look_at_processes(self):
        if not self.vanished():
            return
        seat = self.vanished()[0]
        event = ev.EngineExited(
            slot=seat.slot,
            pid=seat.pid,
            signal=None,
            exit_code=None,
            detector="process",
            at=self.now,
        )
        self.reported_dead.add(seat.pid)
        self.machine.exited(event, self.now)
        self.carry_out()

    def vanished(self):
        """Seats whose engine is gone, and nobody will report it any more."""
        reports = {e.pid for e in self.zygote}
        seats = [s for s in self.machine.seats.values() if s.pid is not None]
        return [s for s in seats if not self.engines[s.pid].is_alive and s.pid not in reports]

    def hear(self, engine):
        event, machine = engine.outbox.popleft(), self.machine
        match event:
            case ev.Beat():
                machine.beat(event, self.now)
            case ev.EngineHello():
                machine.hello(event, self.now)
            case ev.JournalReplayed():
                machine.replayed(event, self.now)
            case ev.GroupBroken():
                machine.broken(event, self.now)
            case ev.GroupFormed():
                machine.formed(event, self.now)
            case ev.GroupFormFailed():
                machine.form_failed(event, self.now)
            case ev.CollectiveFailed():
                machine.collective_failed(event, self.now)
            case ev.CellFailedOnRank():
                machine.cell_failed(event, self.now)
            case _ if isinstance(event, rn.RunEvent):
                self.hear_of_run(event)
            case _:
                machine.handed_over(event, self.now)
        self.carry_out()

    def hear_of_run(self, event):
        if isinstance(event, rn.StepsCommitted):
            fresh = self.machine.committed(event, self.now)
            self.ledger[event.run] = self.ledger.get(event.run, b"") + fresh
        else:
            self.machine.run_says(event, self.now)

    def pass_time(self):
        self.now += self.random.choice([0.0, 0.3, 0.3, 4.0, 20.0])
        self.machine.tick(self.now)
        self.carry_out()

    # ---- the kernel

    def attach(self):
        """The kernel has found the supervisor that took over, and asks again."""
        if self.is_attached:
            return
        self.is_attached = True
        self.machine.attach(self.open_cells, self.journal, self.now)
        self.carry_out()
        for cell in self.waiting():
            self.machine.begin_cell(cell, None, self.now)
            self.carry_out()
        begun, self.begun = self.begun, {}
        for steps in begun.values():
            self.ask_for_run(steps)

    def begin_run(self):
        self.attach()
        if len(self.begun) < 2:
            self.ask_for_run(self.random.choice([1, 3, 8, 20, 20]))

    def ask_for_run(self, steps):
        self.num_runs += 1
        run = f"r{self.num_runs}"
        self.begun[run] = steps
        order = rn.BeginRun(name=THE_TRAINER, steps=steps)
        if self.machine.begin_run(run, order, self.now):
            del self.begun[run]
        self.carry_out()

    def steer(self):
        self.attach()
        run = self.machine.runs.present
        if run is not None and run.state != "binding":
            action = self.random.choice(["pause", "resume", "resume", "stop", "step"])
            order = rn.SteerRun(run=run.spec.run, action=action, steps=self.random.randint(0, 3))
            self.machine.steer_run(order, self.now)
            self.carry_out()

    def set_lr(self):
        self.attach()
        run = self.machine.runs.present
        if run is not None and run.state != "binding":
            order = rn.SetRun(run=run.spec.run, lr=self.random.random())
            self.machine.steer_run(order, self.now)
            self.carry_out()

    def begin_cell(self):
        self.attach()
        if len(self.waiting()) < 5:
            cell = f"c{len(self.asked)}"
            self.asked.append(cell)
            num_loops = self.random.choice([0, 1, 2])
            leave_at = [self.random.choice([None, None, 2, 5]) for _ in range(num_loops)]
            self.plans[cell] = [(self.random.choice([1, 3, 6, 12]), at) for at in leave_at]
            ranks = self.random.choice([None, None, (0,), (1,), (0, 5), ()])
            self.machine.begin_cell(cell, ranks, self.now)
            self.carry_out()

    def end_cell(self):
        self.attach()
        if self.open_cells:
            cell = self.random.choice(sorted(self.open_cells))
            self.finish(cell, entries=self.random.randint(0, 1))

    def finish(self, cell, entries=0):
        self.open_cells.discard(cell)
        self.journal += entries
        for engine in self.engines.values():
            if engine.cell == cell and not (engine.trains and engine.port.spec.cell == cell):
                engine.cell = None
        self.machine.end_cell(cell, self.journal, self.now)
        self.carry_out()

    def withdraw_cell(self):
        self.attach()
        if self.waiting():
            cell = self.random.choice(self.waiting())
            self.withdrawn.add(cell)
            self.machine.end_cell(cell, self.journal, self.now)
            self.carry_out()

    def waiting(self):
        return [c for c in self.asked if c not in self.answers and c not in self.withdrawn]

    def interrupt(self):
        self.attach()
        if self.open_cells:
            self.machine.interrupt(self.random.choice(sorted(self.open_cells)), self.now)
            self.carry_out()

    def scale(self):
        self.attach()
        self.machine.scale(self.random.randint(1, MAX_SEATS), self.now)
        self.carry_out()

    def take_over(self):
        """The supervisor ends, another one takes up; starts that were not carried out are lost."""
        view, self.was_taken_over = view_of(self.machine), True
        self.to_start = deque()
        self.told, self.is_attached = {}, False
        self.zygote = deque(e for e in self.zygote if isinstance(e, ev.EngineExited))
        self.machine = Machine(self.config)
        rows = lambda run: self.ledger.get(run, b"")  # noqa: E731 - as long as its name
        self.machine.take_up(view, self.journal, self.now, rows)
        self.carry_out()
        self.machine.adopt({e.pid: e.slot for e in self.engines.values() if e.is_alive})
        seats = self.machine.seats
        self.to_start = deque(s for s in self.to_start if seats[s].pid is None)
        for engine in self.engines.values():
            engine.inbox.clear()
            engine.outbox.clear()
            if engine.is_alive:
                engine.greet()
        if self.random.random() < 0.5:
            self.attach()

    # ---- what holds

    def check(self):
        """What holds between any two events."""
        machine = self.machine
        assert len(machine.gate.waiting) <= len(self.asked) - len(self.answers)
        assert set(machine.gate.failed) <= machine.gate.open
        assert machine.gate.open == self.open_cells or not self.is_attached
        assert set(machine.gate.interrupted) <= machine.gate.open
        assert not machine.gate.open & set(machine.gate.ended)
        assert machine.awaited <= set(machine.seats)
        assert not machine.awaited or machine.phase in (Phase.BREAKING, Phase.FORMING)
        assert len(machine.seats) <= 2 * MAX_SEATS
        view_of(machine, with_beats=True)
        self.check_run()
        if machine.is_healthy:
            assert machine.phase is Phase.RUNNING
            assert machine.membership.slots == tuple(range(machine.size))
            for member in machine.membership.members:
                assert machine.seats[member.slot].pid == member.pid
                assert member.pid not in self.reported_dead | self.told_to_end

    def check_run(self):
        """What holds of a run between any two events."""
        machine, run = self.machine, self.machine.runs.present
        if run is None or not run.is_going:
            self.told = {}
        if run is None:
            return
        assert not run.is_going or machine.phase is Phase.RUNNING
        if run.is_going and run.spec.cell is None:
            assert not self.open_cells
        if run.is_going and not self.was_taken_over:
            told = [self.told.get(slot) for slot in machine.membership.slots]
            assert None not in told
            assert len({(o.until, o.generation, o.spec) for o in told}) == 1
            until = run.target if run.until is None else run.until
            assert told[0].until >= until or run.is_paused

    def come_to_rest(self):
        """Deaths stop, everybody obeys: the world comes to rest, and all is answered."""
        for _ in range(5_000):
            if not self.step():
                break
            self.check()
        else:
            raise AssertionError("no rest")
        machine = self.machine
        assert not self.begun
        assert not self.waiting()
        assert not machine.gate.waiting
        self.check_last_run()
        if machine.phase is Phase.FAILED:
            assert "%dist_reset" in machine.why_failed
            return
        assert machine.phase is Phase.RUNNING
        states = {s.state for s in machine.seats.values()}
        may_be_empty = self.config.policy == "shrink"
        assert states <= {SeatState.MEMBER, SeatState.GIVEN_UP, SeatState.EMPTY}
        assert may_be_empty or SeatState.EMPTY not in states
        assert set(machine.seats) == set(range(machine.size))
        assert machine.is_healthy == (states == {SeatState.MEMBER})
        living = {e.pid for e in self.engines.values() if e.is_alive}
        assert living == {m.pid for m in machine.membership.members}
        if not self.was_taken_over:
            assert all(i.generation_after is not None for i in machine.story.incidents)

    def check_last_run(self):
        """At rest a run is paused or over, and who trained has the same state."""
        run = self.machine.runs.present
        here = [e for e in self.of_group() if self.machine.phase is not Phase.FAILED]
        assert run is None or (run.state == "paused" and run.spec.cell is None)
        ports = [e.port for e in self.engines.values() if e.trains]
        if run is None:
            assert not ports
            return
        assert all(e.trains and e.port.spec == run.spec for e in here)
        assert all(e.port.go_until is None and e.steps == here[0].steps for e in here)
        assert run.step == len(here[0].steps)
        self.check_rows(run, here[0])

    def check_rows(self, run, engine):
        """The rows that are told are those of the state that lives."""
        rows = run.progress.rows
        assert self.was_taken_over or run.progress.step == run.step
        known = rows[rows["generation"] > 0]
        for row in known if run.progress.step == run.step else ():
            assert engine.steps[row["step"]] == row["generation"]

    def step(self):
        """Whatever is next when nothing goes wrong any more; False at rest."""
        engines = self.engines.values()
        if self.to_start:
            self.fork()
        elif self.zygote:
            self.hear_zygote()
        elif says := next((e for e in engines if e.outbox), None):
            self.hear(says)
        elif obeys := next((e for e in engines if e.can_obey), None):
            if obeys.trains and obeys.port.vote is not None:
                self.break_off(obeys)
            self.carry_out_order(obeys)
        elif steps := next((e for e in engines if e.can_step and self.is_free(e)), None):
            self.train(steps)
        else:
            return self.step_slowly()
        return True

    def is_free(self, engine):
        return engine.port.vote is None or engine.port.vote in self.results

    def step_slowly(self):
        """Nothing moves by itself any more: time does, and the user."""
        if not self.is_attached:
            self.attach()
        elif self.vanished():
            self.look_at_processes()
        elif enters := next((e for e in self.engines.values() if e.can_enter), None):
            self.enter(enters)
        elif self.open_cells and not self.machine.runs.is_going:
            self.finish(min(self.open_cells))
        elif self.machine.runs.is_going:
            assert self.num_waits < 20
            self.num_waits += 1
            self.now += 1.5
            for engine in self.of_group():
                self.beat(engine)
                self.hear(engine)
            self.machine.tick(self.now)
            self.carry_out()
        else:
            return False
        return True


EVENTS = {
    "fork": (Life.fork, None),
    "fail_to_fork": (Life.fail_to_fork, None),
    "hear_zygote": (Life.hear_zygote, None),
    "look_at_processes": (Life.look_at_processes, None),
    "hear": (Life.hear, lambda e: e.outbox),
    "obey": (Life.obey, lambda e: e.can_obey),
    "train": (Life.train, lambda e: e.can_step),
    "flush": (Life.flush, lambda e: e.trains),
    "enter": (Life.enter, lambda e: e.can_enter),
    "leave": (Life.leave, lambda e: e.trains and e.port.spec.cell is not None),
    "raise_in_a_loop": (Life.raise_in_a_loop, lambda e: e.trains and e.port.go_until is not None),
    "begin_run": (Life.begin_run, None),
    "steer": (Life.steer, None),
    "set_lr": (Life.set_lr, None),
    "attach": (Life.attach, None),
    "die": (Life.die, lambda e: e.is_alive),
    "beat": (Life.beat, lambda e: e.is_alive),
    "fail_in_a_collective": (Life.fail_in_a_collective, lambda e: e.is_alive and e.group),
    "raise_in_a_cell": (Life.raise_in_a_cell, lambda e: e.is_alive and e.cell),
    "pass_time": (Life.pass_time, None),
    "begin_cell": (Life.begin_cell, None),
    "end_cell": (Life.end_cell, None),
    "withdraw_cell": (Life.withdraw_cell, None),
    "interrupt": (Life.interrupt, None),
    "scale": (Life.scale, None),
    "take_over": (Life.take_over, None),
}
"""What may happen, and to which engines."""
OFTEN = {"fork": 8, "hear_zygote": 6, "look_at_processes": 3, "hear": 16, "obey": 14, "train": 16}
SELDOM = {
    "fail_to_fork": 0.3,
    "fail_in_a_collective": 0.4,
    "take_over": 0.5,
    "leave": 0.1,
    "raise_in_a_loop": 0.2,
    "enter": 4.0,
}


IN_A_RUN = {"train": 60, "obey": 30, "hear": 40, "begin_run": 2, "die": 0.7, "end_cell": 0.2}
IN_A_RUN |= {"raise_in_a_cell": 0.1, "interrupt": 0.1, "pass_time": 0.3, "leave": 0.05}
IN_A_RUN |= {"raise_in_a_loop": 0.05, "enter": 8.0, "beat": 0.5, "steer": 0.5, "scale": 0.5}


def story_of(seed):
    """A life's events, each with a seed of its own; every life has other things happen often."""
    rng = random.Random(seed)
    likely = OFTEN | SELDOM | (IN_A_RUN if seed % 2 else {})
    usual = {event: likely.get(event, 1.0) for event in EVENTS}
    weights = [weight * rng.choice([0.2, 1, 1, 2]) for weight in usual.values()]
    events = rng.choices(list(usual), weights, k=rng.randint(20, 800 if seed % 2 else 200))
    return [(event, rng.getrandbits(32)) for event in events]


def live(seed, story):
    """The life of a cluster; what went wrong in it, or an empty text."""
    try:
        life = Life(seed)
        for event, its_seed in story:
            life.happen(event, its_seed)
        life.come_to_rest()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is told with a short story
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        return (
            f"{type(error).__name__} in line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name}"
        )
    return ""


def shorten(seed, story, problem):
    """Leave out much without which the same thing goes wrong."""
    length, tries = len(story), 500
    while length := length // 2:
        start = 0
        while start < len(story) and (tries := tries - 1):
            shorter = story[:start] + story[start + length :]
            if live(seed, shorter) == problem:
                story = shorter
            else:
                start += length
    return story


@pytest.mark.parametrize("block", range(20))
def test_a_cluster_survives_whatever_happens_in_whatever_order(block):
    """Deaths, cells, sizes, delays, takeovers: no error, no false group, all is answered."""
    for seed in range(50 * block, 50 * block + 50):
        story = story_of(seed)
        if problem := live(seed, story):
            short = shorten(seed, story, problem)
            pytest.fail(f"{problem}; to see it: live({seed}, {short})")
