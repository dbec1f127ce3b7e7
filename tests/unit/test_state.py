"""The lifecycle machine: events in, instructions out; no process, no clock, no sleep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from nbdist.config import ClusterConfig
from nbdist.errors import named_error
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.story import ROWS
from nbdist.supervisor import instructions as do
from nbdist.supervisor.deadlines import (
    FORM_LIMIT_S,
    RESTORE_LIMIT_S,
    STAND_LIMIT_S,
    UNBLOCK_LIMIT_S,
)
from nbdist.supervisor.gate import ENDED_S, RELEASE_AFTER_S
from nbdist.supervisor.roster import REPLAY_LIMIT_S
from nbdist.supervisor.seats import Seat, SeatState
from nbdist.supervisor.state import MAX_FORM_FAILURES, Machine, Phase
from nbdist.supervisor.view import view_of

MOMENT = 1e-3


class World:
    """A machine, the time, and all that the machine said; an event returns what it caused."""

    def __init__(self, num_engines=3, *, machine=None, **settings):
        self.config = ClusterConfig(num_engines=num_engines, **settings)
        self.machine = machine or Machine(self.config)
        self.now = 100.0
        self.said = []
        self.first = []
        self.names = {}
        """Slot -> digests, for `settle`; a slot that is missing has none."""
        self.pids = itertools.count(101)

    def _heard(self):
        new = self.machine.take()
        for form in only(new, do.Form):
            earlier = [f.membership.generation for f in only(self.said, do.Form)]
            assert form.membership.generation > max(earlier, default=0)
        self.said += new
        return new

    # ---- what is asked of it

    @property
    def phase(self):
        return self.machine.phase.value

    @property
    def generation(self):
        return self.machine.generation

    @property
    def slots(self):
        return self.machine.membership.slots

    @property
    def states(self):
        return {int(s): seat.state.value for s, seat in sorted(self.machine.seats.items())}

    @property
    def incidents(self):
        return list(self.machine.story.incidents)

    def seat(self, slot):
        return self.machine.seats[slot]

    def pid(self, slot):
        return self.machine.seats[slot].pid

    # ---- events, one each

    def start(self):
        self.machine.start(self.now)
        return self._heard()

    def scale(self, size):
        self.machine.scale(size, self.now)
        return self._heard()

    def fork(self, slot, pid=None):
        self.machine.forked(ev.EngineForked(slot=slot, pid=pid or next(self.pids)))
        return self._heard()

    def hello(self, slot, pid=None, *, replayed=0, generation=0):
        pid = pid or self.pid(slot)
        event = ev.EngineHello(
            slot=slot,
            pid=pid,
            engine_id=pid,
            host="here",
            generation=generation,
            device="cpu",
            replayed=replayed,
        )
        self.machine.hello(event, self.now)
        return self._heard()

    def replay_begins(self, slot, cell="c1"):
        event = ev.ReplayBegins(slot=slot, pid=self.pid(slot), cell=cell, first_line="f()")
        self.machine.replay_begins(event)
        return self._heard()

    def replayed(self, slot, pid=None, *failed):
        event = ev.JournalReplayed(slot=slot, pid=pid or self.pid(slot), failed=failed)
        self.machine.replayed(event, self.now)
        return self._heard()

    def die(self, slot, pid=None, *, signal="SIGKILL", code=None, detector="zygote", ago=0.0):
        event = ev.EngineExited(
            slot=slot,
            pid=pid or self.pid(slot),
            signal=signal,
            exit_code=code,
            detector=detector,
            at=self.now - ago,
        )
        self.machine.exited(event, self.now)
        return self._heard()

    def start_failed(self, slot, reason="no process could be made"):
        self.machine.start_failed(ev.EngineStartFailed(slot=slot, reason=reason), self.now)
        return self._heard()

    def broken(self, slot, generation=None):
        generation = self.generation if generation is None else generation
        event = ev.GroupBroken(slot=slot, pid=self.pid(slot), generation=generation)
        self.machine.broken(event, self.now)
        return self._heard()

    def formed(self, slot, generation=None, *, cuttable=True, step=None):
        generation = self.generation if generation is None else generation
        event = ev.GroupFormed(
            slot=slot, pid=self.pid(slot), generation=generation, cuttable=cuttable, step=step
        )
        self.machine.formed(event, self.now)
        return self._heard()

    def form_failed(self, slot, generation=None, error="no route"):
        generation = self.generation if generation is None else generation
        event = ev.GroupFormFailed(
            slot=slot, pid=self.pid(slot), generation=generation, error=error
        )
        self.machine.form_failed(event, self.now)
        return self._heard()

    def fingerprint(self, slot, digests=None, generation=None):
        generation = self.generation if generation is None else generation
        event = ev.NamesFingerprinted(slot=slot, generation=generation, digests=digests or {})
        self.machine.handed_over(event, self.now)
        return self._heard()

    def offered(self, slot, failed=None, generation=None):
        generation = self.generation if generation is None else generation
        event = ev.NamesOffered(
            slot=slot, generation=generation, sha256="ab", num_bytes=7, failed=failed or {}
        )
        self.machine.handed_over(event, self.now)
        return self._heard()

    def received(self, slot, failed=None, generation=None):
        generation = self.generation if generation is None else generation
        event = ev.NamesReceived(slot=slot, generation=generation, failed=failed or {})
        self.machine.handed_over(event, self.now)
        return self._heard()

    def collective_failed(self, slot, generation=None, error="reset by peer"):
        generation = self.generation if generation is None else generation
        event = ev.CollectiveFailed(
            slot=slot, pid=self.pid(slot), generation=generation, error=error
        )
        self.machine.collective_failed(event, self.now)
        return self._heard()

    def cell_failed(self, slot, cell):
        self.machine.cell_failed(ev.CellFailedOnRank(slot=slot, cell=cell), self.now)
        return self._heard()

    def begin(self, cell="c1", ranks=None):
        self.machine.begin_cell(cell, ranks, self.now)
        return self._heard()

    def end(self, cell="c1", journal=0):
        self.machine.end_cell(cell, journal, self.now)
        return self._heard()

    def interrupt(self, cell="c1"):
        self.machine.interrupt(cell, self.now)
        return self._heard()

    # ---- a run

    def say(self, kind, slot, **more):
        """A member reports of the run."""
        run = self.machine.runs.present
        about = {"run": run.spec.run} if run is not None and "cell" not in more else {}
        event = kind(slot=slot, pid=self.pid(slot), **about | more)
        self.machine.run_says(event, self.now)
        return self._heard()

    def train(self, steps=9, step=0, **bound):
        """A run goes on all members."""
        assert self.machine.begin_run("r", rn.BeginRun(name="t", steps=steps), self.now) == ""
        for slot in self.slots:
            self.say(rn.RunBound, slot, step=step, **bound)
        assert self.machine.runs.is_going

    def loop(self, cell="c1", steps=9):
        """A cell's own loop goes on all members."""
        self.begin(cell)
        for slot in self.slots:
            self.say(rn.RunEntered, slot, cell=cell, loop=0, step=0, steps=steps)
        assert self.machine.runs.is_going

    def held(self, slot, step):
        number = self.machine.runs.present.number
        return self.say(rn.RunHeld, slot, generation=self.generation, step=step, number=number)

    def stand(self, step):
        for slot in self.slots:
            self.held(slot, step)

    def commit(self, *steps):
        data = [(s, 0.5, 60, 0.1, self.generation, 2, 0.1, self.now) for s in steps]
        event = rn.StepsCommitted(slot=0, run="r", rows=np.array(data, ROWS).tobytes())
        self.machine.committed(event, self.now)
        return self._heard()

    def steer(self, action, steps=0):
        order = rn.SteerRun(run="r", action=action, steps=steps)
        assert self.machine.steer_run(order, self.now) == ""
        return self._heard()

    def beat(self, slot, *, cell=None, waits=None, pid=None, **more):
        """`waits`: for how long the main thread has stood in a collective; None: it does not."""
        where = None
        if waits is not None:
            where = ev.Where(
                operation="all_reduce", line="cell line 2: f()", since_s=self.now - waits
            )
        event = ev.Beat(
            slot=slot,
            pid=pid or self.pid(slot),
            number=1,
            generation=self.generation,
            cell=cell,
            waiting=where,
            rss_bytes=1,
            **more,
        )
        self.machine.beat(event, self.now)

    def tick(self, seconds=0.0):
        self.now += seconds
        self.machine.tick(self.now)
        return self._heard()

    def kill(self, slot, why="hung"):
        self.machine.kill(self.seat(slot), why)
        return self._heard()

    def fail(self, reason="the controller ended"):
        self.machine.fail(reason, self.now)
        return self._heard()

    # ---- several events at once

    def up(self, slot):
        """A process comes up on a seat and says hello."""
        self.fork(slot)
        return self.hello(slot)

    def ready(self, slot):
        """A process comes up on a seat and has the journal."""
        self.up(slot)
        return self.replayed(slot)

    def settle(self, step=None):
        """Every member does what it is asked to, until there is nothing more to answer."""
        begin = len(self.said)
        for _ in range(30):
            if self.phase == "breaking" and self.machine.awaited:
                self.broken(min(self.machine.awaited))
            elif self.phase == "forming":
                self.formed(min(self.machine.awaited), step=step)
            elif self.phase == "restoring":
                for slot in self.slots:
                    self.fingerprint(slot, self.names.get(slot))
                self.hand_over()
            else:
                break
        return self.said[begin:]

    def hand_over(self):
        """Donor and newcomers do their part of a hand-over."""
        offers = [t for t in only(self.said, do.Tell) if isinstance(t.order, od.OfferNames)]
        if self.phase == "restoring" and offers:
            told = self.offered(offers[-1].slot)
            for tell in only(told, do.Tell):
                self.received(tell.slot)

    @classmethod
    def running(cls, num_engines=3, **settings):
        """A world whose first group runs."""
        world = cls(num_engines, **settings)
        world.start()
        for slot in range(num_engines):
            world.ready(slot)
        world.settle()
        assert world.phase == "running"
        assert world.machine.is_healthy
        return world


def only(instructions, kind):
    """Instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def orders(instructions, kind):
    """Slot -> order of one kind that is told."""
    return {t.slot: t.order for t in only(instructions, do.Tell) if isinstance(t.order, kind)}


def admitted(instructions):
    """Cells that are admitted, in order."""
    return [a.cell for a in only(instructions, do.AdmitCell)]


def notices(instructions, kind):
    """Notices of one kind to the kernel."""
    return [n.notice for n in only(instructions, do.Notify) if isinstance(n.notice, kind)]


# ---- start


def test_the_start_asks_for_an_engine_on_every_seat():
    """Starting means one engine for each seat, and nothing else."""
    world = World(3)
    assert world.start() == [do.StartEngine(0), do.StartEngine(1), do.StartEngine(2)]
    assert world.states == {0: "starting", 1: "starting", 2: "starting"}
    assert (world.phase, world.generation) == ("starting", 0)


def test_the_first_group_forms_when_all_are_ready_and_not_before():
    """Generation 1 is ordered once, when the last engine is ready, with everybody in slot order."""
    world = World(3)
    world.start()
    assert only(world.ready(2) + world.ready(0), do.Form) == []
    (form,) = only(world.ready(1), do.Form)
    members = form.membership.members
    assert form.membership.generation == 1
    assert [(m.slot, m.pid, m.engine_id, m.host) for m in members] == [
        (0, world.pid(0), world.pid(0), "here"),
        (1, world.pid(1), world.pid(1), "here"),
        (2, world.pid(2), world.pid(2), "here"),
    ]
    assert world.phase == "forming"
    assert not world.machine.is_healthy


def test_the_first_group_runs_when_all_are_in_it_without_a_hand_over():
    """In generation 1 nobody has anything to hand over: all formed means running."""
    world = World(2)
    world.start()
    world.ready(0)
    world.ready(1)
    world.formed(0)
    assert world.phase == "forming"
    said = world.formed(1)
    assert (world.phase, said) == ("running", [])
    assert world.machine.is_healthy
    assert world.machine.reason == ""
    assert world.incidents == []


def test_a_newcomer_is_told_its_rank_among_those_that_come():
    """The replay at the start names each one's rank and the world's size."""
    world = World(3)
    world.start()
    (replay,) = only(world.up(2), do.Replay)
    assert (replay.slot, replay.since, replay.until) == (2, 0, 0)
    assert (replay.rank, replay.world_size) == (2, 3)


def test_what_the_replay_could_not_run_is_kept_with_the_seat():
    """A cell that fails in the replay is listed as not restored."""
    world = World.running(2)
    world.die(1)
    world.broken(0)
    world.settle()
    world.up(1)
    world.replayed(1, None, "cell 'f()': NameError")
    world.settle()
    assert world.seat(1).not_restored == {"cell 'f()': NameError": "its cell failed in the replay"}
    assert world.incidents[-1].not_restored == world.seat(1).not_restored


def test_an_engine_that_dies_while_starting_is_started_again():
    """While the world starts, a death costs a new process and no incident."""
    world = World(2)
    world.start()
    world.ready(0)
    world.up(1)
    assert world.die(1) == [do.StartEngine(1)]
    (form,) = only(world.ready(1), do.Form)
    assert form.membership.slots == (0, 1)
    assert world.incidents == []


def test_an_engine_that_was_ready_and_dies_before_the_first_group_is_started_again():
    """A ready engine's death takes its readiness with it."""
    world = World(2)
    world.start()
    world.ready(0)
    assert world.die(0) == [do.StartEngine(0)]
    assert only(world.ready(1), do.Form) == []
    assert only(world.ready(0), do.Form)


def test_a_process_that_cannot_be_made_is_tried_again_and_then_given_up():
    """Failed starts count like deaths; at the limit the start fails and says why and what to do."""
    world = World(1, max_restarts=2)
    world.start()
    assert world.start_failed(0, "fork: no memory") == [do.StartEngine(0)]
    world.start_failed(0, "fork: no memory")
    assert world.phase == "failed"
    assert "fork: no memory" in world.machine.why_failed
    assert "%dist_reset" in world.machine.why_failed


def test_a_failed_start_of_a_seat_that_is_gone_is_ignored():
    """A report about a slot that has no seat changes nothing."""
    world = World.running(2)
    assert world.start_failed(7) == []


def test_an_engine_that_is_not_ready_in_time_is_killed_once():
    """The start timeout kills the process; its exit starts another one with a fresh clock."""
    world = World(2, start_timeout_s=5.0)
    world.start()
    world.ready(0)
    world.fork(1)
    pid = world.pid(1)
    assert world.tick(5.0) == []
    (kill,) = world.tick(MOMENT)
    assert (kill.slot, kill.pid) == (1, pid)
    assert "5 s" in kill.why
    assert world.tick(6.0) == []
    assert world.die(1) == [do.StartEngine(1)]
    world.fork(1)
    assert world.tick(4.9) == []
    assert only(world.tick(0.2), do.KillEngine)


def test_a_process_that_never_comes_is_asked_for_again_and_then_given_up():
    """The zygote does not answer: a try within the start timeout each, and failed at the limit."""
    world = World(1, start_timeout_s=5.0, max_restarts=2)
    world.start()
    assert world.tick(5.1) == [do.StartEngine(0)]
    world.tick(5.1)
    assert world.phase == "failed"
    assert "2 times" in world.machine.why_failed


def test_a_replay_that_does_not_end_is_ended():
    """A cell that never ends in the replay costs the newcomer, and not the cluster."""
    world = with_empty_seat()
    world.up(1)
    pid = world.pid(1)
    assert world.tick(REPLAY_LIMIT_S) == []
    assert [k.pid for k in world.tick(1.0)] == [pid]
    assert world.die(1) == [do.StartEngine(1)]


def test_engines_that_never_become_ready_are_given_up():
    """After `max_restarts` ends in a row the start fails, naming slot and last end."""
    world = World(2, max_restarts=3)
    world.start()
    world.ready(0)
    for _ in range(3):
        world.fork(1)
        world.die(1, signal=None, code=3)
    assert world.phase == "failed"
    for part in ("slot 1", "3 times", "exit code 3", "%dist_reset", "%dist_init"):
        assert part in world.machine.why_failed


# ---- strangers and late reports


@pytest.mark.parametrize("slot", [1, 5])
def test_a_stranger_that_says_hello_is_killed(slot):
    """Whoever says hello for a seat on which another engine sits, or for no seat, is ended."""
    world = World.running(2)
    (kill,) = world.hello(slot, 666)
    assert (kill.slot, kill.pid) == (slot, 666)
    assert kill.why
    assert world.machine.is_healthy


def test_a_process_forked_for_a_seat_that_is_gone_is_killed():
    """A fork that comes after its seat was given back ends at once."""
    world = World(2)
    world.start()
    world.ready(0)
    world.scale(1)
    (kill,) = world.fork(1, 666)
    assert (kill.slot, kill.pid) == (1, 666)


def test_late_exit_reports_are_ignored():
    """Only the first report of an exit counts: one of an older process changes nothing."""
    world = World.running(2)
    old = world.pid(1)
    world.die(1)
    assert world.die(1, old, detector="pidfd") == []
    world.up(1)
    assert world.die(1, old, detector="hub") == []
    assert world.states[1] == "replaying"
    assert len(world.incidents) == 1


def test_a_late_replay_report_is_ignored():
    """A dead engine's report that it has the journal does not make its successor ready."""
    world = World.running(2)
    world.die(1)
    world.up(1)
    old = world.pid(1)
    world.die(1)
    world.up(1)
    world.replayed(1, old)
    assert world.states[1] == "replaying"


def test_a_second_process_on_a_seat_does_not_stop_the_seat_from_being_filled():
    """Down and up again may fork twice for one seat: one engine is kept, the other killed."""
    world = World.running(1)
    world.scale(2)
    world.scale(1)
    assert world.scale(2) == [do.StartEngine(1)]
    world.fork(1, 901)
    world.hello(1, 901)
    said = world.fork(1, 902) + world.hello(1, 902)
    killed = {k.pid for k in only(said, do.KillEngine)}
    assert len(killed) == 1
    (kept,) = {901, 902} - killed
    assert world.pid(1) == kept
    world.die(1, *killed)
    world.replayed(1, kept)
    world.settle()
    assert world.machine.is_healthy
    assert world.slots == (0, 1)


def test_the_hello_of_a_dead_engine_does_not_stop_its_seat_from_being_filled():
    """Hello and exit travel on two roads: a hello after the exit must not block the seat."""
    world = World.running(2)
    world.die(1)
    world.broken(0)
    world.settle()
    world.fork(1, 901)
    world.die(1, 901)
    world.hello(1, 901)
    world.fork(1, 902)
    assert only(world.hello(1, 902), do.Replay)
    world.replayed(1, 902)
    world.settle()
    assert world.machine.is_healthy
    assert world.pid(1) == 902


@pytest.mark.parametrize("event", ["broken", "formed", "form_failed", "collective_failed"])
def test_reports_of_an_old_generation_are_ignored(event):
    """What still carries an old generation has no effect on a running world."""
    world = World.running(2)
    world.collective_failed(0)
    world.settle()
    assert world.generation == 2
    assert getattr(world, event)(1, 1) == []
    assert world.machine.is_healthy


@pytest.mark.parametrize("event", ["broken", "formed"])
def test_reports_of_an_old_generation_do_not_count_while_members_are_awaited(event):
    """Breaking and forming wait for reports of the present generation."""
    world = World.running(2)
    world.collective_failed(0)
    world.settle()
    world.collective_failed(0)
    if event == "formed":
        world.broken(0)
        world.broken(1)
    getattr(world, event)(0, 1)
    assert world.machine.awaited == {0, 1}


# ---- losses


def test_a_loss_is_told_at_once_and_breaks_the_group():
    """The kernel is told who died, survivors leave, the seat is filled again."""
    world = World.running(3)
    pid = world.pid(1)
    said = world.die(1, ago=0.25)
    (lost,) = notices(said, od.EngineLost)
    assert (lost.slot, lost.rank, lost.pid, lost.signal) == (1, 1, pid, "SIGKILL")
    assert "out of memory" in lost.guess
    (released,) = notices(said, od.RanksReleased)
    assert released.generation == 1
    breaks = orders(said, od.BreakGroup)
    assert set(breaks) == {0, 2}
    assert {b.generation for b in breaks.values()} == {1}
    assert do.StartEngine(1) in said
    assert world.phase == "breaking"
    assert "rank 1 (slot 1)" in world.machine.reason


def test_survivors_go_on_without_waiting_for_the_newcomer():
    """The next group is formed by the survivors as soon as all have left, with dense ranks."""
    world = World.running(3)
    world.die(1)
    assert world.broken(0) == []
    (form,) = only(world.broken(2), do.Form)
    assert form.membership.generation == 2
    assert form.membership.slots == (0, 2)
    assert form.membership.rank_of(2) == 1
    world.settle()
    assert world.phase == "running"
    assert not world.machine.is_healthy


@pytest.mark.parametrize(("policy", "others_come"), [("refill", True), ("shrink", False)])
def test_survivors_are_told_whether_their_group_is_to_grow(policy, others_come):
    """Where a seat is being filled it does, and when it is filled nobody else is to come."""
    world = World.running(3, policy=policy)
    world.die(1)
    said = world.broken(0) + world.broken(2)
    (form,) = only(said, do.Form)
    assert form.others_come is others_come
    world.settle()
    if not others_come:
        world.scale(3)
    world.ready(1)
    world.settle()
    assert [f.others_come for f in only(world.said, do.Form)][-1] is False
    assert world.slots == (0, 1, 2)


def test_a_refilled_seat_has_its_old_rank_again():
    """After the refill ranks are places among the occupied slots: everybody has the old one."""
    world = World.running(3)
    world.die(1)
    world.broken(0)
    world.broken(2)
    world.settle()
    (replay,) = only(world.up(1), do.Replay)
    assert (replay.rank, replay.world_size) == (1, 3)
    world.replayed(1)
    world.settle()
    assert world.machine.is_healthy
    assert [world.machine.membership.rank_of(s) for s in (0, 1, 2)] == [0, 1, 2]
    assert world.generation == 3


def test_the_predicted_rank_is_the_old_one_when_two_seats_are_refilled():
    """The replay's rank counts every seat that is being filled, ready or not."""
    world = World.running(4)
    world.die(1)
    world.die(2)
    world.broken(0)
    world.broken(3)
    world.settle()
    (second,) = only(world.up(2), do.Replay)
    (first,) = only(world.up(1), do.Replay)
    assert (second.rank, second.world_size) == (2, 4)
    assert (first.rank, first.world_size) == (1, 4)


def test_a_seat_that_was_given_up_says_why_we_killed_its_engine():
    """A signal alone would not tell the user what to mend."""
    world = World.running(2, max_restarts=1)
    world.machine.kill(world.machine.seats[1], "its trainer is another: KeyError: 'x'")
    world.die(1)
    why = world.machine.seats[1].not_restored["(the seat)"]
    assert why.endswith("last: SIGKILL, its trainer is another: KeyError: 'x'")


def test_the_predicted_rank_leaves_out_a_seat_that_was_given_up():
    """Nobody will sit there, so that it takes no rank."""
    world = World.running(3, max_restarts=2)
    world.die(0)
    world.settle()
    world.fork(0)
    world.die(0)
    assert world.states[0] == "given up"
    world.die(1)
    world.settle()
    (replay,) = only(world.up(1), do.Replay)
    assert (replay.rank, replay.world_size) == (0, 2)


def test_the_predicted_world_leaves_out_a_seat_that_is_given_back():
    """The newcomer joins a world that the leaver has left."""
    world = with_empty_seat(3, 0)
    world.begin("c1")
    world.scale(2)
    assert world.states[2] == "leaving"
    (replay,) = only(world.up(0), do.Replay)
    assert (replay.rank, replay.world_size) == (0, 2)


def test_two_losses_at_once_are_one_break():
    """A second death while the group breaks is told, and is not waited for."""
    world = World.running(3)
    world.die(0)
    said = world.die(2)
    (lost,) = notices(said, od.EngineLost)
    assert (lost.slot, lost.rank) == (2, 2)
    assert notices(said, od.RanksReleased) == []
    (form,) = only(world.broken(1), do.Form)
    assert form.membership.slots == (1,)
    assert [i.kind for i in world.incidents] == ["lost", "lost"]


def test_the_last_report_may_be_a_death():
    """The one member that is still awaited dies: the others go on at once."""
    world = World.running(3)
    world.die(0)
    world.broken(1)
    (form,) = only(world.die(2), do.Form)
    assert form.membership.slots == (1,)


def test_a_loss_while_forming_breaks_the_new_group():
    """A group that loses a member while it forms is left, and the one after is formed."""
    world = World.running(3)
    world.collective_failed(0)
    for slot in range(3):
        world.broken(slot)
    world.formed(0)
    said = world.die(2)
    assert {b.generation for b in orders(said, od.BreakGroup).values()} == {2}
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    world.broken(0)
    (form,) = only(world.broken(1), do.Form)
    assert (form.membership.generation, form.membership.slots) == (3, (0, 1))


def test_a_loss_while_restoring_breaks_the_new_group():
    """A survivor dies in the hand-over: the newcomer is given things again in the next group."""
    world = with_newcomer(3, 1)
    assert world.phase == "restoring"
    said = world.die(2)
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    world.broken(0)
    world.broken(1)
    said = world.formed(0) + world.formed(1)
    assert set(orders(said, od.FingerprintNames)) == {0, 1}


def test_all_lost_fails_and_says_what_to_do():
    """Nobody holds the variables any more: failed, with a reason that names the way out."""
    world = World.running(2)
    world.die(0)
    world.die(1)
    assert world.phase == "failed"
    assert "nobody holds the variables" in world.machine.why_failed
    assert "%dist_reset" in world.machine.why_failed
    assert not world.machine.is_healthy


def test_a_newcomer_alone_does_not_carry_on():
    """A ready newcomer is no holder: when the last holder dies the world has failed."""
    world = World.running(2)
    world.die(1)
    world.begin("c1")
    world.broken(0)
    world.settle()
    world.up(1)
    world.replayed(1)
    world.die(0)
    assert world.phase == "failed"


def test_in_failure_nothing_is_started_formed_or_admitted():
    """Only a shutdown leads out of failed: deaths, newcomers, cells and scaling start nothing."""
    world = World.running(3)
    world.fail("the controller ended")
    assert world.die(1) == []
    (refused,) = world.begin("c1")
    assert (refused.cell, refused.kind) == ("c1", "RecoveryFailed")
    assert "the controller ended" in refused.message
    assert "%dist_reset" in refused.message
    assert type(named_error(refused.kind, "")).__name__ == "RecoveryFailed"
    assert only(world.scale(4), do.StartEngine) == []
    assert world.collective_failed(0) == []
    assert world.tick(100.0) == []
    assert world.phase == "failed"


def test_cells_that_wait_are_refused_when_the_world_fails():
    """Nobody is left waiting at the door of a failed world."""
    world = World.running(2)
    world.die(0)
    assert world.begin("c1") == []
    (refused,) = only(world.die(1), do.RefuseCell)
    assert (refused.cell, refused.kind) == ("c1", "RecoveryFailed")


def test_a_death_in_the_first_group_does_not_end_the_start():
    """While the first group forms nothing is held yet: another engine is started."""
    world = World(1)
    world.start()
    world.ready(0)
    assert world.phase == "forming"
    assert do.StartEngine(0) in world.die(0)
    assert world.phase != "failed"
    world.ready(0)
    world.settle()
    assert world.machine.is_healthy


# ---- policy in the machine


def test_policy_shrink_leaves_the_seat_empty_until_it_is_asked_for():
    """Shrink: no new process after a loss; scaling to the old size fills the seat."""
    world = World.running(3, policy="shrink")
    assert only(world.die(1), do.StartEngine) == []
    assert world.states[1] == "empty"
    world.settle()
    assert (world.phase, world.slots) == ("running", (0, 2))
    assert world.scale(3) == [do.StartEngine(1)]
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy


def test_with_too_few_survivors_newcomers_are_waited_for():
    """Below `min_world` no group is formed until enough seats are filled."""
    world = World.running(3, min_world=2)
    world.die(1)
    world.die(2)
    assert only(world.broken(0), do.Form) == []
    assert "min_world=2" in world.machine.reason
    (form,) = only(world.ready(2), do.Form)
    assert form.membership.slots == (0, 2)


def test_with_too_few_survivors_and_nobody_coming_the_world_fails():
    """Below `min_world` with no seat being filled, recovery fails and says both numbers."""
    world = World.running(2, min_world=2, policy="shrink")
    world.die(1)
    world.broken(0)
    assert world.phase == "failed"
    assert "only 1 left, min_world=2" in world.machine.why_failed


def test_a_seat_given_up_while_enough_are_waited_for_fails_the_world():
    """The last seat that could have filled the world is given up: nobody waits for ever."""
    world = World.running(2, min_world=2, max_restarts=2)
    world.die(1)
    world.broken(0)
    assert world.phase == "breaking"
    world.fork(1)
    world.die(1)
    assert world.phase == "failed"


def test_a_seat_is_given_up_and_the_world_is_not_healthy():
    """A seat whose engines end too often stays empty; the others run, and healthy stays False."""
    world = World.running(2, max_restarts=3)
    world.die(1)
    world.settle()
    for _ in range(2):
        world.fork(1)
        said = world.die(1, signal="SIGSEGV")
    assert said == []
    assert world.states[1] == "given up"
    assert world.phase == "running"
    assert not world.machine.is_healthy
    assert "3 times" in view_of(world.machine).reason
    assert "SIGSEGV" in view_of(world.machine).reason


def test_a_cell_that_ends_who_replays_it_is_forgotten():
    """One end in its replay may be anybody's doing; with the second in a row the cell is replayed
    no more, the seat has all its tries again, and newcomers say what they lack."""
    world = World.running(2, max_restarts=3)
    world.die(1)
    world.settle()
    for expected in ([], [do.ForgetCell("c1")]):
        world.fork(1)
        world.hello(1)
        world.replay_begins(1)
        assert world.die(1) == [*expected, do.StartEngine(1)]
    assert world.seat(1).restarts == 1
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy
    assert list(world.seat(1).not_restored) == ["cell 'f()'"]
    assert "replayed no more" in world.seat(1).not_restored["cell 'f()'"]


@pytest.mark.parametrize("others", ["c2", None, "by the user"])
def test_a_cell_is_not_forgotten_for_what_it_did_not_do(others):
    """Engines that ended in different cells, before any, or by the user's order."""
    world = World.running(2, max_restarts=5)
    world.die(1)
    world.settle()
    for cell in ("c1", others):
        world.fork(1)
        world.hello(1)
        if cell == "by the user":
            world.replay_begins(1, "c1")
            world.seat(1).killed_why = "ordered by the user"
        elif cell:
            world.replay_begins(1, cell)
        assert world.die(1) == [do.StartEngine(1)]


def test_a_seat_that_was_given_up_gets_another_try_and_forgets_its_past():
    """Scaling to the same size starts it with a fresh count, and nothing of the past is shown."""
    world = World.running(2, max_restarts=2)
    world.die(1)
    world.settle()
    world.fork(1)
    world.die(1)
    assert world.states[1] == "given up"
    assert world.scale(2) == [do.StartEngine(1)]
    world.fork(1)
    assert world.die(1) == [do.StartEngine(1)]
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy
    assert world.seat(1).not_restored == {}
    assert world.incidents[-1].not_restored == {}


def test_what_one_engine_lacked_is_not_said_of_the_next_on_its_seat():
    """The names that could not be restored belong to an engine, not to its seat."""
    world = World.running(2)
    world.die(1)
    world.settle()
    world.up(1)
    world.replayed(1, None, "cell 'f()': NameError")
    world.settle()
    world.die(1)
    world.settle()
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy
    assert world.seat(1).not_restored == {}


def test_a_seat_that_was_a_member_counts_from_anew():
    """Many losses spread over time are no reason to give a seat up."""
    world = World.running(2, max_restarts=2)
    for _ in range(5):
        world.die(1)
        world.settle()
        world.ready(1)
        world.settle()
        assert world.machine.is_healthy
    assert world.generation == 11


# ---- cells and changes


def test_a_cell_runs_at_once_in_a_quiet_world():
    """No change under way: admitted with the membership and all ranks, or those asked for."""
    world = World.running(3)
    (all_ranks,) = world.begin("c1")
    (some,) = world.begin("c2", (2, 0))
    assert (all_ranks.cell, all_ranks.ranks) == ("c1", (0, 1, 2))
    assert all_ranks.membership == world.machine.membership
    assert (some.cell, some.ranks) == ("c2", (2, 0))


@pytest.mark.parametrize("ranks", [(3,), (0, 3), (-1,)])
def test_a_cell_for_a_rank_that_does_not_exist_is_refused(ranks):
    """The refusal is a `TargetError` that names the rank and those there are."""
    world = World.running(3)
    (refused,) = world.begin("c1", ranks)
    assert (refused.cell, refused.kind) == ("c1", "TargetError")
    assert f"no rank {next(r for r in ranks if not 0 <= r < 3)}" in refused.message
    assert "0-2" in refused.message
    assert world.machine.gate.open == set()


def test_cells_that_begin_during_a_change_run_after_it_in_order():
    """From loss to running group nothing is admitted; then everything, first come first."""
    world = World.running(3)
    world.die(1)
    assert world.begin("c1") == []
    world.broken(0)
    world.broken(2)
    assert world.begin("c2", (0,)) == []
    world.formed(0)
    said = world.formed(2)
    assert admitted(said) == ["c1", "c2"]
    first, second = only(said, do.AdmitCell)
    assert first.ranks == (0, 1)
    assert second.ranks == (0,)
    assert {a.membership.generation for a in (first, second)} == {2}


def test_a_waiting_cell_is_judged_by_the_world_in_which_it_would_run():
    """A cell for rank 2 that waits out a shrink is refused then, and does not hold up the next."""
    world = World.running(3, policy="shrink")
    world.die(1)
    world.begin("c1", (2,))
    world.begin("c2")
    said = world.settle()
    (refused,) = only(said, do.RefuseCell)
    assert (refused.cell, refused.kind) == ("c1", "TargetError")
    assert admitted(said) == ["c2"]


def test_cells_wait_from_the_start():
    """A cell that begins before the first group runs waits for it."""
    world = World(1)
    world.start()
    assert world.begin("c1") == []
    world.ready(0)
    assert admitted(world.settle()) == ["c1"]


def with_empty_seat(num_engines=3, slot=1, **settings):
    """A world that runs, but for one seat that is being filled."""
    world = World.running(num_engines, **settings)
    world.die(slot)
    world.settle()
    return world


def with_newcomer(num_engines=3, slot=1):
    """A world in which a refilled seat's engine is about to be given what it lacks."""
    world = with_empty_seat(num_engines, slot)
    world.ready(slot)
    while world.phase == "breaking":
        world.broken(min(world.machine.awaited))
    while world.phase == "forming":
        world.formed(min(world.machine.awaited))
    return world


def test_a_newcomer_waits_for_an_open_cell_and_cells_wait_for_the_newcomer():
    """No break under a running cell; new cells queue behind the change."""
    world = with_empty_seat()
    assert admitted(world.begin("c1")) == ["c1"]
    assert world.ready(1) == []
    assert world.begin("c2") == []
    said = world.end("c1")
    assert set(orders(said, od.BreakGroup)) == {0, 2}
    assert admitted(said) == []
    assert admitted(world.settle()) == ["c2"]
    assert world.slots == (0, 1, 2)


def test_a_newcomer_waits_for_every_open_cell():
    """Two cells at once: the change comes after both."""
    world = with_empty_seat()
    world.begin("c1")
    world.begin("c2")
    world.ready(1)
    assert world.end("c1") == []
    assert orders(world.end("c2"), od.BreakGroup)


def test_cells_do_not_wait_for_an_engine_that_only_starts():
    """While the first replay runs, the others serve cells."""
    world = with_empty_seat()
    world.up(1)
    assert admitted(world.begin("c1")) == ["c1"]


def test_a_newcomer_begins_where_it_stands_in_the_journal():
    """The replay starts at the position that the hello names and goes to the journal's end."""
    world = World.running(2)
    world.begin("c1")
    world.end("c1", journal=4)
    world.die(1)
    world.settle()
    world.fork(1)
    (replay,) = only(world.hello(1, replayed=3), do.Replay)
    assert (replay.since, replay.until) == (3, 4)


def test_a_newcomer_catches_up_on_cells_that_ran_meanwhile():
    """Entries made while it replayed are replayed too, and new cells wait for that."""
    world = with_empty_seat()
    world.up(1)
    world.begin("c1")
    world.end("c1", journal=1)
    (replay,) = only(world.replayed(1), do.Replay)
    assert (replay.since, replay.until) == (0, 1)
    assert world.states[1] == "replaying"
    assert world.begin("c2") == []
    said = world.replayed(1)
    assert set(orders(said, od.BreakGroup)) == {0, 2}
    assert admitted(world.settle()) == ["c2"]


def test_a_ready_newcomer_catches_up_when_the_open_cell_ends():
    """It was ready before the cell ended: what the cell added is replayed first."""
    world = with_empty_seat()
    world.begin("c1")
    world.ready(1)
    (replay,) = only(world.end("c1", journal=1), do.Replay)
    assert (replay.slot, replay.since, replay.until) == (1, 0, 1)
    assert orders(world.replayed(1), od.BreakGroup)


def test_a_newcomer_that_is_behind_is_not_taken_along_by_a_loss():
    """The group forms anew after a loss: a ready newcomer that lacks an entry replays it first."""
    world = with_empty_seat(4)
    world.begin("c1")
    world.begin("c2")
    world.ready(1)
    world.end("c1", journal=1)
    world.die(3)
    world.end("c2", journal=1)
    said = world.settle()
    for form in only(said, do.Form):
        assert 1 not in form.membership.slots
    assert [(r.since, r.until) for r in only(world.said, do.Replay) if r.slot == 1][-1] == (0, 1)
    world.replayed(1)
    world.settle()
    assert 1 in world.slots


def test_a_late_newcomer_that_dies_does_not_hold_up_cells():
    """Cells that wait for it to catch up go on when it dies, even if its seat is given up."""
    world = with_empty_seat(max_restarts=2)
    world.up(1)
    world.begin("c1")
    world.end("c1", journal=1)
    world.replayed(1)
    assert world.begin("c2") == []
    assert admitted(world.die(1)) == ["c2"]
    assert world.states[1] == "given up"


def test_a_ready_newcomer_that_dies_does_not_hold_up_cells():
    """Cells that wait for a ready engine to be admitted go on when it dies."""
    world = with_empty_seat(max_restarts=2)
    world.begin("c1")
    world.ready(1)
    assert world.begin("c2") == []
    said = world.die(1) + world.end("c1")
    assert admitted(said) == ["c2"]


def test_a_cell_that_is_withdrawn_while_it_waits_holds_no_change_up():
    """The kernel gave up waiting: the cell never counts as running, and the next change comes."""
    world = World.running(2)
    world.die(1)
    world.begin("c1")
    world.end("c1")
    for cell in admitted(world.settle()):
        world.machine.gate.end(cell, world.now)  # the desk, which has no one to answer
    assert world.machine.gate.open == set()
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy


def test_the_end_of_an_unknown_cell_changes_nothing():
    """The end of a cell that never began is ignored."""
    world = World.running(2)
    assert world.end("c9") == []
    assert world.machine.is_healthy


# ---- interrupts


def test_an_interrupt_reaches_every_member_and_nobody_else():
    """Each agent is told, and knows whether its main thread runs the cell; the group stays."""
    world = with_empty_seat()
    world.begin("c1")
    world.up(1)
    world.beat(0, cell="c1")
    said = world.interrupt("c1")
    assert orders(said, od.InterruptMain) == dict.fromkeys((0, 2), od.InterruptMain(cell="c1"))
    assert world.tick(5.0) == []


def test_an_interrupt_breaks_the_group_of_those_that_wait_in_a_collective():
    """A rank that waits natively hears no signal: its group is broken when the wait lasts."""
    world = World.running(2)
    world.begin("c1")
    world.beat(0, cell="c1", waits=1.0)
    world.beat(1, cell="c1")
    world.interrupt("c1")
    assert world.tick(RELEASE_AFTER_S - MOMENT) == []
    said = world.tick(2 * MOMENT)
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    (released,) = notices(said, od.RanksReleased)
    assert released.waiting == {0: "all_reduce, cell line 2: f()"}
    assert "interrupted" in released.reason


def test_an_interrupt_of_a_cell_that_does_not_run_breaks_nothing():
    """One that is over, or waits at the door, has nobody in a collective."""
    world = World.running(2)
    world.begin("c1")
    world.beat(0, cell="c1", waits=1.0)
    world.interrupt("c2")
    assert world.tick(5.0) == []
    world.interrupt("c1")
    world.end("c1")
    world.interrupt("c1")
    assert world.tick(RELEASE_AFTER_S + MOMENT) == []
    world.beat(0)
    assert world.tick(5.0) == []


# ---- failures of collectives, forming, waits


def test_a_failed_collective_breaks_the_group_once():
    """The first report breaks, others add nothing; the same members go on, no incident."""
    world = World.running(2)
    said = world.collective_failed(1)
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    assert "rank 1" in world.machine.reason
    assert world.collective_failed(0) == []
    world.settle()
    assert (world.generation, world.slots) == (2, (0, 1))
    assert world.machine.is_healthy
    assert world.incidents == []


def test_a_group_that_cannot_be_formed_is_left_and_the_next_tried():
    """A failed formation breaks the group for everybody; the number is never used again."""
    world = World.running(2)
    world.collective_failed(0)
    world.broken(0)
    world.broken(1)
    said = world.form_failed(1)
    assert {b.generation for b in orders(said, od.BreakGroup).values()} == {2}
    assert world.form_failed(0) == []
    world.settle()
    assert world.generation == 3
    assert world.machine.is_healthy


def test_failures_to_form_are_bounded():
    """So many in a row end in failure, with the last error and what to do."""
    world = World(2)
    world.start()
    world.ready(0)
    world.ready(1)
    for _ in range(MAX_FORM_FAILURES):
        world.form_failed(0)
        assert world.phase == "breaking"
        world.broken(0)
        world.broken(1)
    world.form_failed(0, error="no route to host")
    assert world.phase == "failed"
    assert "no route to host" in world.machine.why_failed
    assert "%dist_reset" in world.machine.why_failed
    assert world.generation == MAX_FORM_FAILURES + 1


def test_a_group_that_was_formed_resets_the_count_of_failures():
    """Failures count in a row only."""
    world = World.running(2)
    for _ in range(MAX_FORM_FAILURES + 2):
        world.collective_failed(0)
        world.broken(0)
        world.broken(1)
        world.form_failed(0)
        world.settle()
    assert world.machine.is_healthy


def test_members_that_do_not_form_in_time_are_killed():
    """After the limit exactly the missing ones are killed, once."""
    world = World.running(3)
    world.collective_failed(0)
    for slot in range(3):
        world.broken(slot)
    world.formed(1)
    assert world.tick(FORM_LIMIT_S - MOMENT) == []
    kills = world.tick(2 * MOMENT)
    assert [(k.slot, k.pid) for k in kills] == [(0, world.pid(0)), (2, world.pid(2))]
    assert world.tick(1.0) == []


def test_members_that_could_not_be_told_are_not_late():
    """As long as nobody knows where the store is, the clock of a formation stands."""
    world = World.running(3)
    world.collective_failed(0)
    for slot in range(3):
        world.broken(slot)
    for _ in range(3):
        assert world.tick(FORM_LIMIT_S - MOMENT) == []
        world.machine.cannot_form(world.now)
    assert world.tick(FORM_LIMIT_S - MOMENT) == []
    assert len(world.tick(2 * MOMENT)) == 3


def waiting_for_a_failed_rank(waits_in="c1", also=()):
    """Rank 0 raised in c1; rank 1 waits, in `waits_in`."""
    world = World.running(3)
    world.begin("c1")
    world.begin("c2")
    world.beat(1, cell=waits_in, waits=0.0)
    world.cell_failed(0, "c1")
    for slot in also:
        world.cell_failed(slot, "c1")
    return world


def test_a_wait_for_a_rank_that_raised_is_broken_when_it_lasts():
    """After the limit the group is broken, and the kernel learns who waited in what."""
    world = waiting_for_a_failed_rank()
    assert world.tick(RELEASE_AFTER_S - MOMENT) == []
    said = world.tick(2 * MOMENT)
    (released,) = notices(said, od.RanksReleased)
    assert released.waiting == {1: "all_reduce, cell line 2: f()"}
    assert "rank 0 raised" in released.reason
    assert set(orders(said, od.BreakGroup)) == {0, 1, 2}


@pytest.mark.parametrize("why", ["raised", "interrupted"])
def test_a_beat_of_the_old_group_does_not_break_the_new_one(why):
    """Its wait is over since the break, though no newer beat has come and the cell is open."""
    world = waiting_for_a_failed_rank()
    if why == "interrupted":
        world.interrupt("c1")
    world.tick(1.0)
    world.settle()
    assert (world.phase, world.generation) == ("running", 2)
    assert world.tick(MOMENT) == []
    assert world.machine.is_healthy


def test_a_short_wait_for_a_rank_that_raised_is_left_alone():
    """The limit counts from the later of failure and wait: a wait that just began may still end."""
    world = waiting_for_a_failed_rank()
    world.now += 5.0
    world.beat(1, cell="c1", waits=0.1)
    assert world.tick() == []
    world.beat(1, cell="c1")
    assert world.tick(5.0) == []


def test_a_wait_in_another_cell_is_left_alone():
    """A failure in one cell says nothing about a wait in another."""
    world = waiting_for_a_failed_rank(waits_in="c2")
    assert world.tick(60.0) == []


def test_a_wait_outside_a_cell_is_left_alone():
    """A wait that belongs to no cell waits for nobody's cell."""
    world = waiting_for_a_failed_rank(waits_in=None)
    assert world.tick(60.0) == []


def test_a_rank_that_raised_itself_is_not_released():
    """One that waits although it raised (in a handler, say) is not the one that is waited for."""
    world = waiting_for_a_failed_rank(also=(1,))
    assert world.tick(60.0) == []


def test_a_failure_in_a_cell_that_is_over_is_forgotten():
    """After the end of the cell nobody is released for its sake."""
    world = waiting_for_a_failed_rank()
    world.end("c1")
    assert world.tick(RELEASE_AFTER_S + MOMENT) == []
    world.beat(1, cell="c2", waits=1.0)
    assert world.tick(60.0) == []


def test_a_rank_that_still_waits_in_a_cell_that_is_over_is_released():
    """The kernel waits for nobody any more, and the next cell would find this rank blocked."""
    world = World.running(3)
    world.begin("c1")
    world.beat(1, cell="c1", waits=9.0)
    world.end("c1")
    assert world.tick(ENDED_S + RELEASE_AFTER_S - MOMENT) == []
    said = world.tick(2 * MOMENT)
    (released,) = notices(said, od.RanksReleased)
    assert released.waiting == {1: "all_reduce, cell line 2: f()"}
    assert "a cell that is over" in released.reason
    assert set(orders(said, od.BreakGroup)) == {0, 1, 2}
    world.settle()
    assert (world.phase, world.generation, world.slots) == ("running", 2, (0, 1, 2))
    assert (world.incidents, only(world.said, do.KillEngine)) == ([], [])


def test_a_wait_that_began_after_the_end_of_its_cell_is_given_its_time():
    """The limit counts from the later of the two."""
    world = World.running(2)
    world.begin("c1")
    world.end("c1")
    world.now += 5.0
    world.beat(0, cell="c1", waits=0.1)
    assert world.tick() == []
    assert orders(world.tick(RELEASE_AFTER_S), od.BreakGroup)


@pytest.mark.parametrize("cell", [None, "c2", "c3"])
def test_a_wait_elsewhere_is_left_alone_when_a_cell_is_over(cell):
    """In no cell, in one that runs, in one that nobody knows (of a supervisor before)."""
    world = World.running(2)
    world.begin("c1")
    world.begin("c2")
    world.end("c1")
    world.beat(0, cell=cell, waits=1.0)
    assert world.tick(60.0) == []


def test_a_rank_that_still_computes_in_a_cell_that_is_over_is_left_alone():
    """It waits for nobody, and ends by itself."""
    world = World.running(2)
    world.begin("c1")
    world.beat(0, cell="c1")
    world.end("c1")
    assert world.tick(60.0) == []


def test_a_member_that_stays_in_a_native_wait_after_the_break_is_killed():
    """A cut that frees nobody in time ends in a kill; a merely busy member is left alone."""
    world = World.running(3)
    world.beat(0, cell="c1", waits=1.0)
    world.beat(1, cell="c1")
    world.die(2)
    assert world.tick(UNBLOCK_LIMIT_S - MOMENT) == []
    (kill,) = world.tick(2 * MOMENT)
    assert (kill.slot, kill.pid) == (0, world.pid(0))
    assert world.tick(30.0) == []
    assert world.states[1] == "member"


def test_a_member_that_was_freed_is_not_killed():
    """Its last beat said that it waits; once it has left the group that is over."""
    world = World.running(3)
    world.beat(0, cell="c1", waits=1.0)
    world.beat(1, cell="c1", waits=1.0)
    world.die(2)
    world.broken(0)
    (kill,) = world.tick(UNBLOCK_LIMIT_S + MOMENT)
    assert kill.slot == 1


def test_a_member_that_cannot_be_cut_is_killed_where_it_waits():
    """Sockets that are not known exactly cannot free it; the limit holds at the latest."""
    world = World(2)
    world.start()
    world.ready(0)
    world.ready(1)
    world.formed(0, cuttable=False)
    world.formed(1)
    world.beat(0, cell="c1", waits=1.0)
    world.die(1)
    assert [k.slot for k in world.tick(UNBLOCK_LIMIT_S + MOMENT)] == [0]


def test_a_beat_of_a_stranger_is_ignored():
    """Beats count for the very process that sits on the seat."""
    world = World.running(2)
    world.beat(0, waits=1.0, pid=666)
    assert world.seat(0).beat is None


def test_an_engine_is_killed_once():
    """A second reason to kill the same process is not carried out."""
    world = World.running(2)
    (kill,) = world.kill(0, "hung: stopped for 10 s")
    assert (kill.pid, kill.why) == (world.pid(0), "hung: stopped for 10 s")
    assert world.kill(0, "again") == []
    (lost,) = notices(world.die(0, detector="beat"), od.EngineLost)
    assert lost.guess == "hung: stopped for 10 s"
    assert world.kill(0, "nobody there") == []


# ---- scale


def test_scaling_up_adds_seats_at_a_change_of_their_own():
    """New seats are filled while the old group runs; then everybody forms the larger one."""
    world = World.running(2)
    assert world.scale(4) == [do.StartEngine(2), do.StartEngine(3)]
    assert world.phase == "running"
    assert not world.machine.is_healthy
    world.ready(3)
    world.settle()
    assert world.slots == (0, 1, 3)
    world.ready(2)
    world.settle()
    assert world.slots == (0, 1, 2, 3)
    assert world.machine.is_healthy


def test_scaling_down_ends_the_highest_seats_after_the_break():
    """Leavers leave the group like everybody, are told to end, and their exit is no loss."""
    world = World.running(3)
    said = world.scale(1)
    assert set(orders(said, od.BreakGroup)) == {0, 1, 2}
    assert not world.machine.is_healthy
    said = world.settle()
    assert set(orders(said, od.EndEngine)) == {1, 2}
    assert world.slots == (0,)
    said = world.die(1, signal=None, code=0) + world.die(2, signal=None, code=0)
    assert said == []
    assert world.states == {0: "member"}
    assert world.machine.is_healthy
    assert world.generation == 2


def test_a_leaver_that_is_slow_to_end_costs_no_further_generation():
    """An engine that was told to end and has not yet is no reason for another break."""
    world = World.running(3)
    world.scale(2)
    world.settle()
    world.begin("c1")
    world.end("c1")
    world.tick(0.5)
    assert (world.phase, world.generation) == ("running", 2)
    world.die(2, signal=None, code=0)
    assert (world.phase, world.generation) == ("running", 2)
    assert world.machine.is_healthy


def test_scaling_down_waits_for_an_open_cell():
    """A planned change does not end a cell."""
    world = World.running(3)
    world.begin("c1")
    assert world.scale(2) == []
    assert world.begin("c2") == []
    assert orders(world.end("c1"), od.BreakGroup)
    said = world.settle()
    (admit,) = only(said, do.AdmitCell)
    assert admit.ranks == (0, 1)


def test_down_and_up_again_before_the_break_changes_nothing():
    """The seats were not given back yet: they stay, in the same generation."""
    world = World.running(3)
    world.begin("c1")
    world.scale(1)
    assert world.states == {0: "member", 1: "leaving", 2: "leaving"}
    assert world.scale(3) == []
    assert world.end("c1") == []
    assert (world.phase, world.generation) == ("running", 1)
    assert world.machine.is_healthy


def test_down_and_up_again_after_the_break_starts_a_new_engine():
    """An engine that was told to end is no member any more: its seat is filled by another one."""
    world = World.running(3)
    world.scale(2)
    world.settle()
    assert set(orders(world.said, od.EndEngine)) == {2}
    said = world.scale(3)
    assert not world.machine.is_healthy
    assert 2 not in [s for f in only(said, do.Form) for s in f.membership.slots]
    said += world.die(2, signal=None, code=0)
    assert only(said, do.StartEngine) == [do.StartEngine(2)]
    world.ready(2)
    world.settle()
    assert world.machine.is_healthy
    assert world.slots == (0, 1, 2)


def test_scaling_down_while_starting_lets_the_others_begin():
    """The engines that are still wanted are all ready: they do not wait for a seat that is gone."""
    world = World(3)
    world.start()
    world.ready(0)
    world.ready(1)
    world.fork(2)
    pid = world.pid(2)
    said = world.scale(2)
    assert [(k.slot, k.pid) for k in only(said, do.KillEngine)] == [(2, pid)]
    (form,) = only(said, do.Form)
    assert form.membership.slots == (0, 1)


def test_a_newcomer_on_a_seat_that_is_given_back_is_killed():
    """It was in no group: its process ends at once, and cells do not wait for it."""
    world = with_empty_seat(3, 2)
    world.begin("c1")
    world.ready(2)
    world.begin("c2")
    pid = world.pid(2)
    said = world.scale(2)
    assert [(k.slot, k.pid) for k in only(said, do.KillEngine)] == [(2, pid)]
    assert admitted(said) == ["c2"]
    world.end("c1")
    world.end("c2")
    assert world.machine.is_healthy
    assert world.die(2, pid) == []


def test_a_leaver_that_dies_before_the_break_is_a_loss_without_a_refill():
    """The group loses a member, and the seat is not filled again."""
    world = World.running(3)
    world.begin("c1")
    world.scale(2)
    said = world.die(2)
    (lost,) = notices(said, od.EngineLost)
    assert lost.slot == 2
    assert only(said, do.StartEngine) == []
    world.end("c1")
    world.settle()
    assert (world.slots, world.states) == ((0, 1), {0: "member", 1: "member"})
    assert world.machine.is_healthy


def test_scaling_ends_not_all_who_hold_the_variables():
    """With the first seat empty, a world of one seat would hold nothing: that is refused."""
    world = World.running(3, policy="shrink")
    world.die(0)
    world.settle()
    assert "first scale to 2 at least" in world.machine.scale(1, world.now)
    assert (world.phase, world.slots) == ("running", (1, 2))
    assert world.machine.scale(2, world.now) == ""


def test_scaling_while_a_group_forms_waits_for_it():
    """Seats given back in the middle of a change leave with the next one."""
    world = World.running(3)
    world.collective_failed(0)
    for slot in range(3):
        world.broken(slot)
    assert world.scale(2) == []
    for slot in range(3):
        world.formed(slot)
    assert world.phase == "breaking"
    world.settle()
    assert world.slots == (0, 1)


def test_a_seat_given_back_while_the_first_group_breaks_holds_nobody_up():
    """The start begins again without it: its engine is told to end and is not waited for."""
    world = World(3)
    world.start()
    for slot in range(3):
        world.ready(slot)
    world.scale(2)
    world.die(1)
    world.broken(0)
    world.broken(2)
    world.ready(1)
    world.settle()
    assert (world.phase, world.slots) == ("running", (0, 1))
    assert 2 in orders(world.said, od.EndEngine) or 2 not in world.states


def test_a_process_for_a_seat_that_was_given_up_is_ended():
    """Nobody waits for it any more: it must not live on unseen, whether it says hello or not."""
    world = with_empty_seat(2, 1, max_restarts=2)
    world.fork(1)
    world.die(1)
    assert world.states[1] == "given up"
    assert [k.pid for k in only(world.fork(1, 901), do.KillEngine)] == [901]
    assert [k.pid for k in only(world.hello(1, 902), do.KillEngine)] == [902]
    assert world.pid(1) is None


def test_a_failed_start_is_none_of_an_engine_that_sits_there():
    """A second start for a seat that is filled fails: the engine on it is not touched."""
    world = World.running(2)
    assert world.start_failed(1) == []
    assert world.machine.is_healthy
    world.die(1)
    world.settle()
    world.up(1)
    assert world.start_failed(1) == []
    assert world.states[1] == "replaying"


# ---- hand-over


def test_equal_names_are_offered_by_the_lowest_survivor():
    """What all survivors hold alike and the newcomer does not is packed by the lowest."""
    world = with_newcomer(3, 0)
    held = {"x": "int:1", "model": "module:1", "gone": ""}
    assert world.fingerprint(1, held | {"r": "int:1"}) == []
    assert world.fingerprint(0, {"x": "int:1", "model": "module:9"}) == []
    said = world.fingerprint(2, held | {"r": "int:2"})
    assert orders(said, od.OfferNames) == {
        1: od.OfferNames(generation=world.generation, names=("model",), receivers=(0,))
    }
    said = world.offered(1)
    assert orders(said, od.ReceiveNames) == {
        0: od.ReceiveNames(
            generation=world.generation, donor=1, sha256="ab", num_bytes=7, names=("model",)
        )
    }
    assert world.phase == "restoring"
    world.received(0)
    assert world.machine.is_healthy
    assert set(world.seat(0).not_restored) == {"gone", "r"}
    assert world.incidents[-1].not_restored == world.seat(0).not_restored


def test_nothing_to_hand_over_means_running_at_once():
    """When the replay made everything, the last digest lets the world run."""
    world = with_newcomer(3, 1)
    for slot in range(3):
        world.fingerprint(slot, {"x": "int:1"})
    assert world.machine.is_healthy
    assert orders(world.said, od.OfferNames) == {}


def test_what_the_donor_cannot_send_and_what_the_newcomer_cannot_take_is_listed():
    """Each name that stays behind is named with its reason; the rest is received."""
    world = with_newcomer(2, 1)
    world.fingerprint(0, {"a": "int:1", "b": "int:1", "c": "int:1"})
    world.fingerprint(1, {})
    said = world.offered(0, {"b": "cannot be sent", "z": "not asked for"})
    assert orders(said, od.ReceiveNames)[1].names == ("a", "c")
    world.received(1, {"c": "what arrived is not what was sent"})
    assert world.phase == "running"
    assert world.seat(1).not_restored == {
        "b": "cannot be sent",
        "c": "what arrived is not what was sent",
    }


def test_two_newcomers_are_each_given_what_they_lack():
    """One offer with all names, one order for each with its own."""
    world = World.running(3)
    world.die(1)
    world.die(2)
    world.settle()
    world.begin("c1")
    world.ready(1)
    world.ready(2)
    world.end("c1")
    while world.phase == "breaking":
        world.broken(min(world.machine.awaited))
    while world.phase == "forming":
        world.formed(min(world.machine.awaited))
    world.fingerprint(0, {"a": "module:1", "b": "module:1"})
    world.fingerprint(1, {"a": "module:1"})
    said = world.fingerprint(2, {"b": "module:1"})
    offer = orders(said, od.OfferNames)[0]
    assert (offer.names, offer.receivers) == (("a", "b"), (1, 2))
    said = world.offered(0)
    assert {s: o.names for s, o in orders(said, od.ReceiveNames).items()} == {1: ("b",), 2: ("a",)}
    world.received(2)
    assert world.phase == "restoring"
    world.received(1)
    assert world.machine.is_healthy


@pytest.mark.parametrize("stage", ["fingerprint", "offer", "receive"])
def test_the_next_survivor_hands_over_when_the_donor_dies(stage):
    """The donor's death costs a generation; then the next lowest survivor is the donor."""
    world = with_newcomer(3, 1)
    held = {"x": "int:1"}
    if stage != "fingerprint":
        world.fingerprint(0, held)
        world.fingerprint(1)
        assert set(orders(world.fingerprint(2, held), od.OfferNames)) == {0}
    if stage == "receive":
        world.offered(0)
    before = world.generation
    world.die(0)
    world.broken(1)
    world.broken(2)
    world.formed(1)
    said = world.formed(2)
    assert set(orders(said, od.FingerprintNames)) == {1, 2}
    world.fingerprint(1)
    said = world.fingerprint(2, held)
    offer = orders(said, od.OfferNames)
    assert set(offer) == {2}
    assert offer[2].receivers == (0,)
    assert world.received(1, generation=before) == []
    assert world.phase == "restoring"
    world.offered(2)
    world.received(1)
    assert world.phase == "running"


def test_a_newcomer_that_dies_in_the_hand_over_costs_a_generation_and_nothing_else():
    """The survivors go on without it, and its seat is filled again."""
    world = with_newcomer(3, 1)
    for slot in (0, 2):
        world.fingerprint(slot, {"x": "int:1"})
    world.fingerprint(1)
    said = world.die(1)
    assert do.StartEngine(1) in said
    assert world.received(1) == []
    world.settle()
    assert (world.phase, world.slots) == ("running", (0, 2))
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy


@pytest.mark.parametrize("stage", ["fingerprint", "receive"])
def test_a_hand_over_that_does_not_end_is_ended(stage):
    """After the limit exactly those whose part is missing are killed, once."""
    world = with_newcomer(3, 1)
    world.fingerprint(0, {"x": "int:1"})
    if stage == "receive":
        world.fingerprint(1)
        world.fingerprint(2, {"x": "int:1"})
        world.offered(0)
    assert world.tick(RESTORE_LIMIT_S) == []
    kills = [k.slot for k in world.tick(1.0)]
    assert kills == ([1, 2] if stage == "fingerprint" else [1])
    assert world.tick(1.0) == []


def test_reports_of_a_hand_over_that_is_over_are_ignored():
    """Digests, offers and receipts of an old generation or of no hand-over change nothing."""
    world = World.running(2)
    assert world.fingerprint(0, {"x": "int:1"}) == []
    assert world.offered(0) == []
    assert world.received(0) == []
    world = with_newcomer(2, 1)
    assert world.offered(0) == []  # before the digests
    old = world.generation - 1
    for slot in (0, 1):
        world.fingerprint(slot, {"x": "int:1"}, generation=old)
    assert world.offered(0, generation=old) == []
    assert world.phase == "restoring"


# ---- incidents


def test_an_incident_of_a_loss_has_its_parts_and_durations():
    """Kind, slot, rank, cause, both generations, and the seconds of each part."""
    world = World.running(3)
    world.die(1, ago=0.5)
    world.now += 1.0
    world.broken(0)
    world.broken(2)
    world.now += 2.0
    world.formed(0)
    world.formed(2)
    (loss,) = world.incidents
    assert (loss.kind, loss.slots, loss.ranks, loss.cause) == ("lost", (1,), (1,), "SIGKILL")
    assert (loss.generation_before, loss.generation_after) == (1, 2)
    assert (loss.detect_s, loss.regroup_s, loss.restore_s, loss.stall_s) == (0.5, 3.0, 0.0, 3.0)


def test_an_incident_of_a_refill_has_ranks_and_durations():
    """Joined: the newcomer's slot and new rank; how long group and hand-over took."""
    world = with_newcomer(3, 1)
    world.now += 0.25
    for slot in range(3):
        world.fingerprint(slot)
    joined = world.incidents[-1]
    assert (joined.kind, joined.slots, joined.ranks) == ("joined", (1,), (1,))
    assert (joined.generation_before, joined.generation_after) == (2, 3)
    assert (joined.regroup_s, joined.restore_s, joined.stall_s) == (0.0, 0.25, 0.25)
    assert joined.detect_s is None


def test_a_hung_engine_is_told_apart_from_a_lost_one():
    """Killed because its beats were missing: kind hung."""
    world = World.running(2)
    world.kill(1, "hung: stopped for 10 s")
    world.die(1, detector="beat")
    assert world.incidents[0].kind == "hung"


def test_a_kill_by_the_user_is_timed_from_the_order():
    """The cause is the user, and detection counts from the moment of the order."""
    world = World.running(2)
    world.seat(1).killed_why = "ordered by the user"
    world.seat(1).ordered_at = world.now
    world.now += 0.125
    world.die(1)
    assert (world.incidents[0].cause, world.incidents[0].detect_s) == ("user", 0.125)


def test_an_exit_code_is_a_cause():
    """An engine that ended by itself is described by its code."""
    world = World.running(2)
    world.die(1, signal=None, code=3)
    assert world.incidents[0].cause == "exit code 3"


def test_losses_close_together_have_an_incident_each_and_end_together():
    """A second loss before the world runs again is closed by the same generation."""
    world = World.running(3)
    world.die(0)
    world.now += 1.0
    world.die(1)
    assert "rank 0 (slot 0) is gone: " in world.machine.reason
    assert "; rank 1 (slot 1) is gone: " in world.machine.reason
    world.settle()
    first, second = world.incidents
    assert (first.slots, second.slots) == ((0,), (1,))
    assert first.generation_after == second.generation_after == 2
    assert (first.stall_s, second.stall_s) == (1.0, 0.0)


def test_scaling_is_an_incident_of_its_own_kind():
    """Seats that the user added or gave back are told apart from a refill."""
    world = World.running(2)
    world.scale(3)
    world.ready(2)
    world.settle()
    (up,) = world.incidents
    assert (up.kind, up.slots, up.ranks, up.cause) == ("scaled", (2,), (2,), "user")
    world.scale(2)
    world.settle()
    world.die(2, signal=None, code=0)
    _, down = world.incidents
    assert (down.kind, down.slots, down.cause) == ("scaled", (2,), "user")
    assert down.generation_after == world.generation


# ---- a supervisor that takes over


def take_over(world, journal=0):
    """Another machine takes up where this one's ledger ends."""
    after = World(world.config.num_engines, machine=Machine(world.config))
    after.now = world.now + 50.0
    after.pids = world.pids
    after.said = only(world.said, do.Form)  # generations go on
    after.machine.take_up(view_of(world.machine), journal, after.now)
    after.first = after._heard()
    return after


def test_a_running_group_is_taken_up_unnoticed():
    """Nobody is told anything: the same members, ranks and generation, healthy at once."""
    world = take_over(World.running(3))
    assert world.first == []
    assert world.machine.is_healthy
    assert (world.generation, world.slots) == (1, (0, 1, 2))
    assert world.hello(1, generation=1) == []
    assert admitted(world.begin("c1")) == ["c1"]
    world.die(2)
    world.settle()
    assert (world.generation, world.slots) == (2, (0, 1))


def test_a_member_that_is_not_in_the_present_group_breaks_it():
    """Its hello after a takeover names another generation: the ledger was ahead of it."""
    world = take_over(World.running(2))
    said = world.hello(1, generation=0)
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    world.settle()
    assert (world.machine.is_healthy, world.generation) == (True, 2)


def test_a_seat_without_an_engine_is_no_member():
    """A membership names engines; there is none to name."""
    with pytest.raises(ValueError, match="slot 3"):
        Seat(3).as_member()


def test_incidents_are_taken_up():
    """What has happened before is not forgotten."""
    before = with_empty_seat()
    world = take_over(before)
    assert [i.kind for i in world.incidents] == ["lost"]


@pytest.mark.parametrize("how_far", ["asked for", "forked", "up"])
def test_a_start_is_taken_up_without_starting_anyone_twice(how_far):
    """Engines that live are waited for, and say how far they had come; others are started."""
    before = World(2)
    before.start()
    before.ready(0)
    if how_far != "asked for":
        {"forked": before.fork, "up": before.up}[how_far](1)
    world = take_over(before)
    assert (world.phase, world.generation) == ("starting", 0)
    started = [do.StartEngine(1)] if how_far == "asked for" else []
    assert only(world.first, do.StartEngine) == started
    if started:
        world.fork(1)
    assert only(world.hello(0), do.Replay)
    world.replayed(0)
    world.hello(1)
    (form,) = only(world.replayed(1), do.Form)
    assert form.membership.generation == 1


def test_an_engine_that_nobody_wrote_down_is_adopted():
    """A child on a seat without a process is that seat's engine; others are left alone."""
    before = World.running(2)
    before.die(1)
    before.settle()
    world = take_over(before)
    world.machine.adopt({777: 1, 778: 5, 779: 0})
    assert world.pid(1) == 777
    assert world.pid(0) == before.pid(0)
    assert 5 not in world.machine.seats
    assert only(world.hello(1, 777), do.Replay)
    world.replayed(1)
    world.settle()
    assert world.machine.is_healthy


def test_a_newcomer_is_taken_up_where_it_stands_in_the_journal():
    """What it has replayed is not replayed again; what was added since is."""
    before = with_empty_seat()
    before.begin("c1")
    before.ready(1)
    world = take_over(before, journal=5)
    (replay,) = only(world.hello(1, replayed=3), do.Replay)
    assert (replay.since, replay.until) == (3, 5)


def breaking():
    """A group that is being broken after a loss; the lost seat is being filled."""
    world = World.running(3)
    world.die(1)
    world.fork(1)
    return world


def forming():
    """A group of survivors and a newcomer is being formed."""
    world = with_empty_seat()
    world.ready(1)
    while world.phase == "breaking":
        world.broken(min(world.machine.awaited))
    world.formed(0)
    return world


@pytest.mark.parametrize("before", [breaking, forming, with_newcomer])
def test_a_group_that_was_not_whole_is_broken_and_formed_anew(before):
    """Everybody leaves, told again with each hello, and a higher number follows."""
    was = before()
    world = take_over(was)
    assert world.phase == "breaking"
    members = [s for s in was.slots if was.states[s] == "member"]
    assert set(orders(world.first, od.BreakGroup)) == set(members)
    for slot in members:
        told = orders(world.hello(slot, generation=was.generation), od.BreakGroup)
        assert told[slot].generation == was.generation
    world.settle()
    assert world.phase == "running"
    assert world.generation > was.generation


@pytest.mark.parametrize("before", [breaking, forming, with_newcomer])
def test_a_newcomer_is_still_given_what_it_lacks_after_a_takeover(before):
    """Who holds the variables is written down: a newcomer is no donor."""
    world = take_over(before())
    world.names = {0: {"x": "module:1"}, 2: {"x": "module:1"}}
    world.settle()
    if 1 not in world.slots:
        world.hello(1)
        world.replayed(1)
        world.settle()
    assert world.machine.is_healthy
    offers = orders(world.said, od.OfferNames)
    assert set(offers) == {0}
    assert offers[0].receivers == (1,)


def test_a_member_whose_seat_is_gone_does_not_stop_a_takeover():
    """A leaver that died in the break is in the old membership and has no seat any more."""
    before = World.running(3)
    before.scale(2)
    before.die(2)
    assert before.phase == "breaking"
    world = take_over(before)
    world.settle()
    assert (world.phase, world.slots) == ("running", (0, 1))


def test_a_leaver_is_dealt_with_after_a_takeover():
    """A seat that was being given back is given back, also when nothing else happens."""
    before = World.running(3)
    before.begin("c1")
    before.scale(2)
    world = take_over(before)
    for slot in range(3):
        world.hello(slot, generation=1)
    world.tick(1.0)
    world.end("c1")
    world.settle()
    assert world.slots == (0, 1)


def told_to_end():
    """A seat was given back; its engine was told to end and has not done so yet."""
    world = World.running(2)
    world.scale(1)
    world.settle()
    assert world.states == {0: "member", 1: "leaving"}
    return world


def test_a_leaver_is_told_to_end_again_after_a_takeover():
    """The order may have been lost: the hello of such an engine is answered with it."""
    world = take_over(told_to_end())
    world.hello(0, generation=2)
    assert set(orders(world.hello(1), od.EndEngine)) == {1}
    world.die(1, signal=None, code=0)
    assert world.machine.is_healthy
    assert world.generation == 2


def test_a_leaver_is_no_member_again_after_a_takeover():
    """It was told to end before: growing again fills its seat with another engine."""
    world = take_over(told_to_end())
    world.scale(2)
    assert not world.machine.is_healthy
    assert do.StartEngine(1) in world.die(1, signal=None, code=0)
    world.ready(1)
    world.settle()
    assert world.machine.is_healthy
    assert world.slots == (0, 1)


def test_incidents_that_are_open_at_a_takeover_are_closed():
    """The loss that the old supervisor was dealing with ends when the new one's world runs."""
    world = take_over(breaking())
    world.settle()
    assert [i.generation_after for i in world.incidents] == [2]


@pytest.mark.parametrize("policy", ["refill", "shrink"])
def test_a_takeover_does_not_forget_that_the_variables_are_lost(policy):
    """The last holder dies while a newcomer's group forms: failed, under any supervisor."""
    before = World.running(1, policy=policy)
    before.scale(2)
    before.ready(1)
    before.broken(0)
    before.die(0)
    assert before.phase == "breaking"
    world = take_over(before)
    world.begin("c1")
    said = world.broken(1)
    assert world.phase == "failed"
    assert [r.cell for r in only(said, do.RefuseCell)] == ["c1"]


def test_a_failed_world_is_taken_up_as_failed():
    """The reason is kept, with its way out said once."""
    before = World.running(1)
    before.die(0)
    world = take_over(before)
    assert world.phase == "failed"
    assert world.machine.why_failed == before.machine.why_failed


def test_a_seat_that_was_given_up_stays_given_up_after_a_takeover():
    """Its reason is kept, and nothing is started for it."""
    before = World.running(2, max_restarts=1)
    before.die(1)
    before.settle()
    world = take_over(before)
    assert world.first == []
    assert world.states[1] == "given up"
    assert view_of(world.machine).reason == view_of(before.machine).reason


def test_the_phases_have_the_names_that_the_kernel_is_told():
    """Phases and seat states are words that stand in views and tables."""
    assert {p.value for p in Phase} == {
        "starting",
        "forming",
        "restoring",
        "running",
        "breaking",
        "failed",
    }
    assert {s.value for s in SeatState} == {
        "empty",
        "starting",
        "replaying",
        "ready",
        "member",
        "leaving",
        "given up",
    }


# ---- runs: what hangs


def killed(instructions):
    """Slots whose engine is killed."""
    return [k.slot for k in only(instructions, do.KillEngine)]


@pytest.mark.parametrize(
    ("more", "is_hung"),
    [
        ({"step": 3}, True),
        ({"step": 3, "is_patient": True}, False),
        ({"step": None}, False),
        ({"step": 3, "waits": 9.0}, False),
    ],
)
def test_who_stays_away_from_a_collective_of_a_run_is_hung(more, is_hung):
    """It trains, is in no long phase, and all others have waited for the hang timeout."""
    world = World.running(3, hang_timeout_s=2.0)
    world.train()
    world.beat(0, waits=2.1, step=3)
    world.beat(2, waits=2.1, step=3)
    world.beat(1, **more)
    said = world.tick()
    assert killed(said) == ([1] if is_hung else [])
    assert killed(world.tick(0.1)) == []


def test_who_was_made_slow_and_hangs_for_it_is_told_so():
    """The reason names the factor, so that nobody looks for another one."""
    world = World.running(2, hang_timeout_s=2.0)
    world.train()
    world.beat(0, waits=2.1, step=3)
    world.beat(1, step=3)
    world.seat(1).beat = replace(world.seat(1).beat, slow_factor=500.0)
    (kill,) = only(world.tick(), do.KillEngine)
    assert kill.why.endswith("2 s; it was made 500 times as slow")


def test_a_run_keeps_that_engines_were_made_slow():
    """Who reads its report is told why its pace changed; without a run there is nothing to keep."""
    world = World.running(2)
    world.machine.slow((0,), 2.0)
    world.train()
    world.machine.slow((1,), 5.0)
    world.machine.slow((0, 1), 1.0)
    assert world.machine.runs.present.remarks == [
        "from step 0 on slot 1: made 5 times as slow",
        "from step 0 on slots 0, 1: as fast as before",
    ]


def test_nobody_is_hung_before_the_last_that_waits_has_waited_long_enough():
    """The one that came late to the collective may be the reason."""
    world = World.running(3, hang_timeout_s=2.0)
    world.train()
    world.beat(0, waits=9.0, step=3)
    world.beat(2, waits=1.9, step=3)
    world.beat(1, step=3)
    assert killed(world.tick()) == []


def test_a_member_that_was_never_heard_of_in_this_group_is_hung_too():
    """It holds the interpreter in native code since before its first beat."""
    world = World.running(2, hang_timeout_s=2.0)
    world.train()
    world.beat(0, waits=2.1, step=0)
    assert killed(world.tick()) == [1]


def test_waits_in_the_group_before_hang_nobody_in_this_one():
    """After a recovery the last beats are old: they say nothing of the new group."""
    world = World.running(3, hang_timeout_s=2.0)
    world.train()
    world.beat(0, waits=2.1, step=3)
    world.die(1)
    world.settle()
    world.beat(2, step=3)
    assert world.machine.runs.is_going
    assert killed(world.tick()) == []


def test_outside_a_run_nobody_is_hung_for_staying_away():
    """In a cell, one rank may prepare data for long."""
    world = World.running(2, hang_timeout_s=2.0)
    world.begin("c1")
    world.beat(0, waits=60.0, cell="c1")
    world.beat(1, cell="c1")
    assert killed(world.tick()) == []


def test_a_member_that_stands_while_the_others_wait_for_it_costs_a_group_and_no_engine():
    """An order was lost: the group is made anew, and the run goes on."""
    world = World.running(2)
    world.train()
    world.held(0, 3)
    world.beat(1, waits=0.0, step=3)
    assert world.tick(STAND_LIMIT_S / 2) == []
    assert set(orders(world.tick(STAND_LIMIT_S), od.BreakGroup)) == {0, 1}
    world.settle()
    assert world.machine.runs.is_going


def test_who_leaves_a_loop_in_which_others_wait_fails_it():
    """After a moment: all may be leaving."""
    world = World.running(2)
    world.loop()
    world.say(rn.RunLeft, 0, step=2)
    world.beat(1, cell="c1", waits=0.0, step=2)
    assert world.tick(RELEASE_AFTER_S / 2) == []
    said = world.tick(RELEASE_AFTER_S)
    assert orders(said, rn.EndRun)[1].fault.kind == "WrongState"
    assert set(orders(said, od.BreakGroup)) == {0, 1}


# ---- runs: cells and changes


def test_a_cell_waits_until_the_run_stands_and_the_run_until_the_cell_is_over():
    """Held at a boundary, admitted between two steps, told to go on afterwards."""
    world = World.running(2)
    world.train()
    assert set(orders(world.begin("c1"), rn.HoldRun)) == {0, 1}
    assert world.held(0, 4) == []
    (cell,) = only(world.held(1, 4), do.AdmitCell)
    assert cell.between == (3, 4)
    assert set(orders(world.end("c1"), rn.GoOn)) == {0, 1}


def test_a_cell_that_is_not_wanted_any_more_does_not_stop_a_run():
    """The kernel gave it up while the run was brought to a stand."""
    world = World.running(1)
    world.train()
    world.begin("c1")
    world.end("c1")
    said = world.held(0, 4)
    assert only(said, do.AdmitCell) == []
    assert orders(said, rn.GoOn)


@pytest.mark.parametrize(("action", "state"), [("pause", "paused"), ("stop", "stopped")])
def test_pause_and_stop_do_not_wait_for_a_cell(action, state):
    """The run stands for the cell already."""
    world = World.running(1)
    world.train()
    world.begin("c1")
    world.held(0, 4)
    world.steer(action)
    assert world.machine.runs.find("r").state == state


def test_a_newcomer_is_admitted_at_a_boundary():
    """The run is held, the group made anew, the trainer handed over; then all go on."""
    world = World.running(2)
    world.train()
    world.die(1)
    world.settle()
    assert world.machine.runs.is_going
    assert set(orders(world.ready(1), rn.HoldRun)) == {0}
    assert orders(world.held(0, 4), od.BreakGroup)
    assert only(world.broken(0), do.Form)
    assert world.incidents[-1].kind == "joined"


def test_a_run_goes_on_while_a_newcomer_catches_up():
    """A cell ran while it came up: it replays that, and only cells wait for it."""
    world = World.running(2)
    world.train()
    world.die(1)
    world.settle()
    world.up(1)
    world.begin("c1")
    world.held(0, 4)
    world.end("c1", journal=1)
    said = world.replayed(1)
    assert only(said, do.Replay)
    assert orders(said, rn.HoldRun) == {}
    assert world.machine.runs.is_going


def test_a_cell_behind_a_cell_that_trains_does_not_stop_it():
    """It was admitted before the loop began, and waits on the engines for its end."""
    world = World.running(2)
    world.begin("c0")
    world.begin("c1")
    for slot in (0, 1):
        world.say(rn.RunEntered, slot, cell="c0", loop=0, step=0, steps=5)
    assert world.machine.runs.is_going
    assert admitted(world.begin("c2")) == []


def test_the_cell_that_trains_is_sent_to_a_newcomer_once():
    """It is admitted when it has come to the loop."""
    world = World.running(2)
    world.loop()
    world.die(1)
    world.settle()
    (notice,) = notices(world.ready(1), rn.SendCellTo)
    assert (notice.cell, notice.slot, notice.pid) == ("c1", 1, world.pid(1))
    assert notices(world.tick(), rn.SendCellTo) == []
    said = world.say(rn.RunEntered, 1, cell="c1", loop=0, step=0, steps=9)
    assert set(orders(said, rn.HoldRun)) == {0}


def test_a_cell_that_raises_on_one_rank_sends_those_away_that_wait_at_its_loop():
    """Nobody will come: they get an error instead of waiting."""
    world = World.running(2)
    world.begin("c1")
    world.say(rn.RunEntered, 0, cell="c1", loop=0, step=0, steps=9)
    assert orders(world.cell_failed(1, "c1"), rn.EndRun)[0].fault.kind == "WrongState"


@pytest.mark.parametrize("ranks", [(0,), (1, 0)])
def test_a_cell_of_some_ranks_cannot_train(ranks):
    """On all ranks it can, in whatever order they were named."""
    world = World.running(2)
    world.begin("c1", ranks)
    said = world.say(rn.RunEntered, 0, cell="c1", loop=0, step=0, steps=9)
    ended = orders(said, rn.EndRun)
    assert bool(ended) is (len(ranks) < 2)
    for end in ended.values():
        assert "this cell was sent to rank 0 only; a loop" in end.fault.message
        assert "%%distributed" in end.fault.message


def test_a_cell_that_is_over_frees_who_trains_in_it():
    """The run is stopped, and the group is broken under those that wait in a step."""
    world = World.running(2)
    world.loop()
    said = world.end("c1")
    assert set(orders(said, rn.EndRun)) == set(orders(said, od.BreakGroup)) == {0, 1}
    assert world.machine.runs.find("c1.0").state == "stopped"


def test_what_the_user_raised_ends_the_run_and_frees_the_others():
    """The fault is kept; an interrupted cell's loop is stopped, not failed."""
    world = World.running(2)
    world.train()
    fault = rn.RunFault(kind="ValueError", message="bad batch", rank=1)
    said = world.say(rn.RunRaised, 1, fault=fault)
    assert {end.fault for end in orders(said, rn.EndRun).values()} == {fault}
    assert set(orders(said, od.BreakGroup)) == {0, 1}
    assert world.machine.runs.find("r").state == "failed"
    world.settle()
    world.loop()
    world.interrupt("c1")
    world.say(rn.RunRaised, 1, fault=rn.RunFault(kind="KeyboardInterrupt", message=""))
    assert world.machine.runs.find("c1.0").state == "stopped"


def test_a_fault_in_mid_step_leaves_no_rank_behind():
    """The next group gives the newest step to those that lag, though the run is over; then all let
    go of the trainer, and a new run may begin."""
    world = World.running(2)
    world.train()
    fault = rn.RunFault(kind="ValueError", message="bad batch", rank=1)
    said = world.say(rn.RunRaised, 1, fault=fault)
    assert not any(end.is_even for end in orders(said, rn.EndRun).values())
    said = world.say(rn.RunRaised, 0, run="r", fault=fault)
    assert not orders(said, rn.EndRun)[0].is_even
    world.settle()
    assert world.machine.runs.uneven is None
    assert world.machine.runs.find("r").fault == fault


def test_a_world_that_fails_ends_its_run():
    """With the reason, also for those that wait at a loop."""
    world = World.running(2)
    world.train()
    said = world.fail("the controller ended")
    assert {end.fault.kind for end in orders(said, rn.EndRun).values()} == {"RecoveryFailed"}
    world = World.running(2)
    world.begin("c1")
    world.say(rn.RunEntered, 0, cell="c1", loop=0, step=0, steps=9)
    assert orders(world.fail(), rn.EndRun)[0].fault.kind == "RecoveryFailed"


def test_what_all_holders_took_with_them_is_no_longer_committed():
    """A run counts what the newest living holder has."""
    world = World.running(3)
    world.train()
    world.die(2)
    for slot in (0, 1):
        world.broken(slot)
    for slot, step in ((0, 5), (1, 4)):
        event = ev.GroupFormed(
            slot=slot, pid=world.pid(slot), generation=2, cuttable=True, step=step
        )
        world.machine.formed(event, world.now)
    assert world.machine.runs.present.step == 5
    world.die(0)
    world.broken(1)
    event = ev.GroupFormed(slot=1, pid=world.pid(1), generation=3, cuttable=True, step=4)
    world.machine.formed(event, world.now)
    assert world.machine.runs.present.step == 4


def test_while_a_run_trains_engines_are_given_back_one_after_the_other():
    """The next one once a step was trained without the last: only then has a neighbour its copy."""
    world = World.running(4)
    world.train(steps=50)
    world.commit(0, 1)
    assert set(orders(world.scale(2), rn.HoldRun)) == {0, 1, 2, 3}
    world.stand(2)
    world.settle(step=2)
    assert world.slots == (0, 1, 2)
    assert not world.machine.is_healthy
    assert not world.machine.runs.present.is_hold_ordered
    assert set(orders(world.commit(2), rn.HoldRun)) == {0, 1, 2}
    world.stand(3)
    world.settle(step=3)
    assert world.slots == (0, 1)
    for slot in (3, 2):
        world.die(slot, signal=None, code=0)
    assert world.machine.is_healthy
    assert world.machine.runs.is_going


def test_where_others_hold_the_same_engines_are_given_back_together():
    """Replicas, and models beside each other: the run stands still once."""
    world = World.running(4)
    world.train(steps=50, has_twin=True)
    world.scale(2)
    world.stand(1)
    world.settle(step=1)
    assert world.slots == (0, 1)


@pytest.mark.parametrize(("by", "size", "there"), [(2, 2, 2), (2, 3, 3), (2, 1, 2), (3, 2, 3)])
def test_where_the_others_have_copies_engines_are_given_back_in_rows(by, size, there):
    """Up to half of them at once, those that can leave together."""
    world = World.running(4)
    world.train(steps=50, leaves_by=by)
    world.commit(0, 1)
    world.scale(size)
    world.stand(2)
    world.settle(step=2)
    assert world.slots == tuple(range(there))


def test_a_supervisor_that_takes_over_knows_for_which_cells_a_run_stands():
    """Nobody is told to go on before the kernel has said that they are over."""
    world = World.running(1)
    world.train()
    world.begin("c1")
    world.held(0, 4)
    view = view_of(world.machine)
    assert view.runs[-1].cells == ("c1",)
    machine = Machine(world.config)
    machine.take_up(view, 0, world.now)
    taken = World(1, machine=machine)
    assert orders(taken.hello(0, generation=1), rn.GoOn) == {}
    machine.attach((), 0, taken.now)
    assert orders(taken.tick(), rn.GoOn)


def test_a_run_that_ends_in_a_hand_over_is_not_handed_over():
    """The engines have let go of its trainer: it is not asked for any more."""
    world = World.running(2)
    world.train()
    world.die(1)
    world.settle()
    world.ready(1)
    world.held(0, 4)
    world.broken(0)
    for slot in (0, 1):
        about = {"slot": slot, "pid": world.pid(slot), "generation": world.generation}
        world.machine.formed(ev.GroupFormed(**about, cuttable=True, step=4 - slot), world.now)
    assert world.phase == "restoring"
    world.say(rn.RunRaised, 0, fault=rn.RunFault(kind="ValueError", message="bad batch"))
    said = world.fingerprint(0, {"x": "int:1"}) + world.fingerprint(1)
    assert orders(said, od.OfferNames)[0].names == ("x",)
    world.offered(0)
    world.received(1)
    assert world.phase == "running"
