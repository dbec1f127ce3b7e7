"""The lifecycle machine under random events: a few things hold whatever happens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from nbdist.config import ClusterConfig
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.supervisor import instructions as do
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.seats import SeatState
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import view_of

MAX_SEATS = 6
NAMES = {"x": "int:1", "model": "module:1"}


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


class Life:
    """One cluster: engines that come and go, a kernel that runs cells, roads with delays.

    What an engine says arrives in its own order, and so does what the zygote says; the two roads
    know nothing of one another. Methods named in `EVENTS` are what may happen.
    """

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        size = rng.randint(1, 4)
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
        self.machine.start(self.now)
        self.carry_out()

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
                case do.Notify(notice):
                    self.check_notice(notice)
                case _:
                    self.send(instruction)

    def send(self, instruction):
        match instruction:
            case do.Tell(slot, order):
                self.tell(slot, order)
            case do.Form(membership):
                self.check_group(membership)
                form = od.FormGroup(membership=membership, store_host="", store_port=0)
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
        assert set(membership.slots) <= set(range(self.machine.size))

    def check_notice(self, notice):
        if isinstance(notice, od.RanksReleased):
            assert notice.generation == self.last_generation
            if notice.reason.startswith("the world changes"):
                assert not self.open_cells
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
            self.machine.gate.end(cell, self.now)
            return
        assert self.machine.phase is Phase.RUNNING
        assert instruction.membership == self.machine.membership
        assert instruction.membership.generation == self.last_generation
        assert set(instruction.ranks) <= set(range(instruction.membership.world_size))
        earlier = self.asked[: self.asked.index(cell)]
        assert all(c in self.answers or c in self.withdrawn for c in earlier)  # in order
        self.open_cells.add(cell)
        for rank in instruction.ranks:
            engine = self.engines[instruction.membership.members[rank].pid]
            assert engine.group == self.last_generation or not engine.is_alive
            engine.cell = cell

    def tell(self, slot, order):
        seat = self.machine.seats.get(slot)
        engine = self.engines.get(seat.pid) if seat is not None else None
        if engine is not None and engine.is_alive:
            if isinstance(order, od.EndEngine):
                self.told_to_end.add(engine.pid)
            engine.inbox.append(order)

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
        self.zygote.append(ev.EngineForked(slot=slot, pid=pid))
        engine.outbox.append(engine.hello)

    def fail_to_fork(self):
        if self.to_start:
            event = ev.EngineStartFailed(slot=self.to_start.popleft(), reason="no memory")
            self.machine.start_failed(event, self.now)
            self.carry_out()

    def obey(self, engine):
        self.carry_out_order(engine, goes_well=self.random.random() < 0.95)

    def carry_out_order(self, engine, *, goes_well=True):
        """The next order of an engine; it fails now and then where it can."""
        order, here = engine.inbox.popleft(), {"slot": engine.slot}
        own = {**here, "pid": engine.pid}
        match order:
            case od.ReplayJournal():
                engine.replayed = order.until
                failed = () if goes_well else ("cell 'f()'",)
                engine.names = dict(NAMES) if goes_well else {}
                engine.outbox.append(ev.JournalReplayed(**own, failed=failed))
            case od.BreakGroup(generation=generation):
                engine.group, engine.cell = 0, None
                engine.outbox.append(ev.GroupBroken(**own, generation=generation))
            case od.FormGroup(membership=membership):
                about = {**own, "generation": membership.generation}
                if goes_well:
                    assert engine.group == 0
                    engine.group = membership.generation
                    event = ev.GroupFormed(**about, cuttable=engine.pid % 5 > 0)
                else:
                    event = ev.GroupFormFailed(**about, error="no route")
                engine.outbox.append(event)
            case od.FingerprintNames(generation=generation):
                event = ev.NamesFingerprinted(
                    **here, generation=generation, digests=dict(engine.names)
                )
                engine.outbox.append(event)
            case od.OfferNames(generation=generation, names=names):
                failed = {} if goes_well else {names[0]: "cannot be sent"}
                event = ev.NamesOffered(
                    **here, generation=generation, sha256="ab", num_bytes=1, failed=failed
                )
                engine.outbox.append(event)
            case od.ReceiveNames(generation=generation, names=names):
                failed = dict.fromkeys(names if not goes_well else (), "it cannot be loaded")
                engine.names |= {n: NAMES[n] for n in names}
                event = ev.NamesReceived(**here, generation=generation, failed=failed)
                engine.outbox.append(event)
            case od.EndEngine():
                self.end(engine, None)

    def die(self, engine):
        self.end(engine, self.random.choice(["SIGKILL", None]))

    def beat(self, engine):
        waits = self.random.random() < 0.5
        where = ev.Where(operation="all_reduce", line="line 1", since_s=self.now)
        beat = ev.Beat(
            slot=engine.slot,
            pid=engine.pid,
            number=1,
            generation=engine.group,
            cell=engine.cell,
            waiting=where if waits else None,
            rss_bytes=1,
        )
        engine.outbox.append(beat)

    def fail_in_a_collective(self, engine):
        event = ev.CollectiveFailed(
            slot=engine.slot, pid=engine.pid, generation=engine.group, error="reset"
        )
        engine.outbox.append(event)

    def raise_in_a_cell(self, engine):
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
                machine.beat(event)
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
                machine.gate.failed_on(event.cell, event.slot, self.now)
            case _:
                machine.handed_over(event, self.now)
        self.carry_out()

    def pass_time(self):
        self.now += self.random.choice([0.0, 0.3, 0.3, 4.0, 20.0])
        self.machine.tick(self.now)
        self.carry_out()

    # ---- the kernel

    def begin_cell(self):
        if len(self.waiting()) < 5:
            cell = f"c{len(self.asked)}"
            self.asked.append(cell)
            ranks = self.random.choice([None, None, (0,), (1,), (0, 5), ()])
            self.machine.begin_cell(cell, ranks, self.now)
            self.carry_out()

    def end_cell(self):
        if self.open_cells:
            cell = self.random.choice(sorted(self.open_cells))
            self.finish(cell, entries=self.random.randint(0, 1))

    def finish(self, cell, entries=0):
        self.open_cells.discard(cell)
        self.journal += entries
        for engine in self.engines.values():
            if engine.cell == cell:
                engine.cell = None
        self.machine.end_cell(cell, self.journal, self.now)
        self.carry_out()

    def withdraw_cell(self):
        if self.waiting():
            cell = self.random.choice(self.waiting())
            self.withdrawn.add(cell)
            self.machine.end_cell(cell, self.journal, self.now)
            self.carry_out()

    def waiting(self):
        return [c for c in self.asked if c not in self.answers and c not in self.withdrawn]

    def interrupt(self):
        if self.open_cells:
            self.machine.interrupt(self.random.choice(sorted(self.open_cells)), self.now)
            self.carry_out()

    def scale(self):
        self.machine.scale(self.random.randint(1, MAX_SEATS), self.now)
        self.carry_out()

    def take_over(self):
        """The supervisor ends, another one takes up; starts that were not carried out are lost."""
        view, self.was_taken_over = view_of(self.machine), True
        waiting, self.to_start = self.waiting(), deque()
        self.zygote = deque(e for e in self.zygote if isinstance(e, ev.EngineExited))
        self.machine = Machine(self.config)
        self.machine.take_up(view, self.journal, self.now)
        self.machine.gate.open |= self.open_cells
        self.carry_out()
        self.machine.adopt({e.pid: e.slot for e in self.engines.values() if e.is_alive})
        seats = self.machine.seats
        self.to_start = deque(s for s in self.to_start if seats[s].pid is None)
        for engine in self.engines.values():
            engine.inbox.clear()
            engine.outbox.clear()
            if engine.is_alive:
                engine.outbox.append(engine.hello)
        for cell in waiting:  # the kernel asks again
            self.machine.begin_cell(cell, None, self.now)
            self.carry_out()

    # ---- what holds

    def check(self):
        """What holds between any two events."""
        machine = self.machine
        assert len(machine.gate.waiting) <= len(self.asked) - len(self.answers)
        assert set(machine.gate.failed) <= machine.gate.open == self.open_cells
        assert set(machine.gate.interrupted) <= machine.gate.open
        assert not machine.gate.open & set(machine.gate.ended)
        assert machine.awaited <= set(machine.seats)
        assert not machine.awaited or machine.phase in (Phase.BREAKING, Phase.FORMING)
        assert len(machine.seats) <= 2 * MAX_SEATS
        view_of(machine, with_beats=True)
        if machine.is_healthy:
            assert machine.phase is Phase.RUNNING
            assert machine.membership.slots == tuple(range(machine.size))
            for member in machine.membership.members:
                assert machine.seats[member.slot].pid == member.pid
                assert member.pid not in self.reported_dead | self.told_to_end

    def come_to_rest(self):
        """Deaths stop, everybody obeys: the world comes to rest, and all is answered."""
        for _ in range(2_000):
            if not self.step():
                break
            self.check()
        machine = self.machine
        assert not self.waiting()
        assert not machine.gate.waiting
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

    def step(self):
        """Whatever is next when nothing goes wrong any more; False at rest."""
        engines = self.engines.values()
        if self.to_start:
            self.fork()
        elif self.zygote:
            self.hear_zygote()
        elif says := next((e for e in engines if e.outbox), None):
            self.hear(says)
        elif obeys := next((e for e in engines if e.inbox), None):
            self.carry_out_order(obeys)
        elif self.open_cells:
            self.finish(min(self.open_cells))
        elif self.vanished():
            self.look_at_processes()
        else:
            return False
        return True


EVENTS = {
    "fork": (Life.fork, None),
    "fail_to_fork": (Life.fail_to_fork, None),
    "hear_zygote": (Life.hear_zygote, None),
    "look_at_processes": (Life.look_at_processes, None),
    "hear": (Life.hear, lambda e: e.outbox),
    "obey": (Life.obey, lambda e: e.inbox),
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
OFTEN = {"fork": 8, "hear_zygote": 6, "look_at_processes": 3, "hear": 16, "obey": 14}
SELDOM = {"fail_to_fork": 0.3, "fail_in_a_collective": 0.4, "take_over": 0.5}


def story_of(seed):
    """A life's events, each with a seed of its own; every life has other things happen often."""
    rng = random.Random(seed)
    usual = {event: (OFTEN | SELDOM).get(event, 1.0) for event in EVENTS}
    weights = [weight * rng.choice([0.2, 1, 1, 2]) for weight in usual.values()]
    events = rng.choices(list(usual), weights, k=rng.randint(20, 200))
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
