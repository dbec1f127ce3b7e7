"""What subscribers to live views are sent, when, and how much: a cluster made up, no sockets."""

from __future__ import annotations

import tracemalloc
from typing import get_args

import msgspec
import numpy as np
import pytest
from piped import orders

from nbdist.config import ClusterConfig
from nbdist.protocol import feed as fd
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.frames import MAX_BYTES, PERIOD_S, TYPICAL_BYTES, WINDOW, Header, unpack
from nbdist.protocol.plans import packed
from nbdist.protocol.story import ROWS, Evaluation
from nbdist.protocol.tables import PHASES, STATES, TABLES, View
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor.attempts import SETTLED_S
from nbdist.supervisor.changes import Changes
from nbdist.supervisor.collector import Collector
from nbdist.supervisor.details import DetailReader
from nbdist.supervisor.feeds import LINGER_S, MAX_SUBSCRIPTIONS, NUM_KEPT, Feeds
from nbdist.supervisor.flow import DROP_S, PAUSE_S
from nbdist.supervisor.packing import IDLE_PERIOD_S, MAX_INCIDENTS, Sources
from nbdist.supervisor.phase import Phase
from nbdist.supervisor.progress import Progress
from nbdist.supervisor.run import Run
from nbdist.supervisor.seats import SeatState
from nbdist.supervisor.series import Series
from nbdist.supervisor.state import Machine
from nbdist.supervisor.view import view_of

ALL = get_args(View)
SUBSCRIBE = fd.Subscribe(name="v", views=ALL)
START = 1_000.0
MS = 1_000_000


def committed(first, last, *, generation=1, **columns):
    """Rows of steps, ten a second."""
    made = np.zeros(last - first, ROWS)
    made["step"], made["generation"] = np.arange(first, last), generation
    made["loss"], made["seconds"], made["samples"] = 2.0, 0.1, 60
    made["at"] = START + 0.1 * made["step"]
    for name, value in columns.items():
        made[name] = value
    return made.tobytes()


class Client:
    """What one subscription was sent, put together as a page does."""

    def __init__(self):
        self.frames: list[tuple[Header, dict]] = []
        self.sizes, self.ends = [], []

    def take(self, message):
        if isinstance(message, fd.SubscriptionEnded):
            self.ends.append(message.reason)
            return
        header, tables = unpack(message.data)
        assert (header.seq, header.kind == "snapshot") == (message.seq, message.is_snapshot)
        self.frames.append((header, tables))
        self.sizes.append(len(message.data))

    @property
    def last(self) -> Header:
        return self.frames[-1][0]

    @property
    def kinds(self):
        return [header.kind for header, _ in self.frames]

    def column(self, name):
        """All values since the last snapshot."""
        table, _, column = name.partition(".")
        parts = []
        for header, tables in self.frames:
            parts = [] if header.kind == "snapshot" else parts
            parts += [tables[table][column]] if table in tables else []
        return np.concatenate(parts).tolist() if parts else []


class House:
    """A cluster with a run, its feeds, and the time."""

    def __init__(self, max_mb=16.0):
        self.now = START
        self.machine = Machine(ClusterConfig(num_engines=2))
        self.machine.phase = Phase.RUNNING
        self.collector = Collector(Series(max_mb=max_mb))
        self.clients = {}
        sources = Sources("c", self.machine, self.collector, Changes())
        self.feeds = Feeds(sources, self.send)
        self.acknowledges = True

    def send(self, identity, message):
        client = self.clients.setdefault((identity, message.name), Client())
        client.take(message)
        if self.acknowledges and isinstance(message, fd.Frame):
            self.order(fd.Acknowledge(name=message.name, seq=message.seq), identity)

    def order(self, order, identity=b"kernel"):
        return self.feeds.take(identity, order, self.now)

    def begin(self, name="r1", first=0):
        run = Run(rn.RunSpec(run=name, name="trainer"), 900, state="running", step=first)
        run.target, run.progress = first + 900, Progress(first)
        self.machine.runs.present = run
        self.look(0.0)
        return run

    def end(self, state="finished"):
        run, self.machine.runs.present = self.machine.runs.present, None
        run.state = state
        self.machine.runs.past.append(run)

    def look(self, seconds=0.05):
        """One turn of the supervisor's loop."""
        self.now += seconds
        self.feeds.look(view_of(self.machine), self.now)

    def wait(self, seconds):
        """Many turns."""
        for _ in range(round(seconds / 0.05)):
            self.look()

    @property
    def client(self):
        return self.clients.setdefault((b"kernel", "v"), Client())

    def train(self, *engines, steps, **how):
        """Each engine does these steps, beginning now, and its telemetry comes in."""
        for engine in engines:
            engine.now_ns = int(self.now * 1e9)
            for step in steps:
                engine.step(step, **how)
                engine.put(Kind.COMPUTE, engine.now_ns - 9 * MS, engine.now_ns - 3 * MS)
            self.collector.take(engine.batch(), 1)


@pytest.fixture
def house():
    return House()


# ---- what is in a frame


def test_nothing_is_sent_to_nobody(house):
    """Without a subscription there is no message, whatever happens."""
    run = house.begin()
    run.progress.add(0, committed(0, 5))
    house.wait(3)
    assert house.clients == {}


def test_a_snapshot_comes_first_and_then_what_is_new(house):
    """Each committed row once, in its order; world and run whole in every frame."""
    run = house.begin()
    run.progress.add(0, committed(0, 5))
    assert house.order(SUBSCRIBE) == od.Done()
    house.wait(0.5)
    run.progress.add(0, committed(5, 9))
    house.wait(0.5)
    assert house.client.kinds[:2] == ["snapshot", "delta"]
    assert [header.seq for header, _ in house.client.frames] == list(
        range(1, len(house.client.frames) + 1)
    )
    assert house.client.column("rows.step") == list(range(9))
    assert (house.client.last.run.step, house.client.last.run.target) == (9, 900)
    assert house.client.last.world.phase == "running"


def test_a_step_that_was_committed_again_is_sent_again(house):
    """Its holders were lost: the later row stands over the earlier."""
    run = house.begin()
    run.progress.add(0, committed(0, 5))
    house.order(SUBSCRIBE)
    house.wait(0.5)
    run.progress.add(0, committed(3, 6, generation=2, loss=1.0))
    house.wait(0.5)
    assert house.client.column("rows.step") == [0, 1, 2, 3, 4, 3, 4, 5]
    assert house.client.column("rows.loss")[5:] == [1.0] * 3


def test_attempts_say_what_each_slot_did_and_who_waited(house, made_up):
    """The sum of its parts; who comes last to the common sum waits for nobody."""
    house.begin()
    house.order(SUBSCRIBE)
    quick, slow = made_up(0), made_up(1)
    for engine, more_ms in ((quick, 0), (slow, 5)):
        engine.now_ns = int((house.now + 0.01) * 1e9)
        engine.ring.begin_step(4, 1)
        began = engine.now_ns
        engine.spend(Kind.DATA, 1)
        engine.spend(Kind.DATA, 2)
        engine.spend(Kind.COMPUTE, 10 + more_ms)
        engine.spend(Kind.VOTE, 8 - more_ms)
        engine.put(Kind.STEP, began, engine.now_ns)
        engine.put(Kind.SAMPLES, value=30)
        house.collector.take(engine.batch(), 1)
    house.wait(SETTLED_S + 1)
    found = {name: house.client.column(f"steps.{name}") for name in TABLES["steps"]}
    assert found["step"] == [4, 4]
    assert found["slot"] == [0, 1]
    np.testing.assert_allclose(found["compute_s"], [0.010, 0.015], rtol=1e-3)
    np.testing.assert_allclose(found["exposed_s"], [0.008, 0.003], rtol=1e-3)
    np.testing.assert_allclose(found["data_s"], [0.003, 0.003], rtol=1e-3)
    np.testing.assert_allclose(found["wait_s"], [0.005, 0.0], atol=1e-5)
    assert found["samples"] == [30, 30]
    assert np.isnan(found["optimizer_s"]).all()


def test_attempts_come_once_all_slots_have_told_of_them(house, made_up):
    """A batch that comes later holds the others back; one that comes much later comes alone, and
    nobody says how long it was waited for. None is told twice."""
    house.begin()
    house.order(SUBSCRIBE)
    first, second = made_up(0), made_up(1)
    house.train(first, second, steps=range(3))
    house.wait(0.5)
    house.train(first, steps=range(3, 6))
    house.wait(0.5)
    assert house.client.column("steps.step") == [0, 1, 2] * 2
    house.train(second, steps=range(3, 6))
    house.train(first, steps=range(6, 9))
    house.wait(2)
    assert house.client.column("steps.step") == [*[0, 1, 2] * 2, *[3, 4, 5] * 2, 6, 7, 8]
    assert np.isfinite(house.client.column("steps.wait_s")).all()
    house.train(second, steps=range(6, 9))
    house.wait(2)
    assert house.client.column("steps.step")[-6:] == [6, 7, 8] * 2
    assert np.isnan(house.client.column("steps.wait_s")[-3:]).all()


def test_a_slot_that_is_lost_does_not_stop_the_others(house, made_up):
    """What the survivors tell goes on to come."""
    house.begin()
    house.order(SUBSCRIBE)
    house.train(made_up(0), made_up(1), steps=range(3))
    house.wait(1)
    house.train(made_up(0, 200), steps=range(3, 6), generation=2)
    house.wait(2)
    assert house.client.column("steps.step") == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_buckets_and_spans_are_whole_steps(house, made_up):
    """Ready, launch, end and size of each bucket; each part of the main thread with its kind."""
    house.begin()
    house.order(SUBSCRIBE)
    house.train(made_up(0), made_up(1), steps=[0], num_buckets=2, tail_ms=4)
    house.wait(1)
    column = house.client.column
    assert column("buckets.bucket") == [0, 1, 0, 1]
    assert column("buckets.slot") == [0, 0, 1, 1]
    done, launch = np.array(column("buckets.done_at")), np.array(column("buckets.launch_at"))
    np.testing.assert_allclose((done - launch)[1], 0.004, rtol=1e-3)
    assert set(column("buckets.size_bytes")) == {1e6}
    kinds = [3, 4, 4, 5, 6, 8]
    assert sorted(column("spans.kind")) == sorted(kinds * 2)


def test_details_are_told_oldest_first(house, made_up):
    """In a snapshot too: the last rows are those of the newest step."""
    house.begin()
    house.train(made_up(0), made_up(1), steps=range(5))
    house.wait(1)
    house.order(SUBSCRIBE)
    house.wait(0.5)
    steps = house.client.column("buckets.step")
    assert steps == sorted(steps)
    assert set(steps) == set(range(5))


def test_of_a_run_that_is_over_the_worst_steps_are_told_too(house, made_up):
    """Those before the last ones with most communication in the open; else they are not."""
    engines = made_up(0), made_up(1)
    house.begin()
    house.train(*engines, steps=[0], tail_ms=30)
    house.train(*engines, steps=range(1, 60))
    house.wait(1)
    series = house.collector.series
    for is_over, first in ((False, 10), (True, 0)):
        tables = DetailReader(0.0).read(series, house.now, 10_000, with_worst=is_over)
        assert tables["buckets"]["step"].min() == first
    few = DetailReader(0.0).read(series, house.now, 300, with_worst=True)
    assert {0, 59} <= set(few["buckets"]["step"].tolist())


def test_a_bucket_that_was_never_done_has_no_end(house, made_up):
    """What was not told is NaN, not nought."""
    house.begin()
    house.order(SUBSCRIBE)
    engine = made_up(0)
    engine.now_ns = int(house.now * 1e9)
    engine.ring.begin_step(0, 1)
    engine.put(Kind.BUCKET_READY, ident=3)
    house.collector.take(engine.batch(), 1)
    house.wait(1)
    assert house.client.column("buckets.bucket") == [3]
    assert np.isnan(house.client.column("buckets.done_at")).all()


def test_a_step_of_a_pipeline_has_spans_and_no_buckets(house, made_up):
    """What stages compute is told; what they send is no gradient that is summed."""
    house.begin()
    house.order(SUBSCRIBE)
    engine = made_up(0)
    engine.now_ns = int(house.now * 1e9)
    engine.ring.begin_step(0, 1)
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        engine.put(Kind.RECEIVE, ident=2, value=64.0)
        engine.spend(kind, 1, ident=2, value=1.0)
        engine.put(Kind.SEND, ident=2, value=64.0)
    house.collector.take(engine.batch(), 1)
    house.wait(1)
    assert house.client.column("spans.kind") == [3, 10, 11, Kind.SEND, Kind.RECEIVE]
    assert house.client.column("spans.ident") == [2, 2, 2, 3, 3]
    assert house.client.column("spans.value") == [1, 1, 1, 192, 192]
    assert house.client.column("buckets.bucket") == []


def test_a_step_of_a_pipeline_is_told_whole_though_it_is_large(house, made_up):
    """With some of its ranks only it says little; a step of another run has no such right."""
    house.begin()
    engines = [made_up(slot) for slot in range(4)]
    for step, kinds in enumerate([(Kind.FORWARD,), (Kind.FORWARD, Kind.SEND)]):
        for engine in engines:
            engine.now_ns = int(house.now * 1e9)
            engine.ring.begin_step(step, 1)
            for number in range(100):
                for kind in kinds:
                    engine.put(kind, ident=number, value=1.0)
            house.collector.take(engine.batch(), 1)
        house.wait(1)
    for step, expected in ((0, 200), (1, 404)):
        series = Series(max_mb=4)
        for engine in engines:
            timelines = house.collector.series.last_steps(engine.slot)
            series.add(engine.slot, timelines[step].records)
        spans = DetailReader(0.0).read(series, house.now, 250)["spans"]
        assert len(spans["step"]) == expected


def test_a_plan_is_in_a_snapshot_and_told_once(house, made_up):
    """Only of the present run, and to those who want it."""
    house.begin()
    for rank in range(2):
        engine = made_up(rank)
        engine.now_ns = int(house.now * 1e9)
        engine.ring.begin_step(0, 1)
        for place, action in enumerate(orders(2, 2)[rank]):
            engine.put(Kind.PLANNED, ident=place, value=packed(action, 2))
        house.collector.take(engine.batch(), 1)
    house.order(SUBSCRIBE)
    house.wait(3)
    column = house.client.column
    assert column("plans.slot") == [0] * 4 + [1] * 4
    assert column("plans.kind") == [3, 3, 4, 4, 3, 4, 3, 4]
    assert column("plans.began") == [0, 1, 4, 7, 1, 2, 4, 5]


def test_telemetry_from_before_the_run_is_not_in_it(house, made_up):
    """A series goes on from run to run; a frame is about one."""
    house.train(made_up(0), steps=range(4))
    house.wait(1)
    house.begin()
    house.order(SUBSCRIBE)
    house.train(made_up(0, 200), steps=range(2))
    house.wait(1)
    assert house.client.column("steps.step") == [0, 1]


def test_memory_is_told_by_slot(house, made_up):
    """Resident bytes; where there is no GPU, nothing is told of it."""
    house.begin()
    house.order(SUBSCRIBE)
    engine = made_up(1)
    engine.now_ns = int(house.now * 1e9)
    engine.put(Kind.MEMORY_RSS, value=5e8)
    house.collector.take(engine.batch(), 1)
    house.wait(0.5)
    assert house.client.column("memory.bytes") == [5e8]
    assert house.client.column("memory.kind") == [Kind.MEMORY_RSS]
    assert house.client.column("memory.slot") == [1]


def test_memory_that_stays_the_same_is_told_once(house, made_up):
    """What an engine can have, and the most that it held; each change has a row."""
    house.begin()
    house.order(SUBSCRIBE)
    engine = made_up(0)
    engine.now_ns = int(house.now * 1e9)
    for peak in (5e8, 5e8, 6e8, 6e8):
        engine.put(Kind.MEMORY_PEAK, value=peak)
        engine.put(Kind.MEMORY_LIMIT, value=8e9)
        house.collector.take(engine.batch(), 1)
        house.wait(0.5)
    kinds, values = (house.client.column(f"memory.{name}") for name in ("kind", "bytes"))
    assert sorted(zip(kinds, values, strict=True)) == [
        (Kind.MEMORY_PEAK, 5e8),
        (Kind.MEMORY_PEAK, 6e8),
        (Kind.MEMORY_LIMIT, 8e9),
    ]


def test_incidents_are_told_when_they_change_and_all_to_newcomers(house):
    """By their number; of very many the last ones."""
    story = house.machine.story
    house.begin()
    house.order(SUBSCRIBE)
    incident = story.begin("lost", 1, {1: 1}, "SIGKILL", house.now)
    house.wait(0.5)
    incident.stall_s = 0.25
    house.wait(0.5)
    told = [n for header, _ in house.client.frames for n in header.incidents]
    assert [(n.number, n.incident.stall_s) for n in told] == [(1, None), (1, 0.25)]
    assert told[0].incident.began_at == START
    for _ in range(MAX_INCIDENTS):
        story.begin("lost", 1, {1: 1}, "SIGKILL", house.now)
    house.order(msgspec.structs.replace(SUBSCRIBE, name="other"))
    house.wait(0.5)
    (header, _), *_ = house.clients[b"kernel", "other"].frames
    assert [n.number for n in header.incidents] == list(range(2, MAX_INCIDENTS + 2))
    assert header.counters.incidents_left_out == 1


def test_a_run_has_the_incidents_since_it_began(house):
    """Those of the run before are not its own, and its own are counted from 1."""
    story = house.machine.story
    house.begin()
    story.begin("lost", 1, {1: 1}, "SIGKILL", house.now)
    house.end()
    house.look(1.0)
    house.begin("r2", first=900)
    house.order(SUBSCRIBE)
    house.wait(0.5)
    assert house.client.last.incidents == ()
    story.begin("hung", 2, {0: 0}, "SIGSTOP", house.now)
    house.wait(0.5)
    told = [n for header, _ in house.client.frames for n in header.incidents]
    assert [(n.number, n.incident.kind) for n in told] == [(1, "hung")]


def test_a_supervisor_that_takes_over_knows_what_happened_in_the_run_before(house):
    """A run began with its first step, whoever was the supervisor then."""
    rows = committed(0, 3)
    began = float(np.frombuffer(rows, ROWS)["at"][0])
    house.machine.story.begin("lost", 1, {1: 1}, "SIGKILL", began + 0.1)
    house.begin().progress.add(0, rows)
    house.feeds._began["r1"] = house.now + 60
    house.order(SUBSCRIBE)
    house.wait(0.5)
    assert [n.incident.kind for n in house.client.last.incidents] == ["lost"]


def test_who_is_silent_is_told_in_whole_seconds(house):
    """An engine of which no beat comes is named soon, long before it is taken for hung."""
    machine = house.machine
    house.begin()
    slots = list(machine.seats)
    machine.membership = Membership(
        generation=1,
        members=tuple(Member(slot=s, engine_id=int(s), pid=10 + s, host="h") for s in slots),
    )
    for slot in slots:
        seat = machine.seats[slot]
        seat.state, seat.pid, seat.heard_at = SeatState.MEMBER, 10 + slot, house.now
    house.order(SUBSCRIBE)
    for _ in range(70):
        machine.seats[slots[0]].heard_at = house.now
        house.look()
    silent = [[seat.silent_s for seat in header.world.seats] for header, _ in house.client.frames]
    assert silent[0] == [0.0, 0.0]
    assert silent[-1] == [0.0, 3.0]
    assert sorted({other for _, other in silent}) == [0.0, 2.0, 3.0]


def test_what_is_missing_is_counted(house, made_up):
    """Gaps, drops and late records stand in every frame."""
    house.begin()
    house.order(SUBSCRIBE)
    engine = made_up(0)
    engine.step(0)
    batch = engine.batch()
    house.collector.take(msgspec.structs.replace(batch, num_dropped=7), 3)
    house.wait(0.5)
    counters = house.client.last.counters
    assert (counters.dropped, counters.late) == (7, counters.records)


def test_a_view_brings_its_tables_and_no_others(house, made_up):
    """Who wants the loss is not sent buckets."""
    run = house.begin()
    run.progress.add(0, committed(0, 3))
    house.order(msgspec.structs.replace(SUBSCRIBE, views=("loss",)))
    house.train(made_up(0), steps=range(3))
    house.wait(1)
    assert {name for _, tables in house.client.frames for name in tables} == {"rows", "phases"}


def test_lanes_say_since_when_a_seat_is_what_it_is(house):
    """One row a change; a seat that is taken away is empty."""
    house.begin()
    house.order(SUBSCRIBE)
    house.machine.scale(1, house.now)
    house.wait(0.5)
    house.machine.phase = Phase.FORMING
    house.wait(0.5)
    assert house.client.column("phases.phase") == [3, 1]
    assert house.client.last.world.phase == "forming"


def test_evaluations_are_told_once(house):
    """The new ones with each frame."""
    run = house.begin()
    house.order(SUBSCRIBE)
    run.evaluations.append(Evaluation(step=1, at=1.0, metrics={"acc": 0.5}))
    house.wait(1)
    run.evaluations.append(Evaluation(step=2, at=2.0, metrics={"acc": float("nan")}))
    house.wait(1)
    told = [e.step for header, _ in house.client.frames for e in header.evaluations]
    assert told == [1, 2]
    last = next(h.evaluations for h, _ in reversed(house.client.frames) if h.evaluations)
    assert last[0].metrics == {"acc": None}


# ---- how many


def test_frames_come_at_most_twice_a_second(house):
    """However often something is new."""
    run = house.begin()
    house.order(SUBSCRIBE)
    for step in range(100):
        run.progress.add(0, committed(step, step + 1))
        house.look(0.02)
    times = [header.clock_s for header, _ in house.client.frames]
    assert min(np.diff(times)) >= PERIOD_S - 1e-9
    assert len(times) >= 2.0 / PERIOD_S - 1


def test_where_nothing_is_new_a_sign_of_life_comes_once_a_second(house):
    """So that a page can tell a quiet run from one that it hears nothing of."""
    house.begin()
    house.order(SUBSCRIBE)
    house.wait(5)
    times = [header.clock_s for header, _ in house.client.frames]
    assert len(times) in (5, 6)
    assert min(np.diff(times[1:])) >= IDLE_PERIOD_S - 1e-9


def test_who_does_not_acknowledge_is_sent_no_more_than_the_window(house):
    """Two frames; then one with all that is new, as soon as there is room."""
    run = house.begin()
    house.acknowledges = False
    house.order(SUBSCRIBE)
    for step in range(30):
        run.progress.add(0, committed(step, step + 1))
        house.look(0.1)
    assert len(house.client.frames) == WINDOW
    house.order(fd.Acknowledge(name="v", seq=1))
    house.look()
    assert len(house.client.frames) == WINDOW + 1
    assert house.client.column("rows.step") == list(range(30))
    assert house.client.last.counters.delayed == 1


def test_a_wider_window_is_granted_up_to_a_bound(house):
    """For a page that acknowledges every fourth frame."""
    run = house.begin()
    house.acknowledges = False
    house.order(msgspec.structs.replace(SUBSCRIBE, window=1_000))
    for step in range(60):
        run.progress.add(0, committed(step, step + 1))
        house.look(0.1)
    assert len(house.client.frames) == 8


def test_who_was_silent_for_long_is_paused_and_gets_a_snapshot(house):
    """Ten seconds without a word: nothing more is sent until there is one."""
    run = house.begin()
    house.acknowledges = False
    house.order(msgspec.structs.replace(SUBSCRIBE, window=8))
    house.look()
    house.wait(PAUSE_S + 1)
    num = len(house.client.frames)
    run.progress.add(0, committed(0, 3))
    house.wait(2)
    assert len(house.client.frames) == num
    house.order(fd.Acknowledge(name="v", seq=num))
    house.look(PERIOD_S)
    assert house.client.kinds[-1] == "snapshot"
    assert house.client.column("rows.step") == [0, 1, 2]


def test_who_is_silent_for_a_minute_is_forgotten(house):
    """It is told so, once, and what it acknowledges then means nothing."""
    house.begin()
    house.acknowledges = False
    house.order(SUBSCRIBE)
    house.look()
    house.look(DROP_S + 1)
    assert house.client.ends == [f"nothing was acknowledged for {DROP_S:g} s"]
    num = len(house.client.frames)
    house.order(fd.Acknowledge(name="v", seq=1))
    house.wait(2)
    assert len(house.client.frames) == num


def test_numbers_that_cannot_be_acknowledged_are_passed_over(house):
    """Old ones, later ones, those of nobody."""
    house.begin()
    house.acknowledges = False
    house.order(SUBSCRIBE)
    house.wait(3)
    for order in (
        fd.Acknowledge(name="v", seq=99),
        fd.Acknowledge(name="v", seq=-1),
        fd.Acknowledge(name="other", seq=1),
    ):
        house.order(order)
    house.wait(3)
    assert len(house.client.frames) == WINDOW


def test_subscribing_again_gives_a_snapshot(house):
    """With the next number: what is still on its way from before is older."""
    run = house.begin()
    run.progress.add(0, committed(0, 4))
    house.order(SUBSCRIBE)
    house.wait(0.5)
    num = len(house.client.frames)
    house.order(SUBSCRIBE)
    house.wait(0.5)
    header, _ = house.client.frames[num]
    assert (header.kind, header.seq) == ("snapshot", num + 1)
    assert house.client.column("rows.step") == [0, 1, 2, 3]


def test_two_subscribers_do_not_take_from_one_another(house):
    """Whoever joins later leaves no hole in what the others have."""
    run = house.begin()
    house.order(SUBSCRIBE)
    for step in range(40):
        run.progress.add(0, committed(step, step + 1))
        if step == 17:
            house.order(SUBSCRIBE, b"kernel-2")
        house.look(0.06)
    house.wait(1)
    for client in house.clients.values():
        assert client.column("rows.step") == list(range(40))


def test_an_unsubscribed_name_is_silent(house):
    """Also where it was never subscribed."""
    house.begin()
    house.order(SUBSCRIBE)
    house.look()
    house.order(fd.Unsubscribe(name="v"))
    house.order(fd.Unsubscribe(name="never"))
    house.wait(3)
    assert len(house.client.frames) == 1


def test_so_many_views_may_be_open(house):
    """One more is refused, and says why; a known one may subscribe again."""
    for number in range(MAX_SUBSCRIPTIONS):
        house.order(msgspec.structs.replace(SUBSCRIBE, name=f"{number}"))
    refused = house.order(SUBSCRIBE)
    assert refused.kind == "WrongState"
    assert "16 live views are open" in refused.message
    assert house.order(msgspec.structs.replace(SUBSCRIBE, name="3")) == od.Done()


# ---- runs that are over


def test_a_new_run_begins_with_a_snapshot(house):
    """Who follows the newest run is given the next one from its beginning."""
    first = house.begin("r1")
    first.progress.add(0, committed(0, 3))
    house.order(SUBSCRIBE)
    house.wait(1)
    house.end()
    house.wait(1)
    assert house.client.last.run.state == "finished"
    assert house.client.last.is_live
    house.begin("r2").progress.add(0, committed(0, 2))
    house.wait(1)
    assert "snapshot" in house.client.kinds[1:]
    assert (house.client.last.run.run, house.client.column("rows.step")) == ("r2", [0, 1])


def test_a_run_that_is_over_is_kept_with_its_last_telemetry(house, made_up):
    """One frame, which says that it is the last one."""
    run = house.begin()
    run.progress.add(0, committed(0, 3))
    house.train(made_up(0), steps=range(3))
    house.end()
    house.wait(LINGER_S + 0.1)
    house.begin("r2")
    house.order(msgspec.structs.replace(SUBSCRIBE, run="r1"))
    house.wait(2)
    assert house.client.kinds == ["snapshot"]
    assert house.client.ends == ["the run is over"]
    assert not house.client.last.is_live
    assert house.client.column("rows.step") == [0, 1, 2]
    assert house.client.column("steps.step") == [0, 1, 2]


def test_who_follows_a_run_to_its_end_is_told_of_it(house):
    """The last frame holds what came last, and is the last one."""
    run = house.begin()
    house.order(msgspec.structs.replace(SUBSCRIBE, run="r1"))
    house.wait(1)
    run.progress.add(0, committed(0, 3))
    house.end()
    house.wait(2)
    assert not house.client.last.is_live
    assert house.client.last.run.state == "finished"
    assert house.client.column("rows.step") == [0, 1, 2]
    assert house.client.ends == ["the run is over"]


def test_the_last_runs_are_kept(house):
    """Five; of one before them nothing is known any more."""
    for number in range(NUM_KEPT + 4):
        house.begin(f"r{number}").progress.add(0, committed(0, 2))
        house.end()
        house.wait(LINGER_S + 0.1)
    last = house.order(fd.QuerySnapshot(run=f"r{NUM_KEPT + 3}"))
    assert unpack(last.data)[0].run.run == f"r{NUM_KEPT + 3}"
    assert len(house.feeds._kept) == NUM_KEPT
    gone = house.order(fd.QuerySnapshot(run="r0"))
    assert gone.kind == "WrongState"
    assert house.order(msgspec.structs.replace(SUBSCRIBE, run="r0")).kind == "WrongState"


def test_a_snapshot_of_a_run_can_be_asked_for(house):
    """Without a subscription, while it goes on."""
    house.begin().progress.add(0, committed(0, 3))
    frame = house.order(fd.QuerySnapshot(run="r1"))
    header, tables = unpack(frame.data)
    assert header.is_live
    assert tables["rows"]["step"].tolist() == [0, 1, 2]


def test_a_frame_that_cannot_be_made_ends_its_view_only(house, monkeypatch, caplog):
    """The supervisor goes on: another one would be asked for the same frame."""
    run = house.begin()
    house.order(SUBSCRIBE)
    monkeypatch.setattr(run.progress, "durable", lambda _slots: 1 / 0)
    house.wait(1)
    assert "the supervisor's log says more" in house.client.ends[0]
    assert "ZeroDivisionError" in caplog.text
    house.end()
    house.wait(1)
    assert house.feeds._kept == {"r1": b""}
    assert house.feeds._subscriptions == {}


def test_a_run_that_another_supervisor_saw_begin_has_no_telemetry(house, made_up):
    """It cannot be told from that of other runs; the committed steps are known."""
    house.train(made_up(0), steps=range(3))
    house.begin().progress.add(0, committed(0, 3))
    house.end("stopped")
    house.feeds._began.clear()
    house.wait(1)
    _, tables = unpack(house.order(fd.QuerySnapshot(run="r1")).data)
    assert tables["rows"]["step"].tolist() == [0, 1, 2]
    assert "steps" not in tables
    house.order(msgspec.structs.replace(SUBSCRIBE, run="r1"))
    house.wait(2)
    assert house.client.kinds == ["snapshot"]
    assert not house.client.last.is_live
    assert house.client.ends == ["the run is over"]


# ---- how large


def test_much_memory_is_thinned_out_by_slot(house, made_up):
    """The greatest is still there, of the GPU too."""
    house.begin()
    engine = made_up(0)
    engine.now_ns = int((house.now + 1) * 1e9)
    for number in range(1_000):
        engine.now_ns += MS
        engine.put(Kind.MEMORY_RSS, value=1e9 + (number == 555))
        engine.put(Kind.MEMORY_DEVICE, value=2e9 + 5 * (number == 666))
    house.collector.take(engine.batch(), 1)
    house.collector.take(engine.batch(), 1)
    house.order(SUBSCRIBE)
    house.wait(0.5)
    assert "memory" in house.client.frames[0][0].thinned
    assert len(house.client.column("memory.at")) < 420
    kinds, values = (np.array(house.client.column(f"memory.{n}")) for n in ("kind", "bytes"))
    assert values[kinds == Kind.MEMORY_RSS].max() == 1e9 + 1
    assert values[kinds == Kind.MEMORY_DEVICE].max() == 2e9 + 5


def test_words_have_bounds_too(house):
    """Reasons, names and metrics without end do not make a frame too large."""
    run = house.begin()
    long = "x" * 5_000
    for number in range(MAX_INCIDENTS):
        incident = house.machine.story.begin("lost", number, {1: 1}, long, house.now)
        incident.reason = long
        incident.not_restored = {f"{name} {long}": long for name in range(100)}
        metrics = {f"{name} {long}": 1.0 for name in range(100)}
        run.evaluations.append(Evaluation(step=number, at=1.0, metrics=metrics))
    run.fault = rn.RunFault(kind="ValueError", message=long)
    house.order(SUBSCRIBE)
    house.wait(0.5)
    assert house.client.sizes[0] <= MAX_BYTES
    header, _ = house.client.frames[0]
    assert len(header.incidents) >= 5
    assert header.incidents[-1].number == MAX_INCIDENTS


def test_every_state_and_phase_has_a_place():
    """A table names them by number."""
    assert tuple(state.value for state in SeatState) == STATES
    assert {phase.value for phase in Phase} <= set(PHASES)


def test_a_long_run_is_thinned_out_and_says_so(house):
    """A snapshot of 200,000 steps: small, with its ends and the one step that took long."""
    run = house.begin()
    seconds = np.full(200_000, 0.1)
    seconds[123_456] = 9.0
    run.progress._rows = np.frombuffer(committed(0, 200_000, seconds=seconds), ROWS).copy()
    run.progress._size = 200_000
    house.order(SUBSCRIBE)
    house.wait(0.5)
    assert house.client.sizes[0] < TYPICAL_BYTES
    assert house.client.frames[0][0].thinned == ("rows",)
    steps = house.client.column("rows.step")
    assert {0, 123_456, 199_999} <= set(steps)
    assert steps == sorted(steps)


def batch_of(slot, first, num, began, period_s):
    """Records of `num` steps with four buckets each, as one engine would send them."""
    moments = began + period_s * np.arange(num)
    kinds = [
        *((kind, 0.0, 0.4) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.COMPUTE)),
        *((kind, 0.4, 0.8) for kind in (Kind.VOTE, Kind.OPTIMIZER, Kind.DATA)),
        *((Kind.BUCKET_READY, 0.3, 0.3), (Kind.BUCKET_LAUNCH, 0.3, 0.3)) * 4,
        *((Kind.BUCKET_DONE, 0.3, 0.5),) * 4,
        (Kind.STEP, 0.0, 0.9),
        (Kind.SAMPLES, 0.9, 0.9),
    ]
    records = np.zeros((num, len(kinds)), RECORD)
    for place, (kind, begins, ends) in enumerate(kinds):
        own = records[:, place]
        own["kind"], own["step"] = kind, first + np.arange(num)
        own["t0_ns"] = (moments + begins * period_s) * 1e9
        own["t1_ns"] = (moments + ends * period_s) * 1e9
        own["ident"], own["generation"], own["value"] = place % 4, 1, slot
    return records.reshape(-1)


def flood(house, run, seconds, first):
    """64 ranks, 200 steps a second, telemetry ten times a second; the next step."""
    for _ in range(int(seconds * 10)):
        for slot in range(64):
            records = batch_of(slot, first, 20, house.now, 0.005)
            house.collector.series.add(slot, records)
        run.progress.add(0, committed(first, first + 20))
        first += 20
        house.look(0.05)
        house.look(0.05)
    return first


def test_a_flood_becomes_few_frames_of_bounded_size():
    """64 ranks of 200 steps a second: at most four messages a second to a subscriber, none larger
    than the limit, memory flat, also while the subscriber takes nothing (V21)."""
    house = House(max_mb=64)
    run = house.begin()
    house.order(SUBSCRIBE)
    first = flood(house, run, 0.5, 0)
    house.client.frames.clear()
    first = flood(house, run, 0.8, first)
    assert 2 <= len(house.client.frames) <= 0.8 / PERIOD_S + 1
    assert max(house.client.sizes) <= MAX_BYTES
    assert {"steps"} <= set(house.client.last.thinned)
    slots = house.client.frames[-1][1]["steps"]["slot"]
    assert len(np.unique(slots)) == 64
    house.acknowledges = False
    house.client.frames.clear()
    tracemalloc.start()
    flood(house, run, 0.3, first)
    growth, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(house.client.frames) <= WINDOW
    assert growth < 16e6  # the series themselves are still filling their budget
    assert house.collector.series.num_bytes <= 64e6
