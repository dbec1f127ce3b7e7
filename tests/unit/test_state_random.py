"""The lifecycle machine under random events: whatever happens in whatever order, a few things hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

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


class Life(RuleBasedStateMachine):
    """One cluster: engines that come and go, a kernel that runs cells, roads with delays.

    What an engine says arrives in its own order, and so does what the zygote says; the two roads
    know nothing of one another.
    """

    # ---- the world around the machine

    @initialize(
        size=st.integers(1, 4),
        policy=st.sampled_from(["refill", "refill", "shrink"]),
        min_world=st.sampled_from([1, 1, 2]),
        max_restarts=st.integers(1, 4),
    )
    def begin(self, size, policy, min_world, max_restarts):
        self.config = ClusterConfig(
            num_engines=size,
            policy=policy,
            min_world=min(size, min_world),
            max_restarts=max_restarts,
        )
        self.machine = Machine(self.config)
        self.now, self.next_pid, self.next_cell, self.journal = 100.0, 1, 0, 0
        self.engines, self.to_start, self.zygote = {}, deque(), deque()
        self.reported_dead, self.told_to_end = set(), set()
        self.last_generation, self.formed_with, self.was_taken_over = 0, set(), False
        self.asked, self.withdrawn, self.open_cells, self.answers = [], set(), set(), {}
        self.machine.start(self.now)
        self.carry_out()

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
                    order = od.ReplayJournal(
                        entries=(), until=until, rank=rank, world_size=world_size
                    )
                    self.tell(slot, order)
                case do.AdmitCell() | do.RefuseCell():
                    self.answer(instruction)
                case do.Notify(notice):
                    self.check_notice(notice)

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
            self.machine.gate.end(cell)
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

    def alive(self):
        return [e for e in self.engines.values() if e.is_alive]

    # ---- engines

    @precondition(lambda self: self.to_start)
    @rule()
    def fork(self):
        slot, pid = self.to_start.popleft(), self.next_pid
        self.next_pid += 1
        engine = self.engines[pid] = Engine(slot, pid)
        self.zygote.append(ev.EngineForked(slot=slot, pid=pid))
        engine.outbox.append(engine.hello)

    @precondition(lambda self: self.to_start)
    @rule()
    def fail_to_fork(self):
        event = ev.EngineStartFailed(slot=self.to_start.popleft(), reason="no memory")
        self.machine.start_failed(event, self.now)
        self.carry_out()

    @precondition(lambda self: any(e.inbox for e in self.alive()))
    @rule(data=st.data(), goes_well=st.integers(0, 9))
    def obey(self, data, goes_well):
        engines = [e for e in self.alive() if e.inbox]
        self.carry_out_order(data.draw(st.sampled_from(engines)), goes_well=goes_well > 0)

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

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), signal=st.sampled_from(["SIGKILL", "SIGSEGV", None]))
    def die(self, data, signal):
        self.end(data.draw(st.sampled_from(self.alive())), signal)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), waits=st.booleans())
    def beat(self, data, waits):
        engine = data.draw(st.sampled_from(self.alive()))
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

    @precondition(lambda self: any(e.group for e in self.alive()))
    @rule(data=st.data())
    def fail_in_a_collective(self, data):
        engine = data.draw(st.sampled_from([e for e in self.alive() if e.group]))
        event = ev.CollectiveFailed(
            slot=engine.slot, pid=engine.pid, generation=engine.group, error="reset"
        )
        engine.outbox.append(event)

    @precondition(lambda self: any(e.cell for e in self.alive()))
    @rule(data=st.data())
    def raise_in_a_cell(self, data):
        engine = data.draw(st.sampled_from([e for e in self.alive() if e.cell]))
        engine.outbox.append(ev.CellFailedOnRank(slot=engine.slot, cell=engine.cell))
        engine.cell = None

    # ---- roads

    @precondition(lambda self: self.zygote)
    @rule()
    def hear_zygote(self):
        event = self.zygote.popleft()
        if isinstance(event, ev.EngineForked):
            self.machine.forked(event)
        else:
            self.reported_dead.add(event.pid)
            self.machine.exited(event, self.now)
        self.carry_out()

    @precondition(lambda self: self.vanished())
    @rule()
    def look_at_processes(self):
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

    @precondition(lambda self: any(e.outbox for e in self.engines.values()))
    @rule(data=st.data())
    def hear_engine(self, data):
        engines = [e for e in self.engines.values() if e.outbox]
        self.hear(data.draw(st.sampled_from(engines)))

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

    @rule(seconds=st.sampled_from([0.0, 0.3, 4.0, 20.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.machine.tick(self.now)
        self.carry_out()

    # ---- the kernel

    @precondition(lambda self: len(self.asked) - len(self.answers) < 5)
    @rule(ranks=st.sampled_from([None, None, (0,), (1,), (0, 5), ()]))
    def begin_cell(self, ranks):
        cell = f"c{self.next_cell}"
        self.next_cell += 1
        self.asked.append(cell)
        self.machine.begin_cell(cell, ranks, self.now)
        self.carry_out()

    @precondition(lambda self: self.open_cells)
    @rule(data=st.data(), succeeded=st.booleans())
    def end_cell(self, data, succeeded):
        cell = data.draw(st.sampled_from(sorted(self.open_cells)))
        self.finish(cell, entries=int(succeeded))

    def finish(self, cell, entries=0):
        self.open_cells.discard(cell)
        self.journal += entries
        for engine in self.engines.values():
            if engine.cell == cell:
                engine.cell = None
        self.machine.end_cell(cell, self.journal, self.now)
        self.carry_out()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def withdraw_cell(self, data):
        cell = data.draw(st.sampled_from(self.waiting()))
        self.withdrawn.add(cell)
        self.machine.end_cell(cell, self.journal, self.now)
        self.carry_out()

    def waiting(self):
        return [c for c in self.asked if c not in self.answers and c not in self.withdrawn]

    @precondition(lambda self: self.open_cells)
    @rule(data=st.data())
    def interrupt(self, data):
        self.machine.interrupt(data.draw(st.sampled_from(sorted(self.open_cells))), self.now)
        self.carry_out()

    @rule(size=st.integers(1, MAX_SEATS))
    def scale(self, size):
        self.machine.scale(size, self.now)
        self.carry_out()

    @rule()
    def take_over(self):
        """The supervisor ends, another one takes up; starts that were not carried out are lost."""
        view, self.was_taken_over = view_of(self.machine), True
        waiting, self.to_start = self.waiting(), deque()
        self.zygote = deque(e for e in self.zygote if isinstance(e, ev.EngineExited))
        self.machine = Machine(self.config)
        self.machine.take_up(view, self.journal, self.now)
        self.machine.gate.open |= self.open_cells
        self.carry_out()
        self.machine.adopt({e.pid: e.slot for e in self.alive()})
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

    @invariant()
    def nothing_piles_up(self):
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        assert len(machine.gate.waiting) <= len(self.asked) - len(self.answers)
        assert set(machine.gate.failed) <= machine.gate.open
        assert machine.gate.open == self.open_cells
        assert machine.awaited <= set(machine.seats)
        assert bool(machine.awaited) <= (machine.phase in (Phase.BREAKING, Phase.FORMING))
        assert len(machine.seats) <= MAX_SEATS + 4

    @invariant()
    def healthy_means_healthy(self):
        if hasattr(self, "machine") and self.machine.is_healthy:
            machine = self.machine
            assert machine.phase is Phase.RUNNING
            assert machine.membership.slots == tuple(range(machine.size))
            for member in machine.membership.members:
                assert machine.seats[member.slot].pid == member.pid
                assert member.pid not in self.reported_dead | self.told_to_end

    @invariant()
    def the_view_can_be_told(self):
        if hasattr(self, "machine"):
            view_of(self.machine, with_beats=True)

    def teardown(self):
        """Deaths stop, everybody does what it is asked to: the world comes to rest, and all is answered."""
        if not hasattr(self, "machine"):
            return
        for _ in range(2_000):
            if not self.step():
                break
        else:
            pytest.fail("the world does not come to rest")
        machine = self.machine
        assert not self.waiting()
        assert not machine.gate.waiting
        if machine.phase is Phase.FAILED:
            assert "%dist_reset" in machine.why_failed
            return
        assert machine.phase is Phase.RUNNING
        empty = (SeatState.EMPTY, SeatState.GIVEN_UP)
        states = {s.state for s in machine.seats.values()}
        assert states <= {SeatState.MEMBER, *empty}
        assert set(machine.seats) == set(range(machine.size))
        assert machine.is_healthy == (states == {SeatState.MEMBER})
        if self.config.policy == "refill":
            assert SeatState.EMPTY not in states
        if not self.was_taken_over:
            assert all(i.generation_after is not None for i in machine.story.incidents)
        living = {e.pid for e in self.alive()}
        assert living == {m.pid for m in machine.membership.members}

    def step(self):
        """Whatever is next when nothing goes wrong any more; False at rest."""
        if self.to_start:
            self.fork()
        elif self.zygote:
            self.hear_zygote()
        elif engines := [e for e in self.engines.values() if e.outbox]:
            self.hear(engines[0])
        elif engines := [e for e in self.alive() if e.inbox]:
            self.carry_out_order(engines[0])
        elif self.open_cells:
            self.finish(min(self.open_cells))
        elif self.vanished():
            self.look_at_processes()
        else:
            return False
        return True


def test_a_cluster_survives_whatever_happens_in_whatever_order():
    """Random deaths, cells, sizes, delays and takeovers: no error, no false group, everything is answered."""
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=150,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
