"""The supervisor's half of training runs: what members are told, and when."""

from __future__ import annotations

import numpy as np
import pytest

from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol.story import ROWS
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor import instructions as do
from nbdist.supervisor.runs import NUM_PAST, Runs


def membership(*slots, generation=3):
    members = tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in slots)
    return Membership(generation=generation, members=members)


class Table:
    """Runs of a group, and what was said since the last look."""

    def __init__(self, *slots):
        self.out = []
        self.runs = Runs(self.out)
        self.group = membership(*(slots or (0, 1)))

    @property
    def run(self):
        return self.runs.present

    def said(self):
        """(slot, order) for each order; what else was said as it is."""
        new = [(i.slot, i.order) if isinstance(i, do.Tell) else i for i in self.out]
        self.out.clear()
        return new

    def told(self, kind):
        return {slot: order for slot, order in self._orders() if isinstance(order, kind)}

    def _orders(self):
        return [said for said in self.said() if isinstance(said, tuple)]

    def begin(self, run="r", steps=5):
        return self.runs.begin(run, rn.BeginRun(name="trainer", steps=steps))

    def bound(self, slot, step=0, fault=None, run="r"):
        self.runs.bound(rn.RunBound(slot=slot, pid=100 + slot, run=run, step=step, fault=fault))

    def go(self):
        """All stand: take the next turn."""
        self.runs.settle(self.group)
        self.runs.go_on(self.group)

    def held(self, slot, step, **other):
        about = {"run": self.run.spec.run, "number": self.run.number} | other
        event = rn.RunHeld(slot=slot, pid=100 + slot, generation=3, step=step, **about)
        return self.runs.held(event, self.group, 1.0)

    def stand(self, step):
        return [self.held(slot, step) for slot in self.group.slots][-1]

    def steer(self, action, steps=0, run="r"):
        return self.runs.steer(rn.SteerRun(run=run, action=action, steps=steps))

    def enter(self, slot, step=0, steps=4, *, cell="c", loop=0, refusal=""):
        event = rn.RunEntered(
            slot=slot, pid=100 + slot, cell=cell, loop=loop, step=step, steps=steps
        )
        return self.runs.entered(event, self.group, 1.0, refusal)

    def leave(self, slot, step, run="c.0"):
        event = rn.RunLeft(slot=slot, pid=100 + slot, run=run, step=step)
        return self.runs.left(event, self.group, 2.0)

    @classmethod
    def going(cls, *slots, steps=5, step=0):
        """A run that goes on all members."""
        table = cls(*slots)
        assert table.begin(steps=steps) == ""
        for slot in table.group.slots:
            table.bound(slot, step)
        table.go()
        table.said()
        return table

    @classmethod
    def paused(cls, step=2):
        table = cls.going()
        table.steer("pause")
        table.stand(step)
        table.go()
        assert table.run.state == "paused"
        return table

    @classmethod
    def looping(cls, *slots, steps=4):
        """A cell's own loop that goes on all members."""
        table = cls(*slots)
        for slot in table.group.slots:
            table.enter(slot, steps=steps)
        table.go()
        table.said()
        return table


# ---- beginning


def test_a_run_begins_when_all_members_have_found_their_trainer():
    """Nothing goes before the last is bound; then all are told the same target."""
    table = Table()
    table.begin(steps=5)
    table.runs.bind(table.group)
    assert table.told(rn.BindRun) == dict.fromkeys((0, 1), rn.BindRun(spec=table.run.spec))
    table.bound(0, 7)
    table.go()
    assert table.said() == []
    table.bound(1, 7)
    table.go()
    said = table.said()
    assert said[0] == do.AnswerRun("r", rn.RunBegun(run="r", step=7))
    order = rn.GoOn(spec=table.run.spec, generation=3, until=12, number=1)
    assert said[1:] == [(0, order), (1, order)]
    assert (table.run.state, table.run.step, table.run.target) == ("running", 7, 12)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_of_no_steps_is_refused(steps):
    """The number is named; no run is there."""
    table = Table()
    assert str(steps) in table.begin(steps=steps)
    assert table.run is None


def test_one_run_at_a_time():
    """A second one is refused, also while a cell comes to its own loop."""
    assert "a run trains" in Table.going().begin("s")
    table = Table()
    table.enter(0)
    assert "a run trains" in table.begin()


@pytest.mark.parametrize(
    ("bound", "kind", "words"),
    [
        ([(0, 0, None), (1, 0, "NameError")], "NameError", "rank 1: no trainer"),
        ([(0, 3, None), (1, 4, None)], "WrongState", "{0: 3, 1: 4}"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_and_leaves_no_port(bound, kind, words):
    """The refusal names rank and reason; every member lets go of the run; nothing is remembered."""
    table = Table()
    table.begin()
    for slot, step, fault in bound:
        table.bound(slot, step, fault and rn.RunFault(kind=fault, message="no trainer"))
    table.go()
    said = table.said()
    (answer,) = [s for s in said if isinstance(s, do.AnswerRun)]
    assert answer.answer.kind == kind
    assert words in answer.answer.message
    assert {s[0] for s in said if isinstance(s, tuple)} == {0, 1}
    assert table.run is None
    assert not table.runs.past


def test_a_trainer_that_is_bound_to_an_unknown_run_is_let_go():
    """A supervisor that is gone had begun it: the engine is told that it is over."""
    table = Table()
    table.bound(1, run="lost")
    assert table.told(rn.EndRun) == {1: rn.EndRun(run="lost")}


def test_a_run_that_ends_before_it_began_is_answered():
    """Whoever asked for it is not left waiting."""
    table = Table()
    table.begin()
    table.runs.end("failed", table.group, rn.RunFault(kind="RecoveryFailed", message="all gone"))
    (answer,) = [s for s in table.said() if isinstance(s, do.AnswerRun)]
    assert answer.answer == od.Refused(kind="RecoveryFailed", message="all gone")


# ---- going and standing


def test_it_stands_when_all_members_say_so():
    """The last report makes it stand, at their step; then it goes on, under the next number."""
    table = Table.going()
    assert table.held(0, 2) == ""
    assert table.runs.is_going
    assert table.held(1, 2) == ""
    assert not table.runs.is_going
    assert table.run.step == 2
    table.go()
    assert {o.number for o in table.told(rn.GoOn).values()} == {2}


@pytest.mark.parametrize("other", [{"run": "old"}, {"number": 0}])
def test_reports_of_another_order_do_not_count(other):
    """Another run, or an order to go on that is over."""
    table = Table.going()
    table.held(0, 2, **other)
    table.held(1, 2)
    assert table.runs.is_going


def test_a_report_that_comes_twice_counts_once():
    """A member that said again that it stands is told to go on like the others."""
    table = Table.going()
    table.stand(2)
    table.held(0, 2)
    table.go()
    assert set(table.told(rn.GoOn)) == {0, 1}


def test_members_that_stand_apart_are_trouble():
    """It says at which steps; the group has to be made anew."""
    table = Table.going()
    table.held(0, 2)
    assert "[2, 3]" in table.held(1, 3)


def test_a_hold_is_said_once():
    """And again only after it stood."""
    table = Table.going()
    table.runs.hold(table.group)
    table.runs.hold(table.group)
    assert [slot for slot, _ in table.said()] == [0, 1]
    table.stand(1)
    table.go()
    table.said()
    table.runs.hold(table.group)
    assert set(table.told(rn.HoldRun)) == {0, 1}


def test_what_may_have_been_lost_is_told_again():
    """The same order with the same number, and the hold; not to one that stands already."""
    table = Table.going()
    table.runs.hold(table.group)
    table.said()
    table.runs.tell_again(1, table.group)
    (_, go), (_, hold) = table.said()
    assert (go.number, go.until) == (1, 5)
    assert isinstance(hold, rn.HoldRun)
    table.held(1, 1)
    table.runs.tell_again(1, table.group)
    assert table.said() == []


def test_a_binding_is_asked_again():
    """Of those only that have not answered."""
    table = Table()
    table.begin()
    table.bound(0)
    table.runs.tell_again(0, table.group)
    table.runs.tell_again(1, table.group)
    assert set(table.told(rn.BindRun)) == {1}


def test_it_finishes_at_its_target():
    """All are told the end, and orders are refused then."""
    table = Table.going()
    table.stand(5)
    table.go()
    assert set(table.told(rn.EndRun)) == {0, 1}
    assert table.run is None
    assert table.runs.find("r").state == "finished"
    assert "finished" in table.steer("pause")
    assert "not known" in table.steer("pause", run="x")


@pytest.mark.parametrize(("step", "between"), [(0, None), (1, (0, 1)), (4, (3, 4))])
def test_a_cell_is_told_between_which_steps_it_runs(step, between):
    """The last one before and the first one after; None where nothing is committed."""
    table = Table.going()
    table.stand(step)
    assert table.runs.between == between
    assert Table().runs.between is None


# ---- the user's orders


def test_a_pause_is_taken_at_a_boundary():
    """It stays; a resume makes all go on."""
    table = Table.paused()
    table.said()
    table.go()
    assert table.said() == []
    table.steer("resume")
    table.go()
    assert set(table.told(rn.GoOn)) == {0, 1}


@pytest.mark.parametrize(("took_s", "counted_s"), [(61.0, 1.5), (0.25, 0.25)])
def test_a_pause_is_no_time_of_a_step(took_s, counted_s):
    """It is left out of the step after it; who came to the group after it has not measured it."""
    table = Table.paused(step=2)
    table.run.note_pause(10.0)
    table.run.note_pause(40.0)  # something else happens meanwhile
    table.steer("resume")
    table.run.note_pause(69.5)
    table.run.note_pause(70.0)
    rows = np.zeros(4, ROWS)
    rows["step"], rows["generation"], rows["samples"] = np.arange(4), 1, 8
    rows["seconds"] = [1.0, 1.0, took_s, 1.0]
    event = rn.StepsCommitted(slot=0, run="r", rows=rows.tobytes())
    table.runs.committed(event)
    assert table.run.progress.rows["seconds"].tolist() == [1.0, 1.0, counted_s, 1.0]
    assert table.run.progress.seconds == 3.0 + counted_s


def test_some_steps_and_then_a_pause():
    """From a pause only, and never beyond the target."""
    table = Table.paused(step=2)
    assert "at least 1" in table.steer("step")
    assert table.steer("step", 2) == ""
    table.go()
    assert {o.until for o in table.told(rn.GoOn).values()} == {4}
    assert "pause it" in table.steer("step", 1)
    table.stand(4)
    table.go()
    assert (table.run.state, table.run.until) == ("paused", None)
    table.steer("step", 9)
    assert table.run.until == 5


def test_no_steps_where_a_run_merely_stands():
    """It stands for a cell, or its group is broken; nobody paused it."""
    table = Table.going()
    table.runs.stand()
    assert "pause it" in table.steer("step", 1)


def test_a_pause_ends_a_walk_of_steps():
    """What was left of the steps is forgotten."""
    table = Table.paused()
    table.steer("step", 3)
    table.go()
    table.steer("pause")
    table.stand(3)
    table.go()
    assert (table.run.state, table.run.until) == ("paused", None)


@pytest.mark.parametrize("table", [Table.going, Table.paused], ids=["going", "paused"])
def test_a_stop_ends_it_at_the_next_boundary(table):
    """Going or paused."""
    table = table()
    table.steer("stop")
    if table.runs.is_going:
        assert table.run.wants_stand
        table.stand(3)
    table.go()
    assert table.run is None
    assert table.runs.past[-1].state == "stopped"


def test_a_setting_goes_with_the_next_order_to_go_on():
    """While it is paused nobody is told: it may end before; it is told once."""
    table = Table.paused()
    assert table.runs.set(rn.SetRun(run="r", lr=0.5)) == ""
    assert table.run.wants_stand
    table.said()
    table.go()
    assert table.said() == []
    table.steer("resume")
    table.go()
    assert {o.lr for o in table.told(rn.GoOn).values()} == {0.5}
    table.stand(3)
    table.go()
    assert {o.lr for o in table.told(rn.GoOn).values()} == {None}
    assert "not known" in table.runs.set(rn.SetRun(run="x", lr=0.5))


def test_old_runs_are_forgotten():
    """The last ones are remembered, the present one among them."""
    table = Table()
    for number in range(NUM_PAST + 3):
        table.begin(f"r{number}", steps=1)
        for slot in (0, 1):
            table.bound(slot, run=f"r{number}")
        table.go()
        table.stand(1)
        table.go()
    views = table.runs.views(is_whole=True)
    assert [v.spec.run for v in views] == [f"r{n}" for n in range(3, NUM_PAST + 3)]
    assert table.runs.find("r0") is None


@pytest.mark.parametrize(
    ("make", "state"), [(Table.going, "recovering"), (Table.paused, "paused")], ids=["go", "pause"]
)
def test_how_a_run_looks_while_the_group_is_broken(make, state):
    """One that goes recovers; one that is paused is no less paused."""
    (view,) = make().runs.views(is_whole=False)
    assert view.state == state


# ---- own loops


def test_an_own_loop_begins_when_all_have_come_to_it():
    """The kernel is told that the cell trains; all are told the same target."""
    table = Table()
    table.enter(0, step=3)
    assert table.run is None
    table.enter(1, step=3)
    assert table.said() == [do.Notify(rn.CellTrains(cell="c", is_training=True))]
    table.go()
    assert {o.until for o in table.told(rn.GoOn).values()} == {7}
    assert table.runs.cell == "c"


def test_ranks_that_want_different_steps_are_all_sent_away():
    """Each gets the error, which names what every rank wants."""
    table = Table()
    table.enter(0, steps=4)
    table.enter(1, steps=5)
    ends = table.told(rn.EndRun)
    assert set(ends) == {0, 1}
    assert all("{0: '4 from step 0', 1: '5 from step 0'}" in e.fault.message for e in ends.values())
    assert table.run is None
    assert not table.runs.entering


def test_a_cell_that_cannot_train_is_sent_away_with_all_that_wait_for_it():
    """It was sent to some ranks only, or raised elsewhere: nobody waits for ever."""
    table = Table(0, 1, 2)
    table.enter(0)
    table.enter(1, refusal="this cell was sent to [0, 1] only")
    ends = table.told(rn.EndRun)
    assert {slot: end.fault.kind for slot, end in ends.items()} == {
        0: "WrongState",
        1: "WrongState",
    }
    assert not table.runs.entering


def test_one_that_turns_back_at_the_door_sends_the_others_away():
    """Interrupted while it waited: the loop would begin without it."""
    table = Table(0, 1, 2)
    table.enter(0)
    table.enter(1)
    table.leave(1, 0)
    faults = {slot: end.fault for slot, end in table.told(rn.EndRun).items()}
    assert faults[0].kind == "WrongState"
    assert faults[1] is None
    assert not table.runs.entering


def test_an_own_loop_beside_another_run_is_refused():
    """Of a run of the user's, or of another cell's."""
    for table in (Table.going(), Table.looping()):
        table.enter(1, cell="other")
        assert table.told(rn.EndRun)[1].fault.kind == "WrongState"
        assert table.runs.is_going


def test_a_newcomer_comes_to_the_loop_that_trains():
    """It waits there until it is admitted, and is told the end too."""
    table = Table.looping()
    table.enter(2)
    assert table.run.entered == {2}
    table.stand(4)
    table.go()
    assert set(table.told(rn.EndRun)) == {0, 1, 2}


def test_a_newcomer_that_comes_late_leaves_the_earlier_loop_at_once():
    """Whether the cell is in its second loop by then, or on its way to it."""
    table = Table.looping()
    table.stand(4)
    table.go()
    table.said()
    table.enter(2)
    assert table.told(rn.EndRun) == {2: rn.EndRun(run="c.0")}
    for slot in (0, 1):
        table.enter(slot, step=4, loop=1)
    table.said()
    table.enter(2)
    assert table.told(rn.EndRun) == {2: rn.EndRun(run="c.0")}
    assert table.run.spec.run == "c.1"


def test_a_newcomer_may_be_first_at_the_second_loop():
    """It waits for its admission when the members have come."""
    table = Table.looping()
    table.stand(4)
    table.go()
    table.enter(2, step=4, loop=1)
    for slot in (0, 1):
        table.enter(slot, step=4, loop=1)
    assert (table.run.spec.run, table.run.entered) == ("c.1", {2})


def test_a_loop_that_all_leave_early_is_stopped():
    """The last one's leaving ends it; who goes on to the next loop meanwhile is not lost."""
    table = Table.looping()
    table.leave(0, 2)
    table.enter(0, step=2, loop=1)
    table.leave(1, 2)
    assert table.runs.find("c.0").state == "stopped"
    table.enter(1, step=2, loop=1)
    assert table.run.spec.run == "c.1"


def test_leaving_after_the_last_step_is_no_leaving():
    """The run has all its steps, whoever breaks out then."""
    table = Table.looping()
    table.leave(0, 4)
    table.held(1, 4)
    table.go()
    assert table.runs.find("c.0").state == "finished"
    other = Table.looping()
    other.leave(0, 4)
    other.leave(1, 4)
    assert other.runs.find("c.0").state == "finished"


def test_one_that_leaves_while_the_others_stand_fails_the_run():
    """They are told who left instead of waiting for it."""
    table = Table.looping(0, 1, 2)
    table.held(0, 2)
    table.leave(1, 2)
    table.held(2, 2)
    table.go()
    fault = table.told(rn.EndRun)[0].fault
    assert (fault.kind, "rank 1 left" in fault.message) == ("WrongState", True)


def test_who_comes_to_the_second_loop_has_left_the_first():
    """Also where the report of it went to a supervisor that is gone."""
    table = Table.looping()
    table.enter(0, step=2, loop=1)
    table.enter(1, step=2, loop=1)
    assert table.runs.find("c.0").state == "stopped"
    assert table.run.spec.run == "c.1"


def test_all_that_are_left_have_left():
    """The last one that trained is gone: the run is over, not waited for."""
    table = Table.looping()
    table.leave(0, 2)
    table.runs.lost(1)
    table.group = membership(0, generation=4)
    table.runs.stand()
    table.go()
    assert table.runs.find("c.0").state == "stopped"


def test_a_cell_that_is_over_ends_its_loops():
    """The one that trains, and those at the door."""
    table = Table.looping()
    table.runs.end_cell("c", table.group)
    ends = table.told(rn.EndRun)
    assert {slot: e.fault.kind for slot, e in ends.items()} == {0: "RunEnded", 1: "RunEnded"}
    door = Table()
    door.enter(0)
    door.runs.end_cell("c", door.group)
    assert door.told(rn.EndRun)[0].fault.kind == "RunEnded"
    assert not door.runs.entering


def test_an_engine_that_is_gone_is_nowhere():
    """Not bound, not standing, not at the door."""
    table = Table()
    table.enter(0)
    table.runs.lost(0)
    assert not table.runs.entering
    table = Table.going()
    table.held(0, 1)
    table.runs.lost(0)
    assert table.run.held == {}
    assert set(table.run.bound) == {1}


# ---- another supervisor


def rows(*steps, generation=1):
    data = [(s, 0.5, 60, 0.1, generation, 2, 0.1, float(s)) for s in steps]
    return np.array(data, ROWS).tobytes()


def take_up(table, data=b""):
    taken = Table(*table.group.slots)
    taken.runs.take_up(table.runs.views(is_whole=True), lambda _: data)
    return taken


def test_a_run_that_goes_is_taken_up_going():
    """The same order is told again, setting and number too; a report then counts."""
    table = Table.going(step=7)
    table.stand(9)
    table.runs.set(rn.SetRun(run="r", lr=0.5))
    table.go()
    orders = table.told(rn.GoOn)
    taken = take_up(table, rows(7, 8))
    assert taken.runs.is_going
    for slot in (0, 1):
        taken.runs.tell_again(slot, taken.group)
    assert taken.told(rn.GoOn) == orders
    taken.stand(12)
    taken.go()
    assert taken.runs.find("r").state == "finished"
    assert (taken.runs.find("r").progress.first, len(taken.runs.find("r").progress.rows)) == (7, 2)


def test_a_run_that_is_paused_is_taken_up_paused():
    """At its step, of which steps are counted."""
    taken = take_up(Table.paused(step=2))
    taken.go()
    assert (taken.run.state, taken.run.step) == ("paused", 2)
    assert taken.steer("step", 2) == ""
    assert taken.run.until == 4


def test_rows_that_nobody_wrote_down_do_not_make_a_run_begin_at_zero():
    """The first row that comes says where it began."""
    taken = take_up(Table.going(step=500, steps=10))
    event = rn.StepsCommitted(slot=0, run="r", rows=rows(500, 501))
    _, fresh = taken.runs.committed(event)
    assert len(fresh) == 2
    assert taken.run.progress.first == 500


def test_what_is_over_is_not_begun_again():
    """A loop that was entered before, and whose end was lost, is ended again with its fault."""
    table = Table.looping()
    table.runs.end("failed", table.group, rn.RunFault(kind="ValueError", message="bad"))
    taken = take_up(table)
    taken.enter(0)
    assert taken.told(rn.EndRun)[0].fault.kind == "ValueError"
    assert not taken.runs.entering


def test_an_evaluation_counts_once():
    """All ranks report it; a report of a run that is not known is passed over."""
    table = Table.going()
    for slot in (0, 1):
        evaluation = {"step": 2, "at": 1.0, "metrics": {"loss": 0.5}}
        event = rn.RunEvaluated(slot=slot, run="r", evaluation=rn.Evaluation(**evaluation))
        table.runs.evaluated(event)
    assert len(table.run.evaluations) == 1
    assert table.runs.committed(rn.StepsCommitted(slot=0, run="x", rows=b"")) is None
