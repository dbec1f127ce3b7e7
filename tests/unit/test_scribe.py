"""The scribe: each run has its record, from its beginning to its end, and nothing twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbdist.protocol import runs as rn
from nbdist.protocol.events import Incident
from nbdist.protocol.orders import WorldView
from nbdist.protocol.story import ROWS, Evaluation
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor.collector import Collector
from nbdist.supervisor.progress import Progress
from nbdist.supervisor.replay import read
from nbdist.supervisor.runs import Run, Runs
from nbdist.supervisor.scribe import LINGER_S, NUM_AGAIN, Scribe
from nbdist.supervisor.series import Series

PAIR = Membership(
    generation=1, members=tuple(Member(slot=s, engine_id=s, pid=s, host="") for s in (0, 1))
)


def view(*incidents):
    return WorldView(
        phase="running",
        membership=PAIR,
        seats=(),
        size=2,
        num_formed=2,
        healthy=True,
        reason="",
        incidents=incidents,
    )


def rows(first, num, generation=1):
    out = np.zeros(num, ROWS)
    out["step"], out["generation"] = np.arange(first, first + num), generation
    return out.tobytes()


class House:
    """What a scribe looks at, and the time."""

    def __init__(self, folder):
        self.folder, self.now = folder, 10.0
        self.runs = Runs([])
        self.collector = Collector(Series(max_mb=1))
        self.incidents = ()
        self.scribe = self.new_scribe()

    def new_scribe(self):
        return Scribe(str(self.folder), "0123", self.collector)

    def begin(self, name="r1", first=0):
        run = Run(rn.RunSpec(run=name, name="trainer"), 5, state="running", step=first)
        run.progress = Progress(first)
        self.runs.present = run
        return run

    def look(self):
        self.now += 0.05
        self.scribe.look(self.runs, view(*self.incidents), self.now)

    def wait(self, seconds):
        self.now += seconds
        self.look()

    def record(self, name="r1"):
        return read(self.folder / f"0123-{name}.jsonl")


@pytest.fixture
def house(tmp_path):
    return House(tmp_path / "runs")


def test_a_run_is_written_down(house, made_up):
    """Its steps as they are committed, each once, its evaluations, telemetry, world and end."""
    run = house.begin()
    engine = made_up()
    for first in (0, 2, 4):
        for slot in (0, 1):
            run.progress.add(slot, rows(first, 2))
            house.look()
        engine.step(first)
        house.collector.take(engine.batch(), 1)
    run.evaluations.append(Evaluation(step=4, at=1.0, metrics={"accuracy": 0.5}))
    house.look()
    house.runs.end("finished", PAIR)
    house.look()
    engine.step(6)
    house.collector.take(engine.batch(), 1)  # the last telemetry comes a little later
    house.wait(LINGER_S)
    replay = house.record()
    assert replay.header.title == "trainer, run r1"
    assert replay.rows["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [e.step for e in replay.evaluations] == [4]
    assert [w.phase for w in replay.worlds] == ["running"]
    assert replay.ended.how == "finished"
    assert len(replay.series.curves(0)["loss"][0]) == 4
    assert replay.notes == []
    text = (house.folder / "0123-r1.jsonl").read_text()
    steps = [line for line in map(json.loads, text.splitlines()) if line["type"] == "Steps"]
    assert [line["num"] for line in steps] == [2, 2, 2]
    assert house.collector.recorder is None


def test_steps_that_ran_again_stand_as_they_were_committed_last(house):
    """Whoever had applied them is gone."""
    run = house.begin()
    run.progress.add(0, rows(0, 5))
    house.look()
    run.progress.add(1, rows(3, 4, generation=2))
    house.look()
    found = house.record().rows
    assert found["step"].tolist() == list(range(7))
    assert found["generation"].tolist() == [1, 1, 1, 2, 2, 2, 2]


def test_the_next_run_has_a_record_of_its_own(house):
    """The one before ends at once; incidents of its time are not told again."""
    house.begin("r1")
    old = Incident(
        kind="lost", slots=(1,), ranks=(1,), cause="", generation_before=1, generation_after=2
    )
    house.look()
    house.incidents = (old,)
    house.look()
    house.runs.end("stopped", PAIR)
    house.look()
    house.begin("r2", first=5).progress.add(0, rows(5, 1))
    house.look()
    assert house.record("r1").ended.how == "stopped"
    assert house.record("r1").incidents == [old]
    assert house.record("r2").rows["step"].tolist() == [5]
    assert house.record("r2").incidents == []


def test_what_the_user_did_and_what_was_wanted_are_written_down(house):
    """A record knows how many steps were wanted, and that engines were made slow."""
    run = house.begin("r1", first=5)
    run.target = 905
    house.look()
    run.remark_slow((1,), 5.0)
    house.look()
    run.remark_slow((1,), 1.0)
    house.runs.end("stopped", PAIR)
    for _ in range(2):
        house.wait(1.0)
    story = house.record("r1").story()
    assert [note.partition(" on ")[2] for note in story.notes[:2]] == [
        "slot 1: made 5 times as slow",
        "slot 1: as fast as before",
    ]
    assert (story.first, story.target) == (5, 905)


def test_a_fault_is_told(house):
    """With its kind and message."""
    house.begin()
    house.look()
    house.runs.end("failed", PAIR, rn.RunFault(kind="ValueError", message="bad"))
    house.look()
    house.scribe.close()
    assert house.record().ended.how == "failed: ValueError: bad"


def test_a_cluster_that_ends_ends_its_run(house):
    """The record says so, and what came last is in it."""
    run = house.begin()
    house.look()
    run.progress.add(0, rows(0, 3))
    house.scribe.close()
    house.scribe.close()
    assert house.record().ended.how == "with the cluster"
    assert house.record().rows["step"].tolist() == [0, 1, 2]


def test_a_supervisor_that_takes_over_goes_on(house):
    """In the same file; the last steps are written again, since nobody knows which were."""
    run = house.begin()
    run.progress.add(0, rows(0, 2 * NUM_AGAIN))
    house.look()
    run.progress.add(0, rows(2 * NUM_AGAIN, 3))
    house.scribe = house.new_scribe()
    house.look()
    replay = house.record()
    assert replay.rows["step"].tolist() == list(range(2 * NUM_AGAIN + 3))
    assert "another supervisor took over" in replay.notes[0]


def test_without_a_folder_nothing_is_written(house, tmp_path):
    """Runs are not recorded unless the user wants it."""
    house.scribe = Scribe("", "0123", house.collector)
    house.begin()
    house.look()
    assert house.collector.recorder is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_bound_yet_is_none(house):
    """It may be refused."""
    house.begin().state = "binding"
    house.look()
    assert not house.folder.exists()


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, caplog):
    """The run goes on without a record."""
    (tmp_path / "file").write_text("")
    house = House(tmp_path / "file" / "runs")
    house.begin().progress.add(0, rows(0, 1))
    for _ in range(3):
        house.look()
    house.scribe.close()
    assert len(caplog.records) == 1
