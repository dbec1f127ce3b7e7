"""Incidents: opened, timed, closed."""

from __future__ import annotations

import numpy as np
import pytest

from nbdist.protocol.runs import RunSpec
from nbdist.protocol.story import ROWS
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor import story
from nbdist.supervisor.progress import Progress
from nbdist.supervisor.run import Run
from nbdist.supervisor.story import Story


def membership(generation, *slots):
    members = tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in slots)
    return Membership(generation=generation, members=members)


def test_an_incident_is_timed_from_its_beginning():
    """Regrouping and the stall count from the beginning, restoring from the formed group."""
    told = Story()
    begun = told.begin("lost", 1, {1: 1}, "SIGKILL", 10.0)
    told.regrouped(12.0)
    told.end(membership(2, 0, 2), {0: {}, 2: {}}, restoring_since=12.0, run=None, now=12.5)
    (incident,) = told.incidents
    assert incident is begun
    assert (incident.kind, incident.slots, incident.ranks) == ("lost", (1,), (1,))
    assert (incident.cause, incident.generation_before) == ("SIGKILL", 1)
    assert incident.generation_after == 2
    assert incident.regroup_s == 2.0
    assert (incident.restore_s, incident.stall_s) == (0.5, 2.5)


def test_an_open_incident_says_so():
    """What did not take place yet is None."""
    told = Story()
    told.begin("lost", 1, {1: 1}, "SIGKILL", 10.0)
    (incident,) = told.incidents
    assert incident.generation_after is None
    assert incident.detect_s is None
    assert incident.regroup_s is None
    assert incident.stall_s is None


def test_a_closed_incident_is_not_touched_again():
    """The next change has an incident of its own."""
    told = Story()
    told.begin("lost", 1, {1: 1}, "SIGKILL", 10.0)
    told.end(membership(2, 0), {0: {}}, restoring_since=11.0, run=None, now=11.0)
    told.begin("joined", 2, {1: None}, "refill", 20.0)
    told.regrouped(21.0)
    told.end(membership(3, 0, 1), {0: {}, 1: {}}, restoring_since=21.0, run=None, now=21.0)
    first, second = told.incidents
    assert (first.generation_after, first.stall_s) == (2, 1.0)
    assert (second.generation_after, second.stall_s) == (3, 1.0)


def test_who_joined_has_its_new_rank_and_what_it_lacks():
    """Ranks are those of the new group; a newcomer that is gone again has none."""
    told = Story()
    told.begin("joined", 2, dict.fromkeys((1, 3)), "refill", 10.0)
    told.end(
        membership(3, 0, 3),
        {0: {"a": "x"}, 3: {"b": "y"}},
        restoring_since=11.0,
        run=None,
        now=11.0,
    )
    (incident,) = told.incidents
    assert (incident.slots, incident.ranks) == ((1, 3), (1,))
    assert incident.not_restored == {"b": "y"}


def test_incidents_share_no_list_of_names():
    """What one newcomer lacks is not said of another."""
    told = Story()
    told.begin("joined", 1, {0: None}, "refill", 1.0)
    told.end(membership(2, 0), {0: {"b": "y"}}, restoring_since=1.0, run=None, now=1.0)
    told.begin("joined", 2, {0: None}, "refill", 2.0)
    told.end(membership(3, 0), {0: {}}, restoring_since=2.0, run=None, now=2.0)
    assert [i.not_restored for i in told.incidents] == [{"b": "y"}, {}]


def test_old_incidents_are_forgotten(monkeypatch):
    """The story is bounded: the oldest go first."""
    monkeypatch.setattr(story, "MAX_INCIDENTS", 3)
    told = Story()
    for generation in range(5):
        told.begin("lost", generation, {0: 0}, "SIGKILL", 1.0)
        told.end(membership(generation + 1, 0), {0: {}}, restoring_since=1.0, run=None, now=1.0)
    assert [i.generation_before for i in told.incidents] == [2, 3, 4]


def test_who_left_keeps_the_rank_that_it_had():
    """A shrink names the ranks that were given back, beside those that came."""
    told = Story()
    told.begin("scaled", 2, {1: 1, 3: 2}, "user", 10.0)
    told.end(membership(3, 0), {0: {}}, restoring_since=10.0, run=None, now=10.0)
    told.begin("scaled", 3, {0: 0, 2: None}, "user", 20.0)
    told.end(membership(4, 2, 5), {2: {}, 5: {}}, restoring_since=20.0, run=None, now=20.0)
    assert [i.ranks for i in told.incidents] == [(1, 2), (0, 0)]


# ---- under a run


def going(first=0, run="r"):
    spec = RunSpec(run=run, name="trainer")
    return Run(spec, 50, state="running", step=first, target=100, progress=Progress(first))


def commit(told, run, *rows):
    """Rows as (step, generation, at), reported by slot 0."""
    data = [(s, 0.5, 60, 0.1, g, 2, 0.1, at) for s, g, at in rows]
    told.resumed(run, run.progress.add(0, np.array(data, ROWS).tobytes()))


def lose(told, generation=1, now=10.0, run=None):
    told.begin("lost", generation, {1: 1}, "SIGKILL", now)
    told.end(membership(generation + 1, 0), {0: {}}, restoring_since=now + 1, run=run, now=now + 1)
    return told.incidents[-1]


def test_the_stall_is_measured_from_committed_steps():
    """From the last step before to the first one after, less a usual step; 0 samples are lost."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 8.0), (1, 1, 9.0))
    incident = lose(told, run=run)
    assert incident.stall_s is None
    commit(told, run, (2, 2, 11.5), (3, 2, 11.6))
    assert incident.stall_s == pytest.approx(2.4)
    assert (incident.step, incident.samples_lost, incident.steps_repeated) == (2, 0, 0)


def test_a_short_step_makes_no_negative_stall():
    """The first step after the change may be shorter than usual, as a short last batch is."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 9.0))
    incident = lose(told, run=run)
    commit(told, run, (1, 2, 9.01))
    assert incident.stall_s == 0.0


def test_losses_on_end_have_the_same_stall():
    """No step was committed between them: the first one after both ends both."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 9.0))
    first, second = lose(told, 1, run=run), lose(told, 2, now=12.0, run=run)
    commit(told, run, (1, 3, 14.0))
    assert first.stall_s == second.stall_s == pytest.approx(4.9)


def test_an_older_row_ends_no_stall():
    """A report that was late is no step after the change."""
    told, run = Story(), going()
    incident = lose(told, run=run)
    commit(told, run, (0, 1, 9.0))
    assert incident.stall_s is None


def test_steps_that_were_broken_and_ran_again_are_counted():
    """Not one that some member had applied: the others copied it."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 8.0), (1, 1, 9.0))
    run.broken |= {(1, 1), (1, 2), (1, 2), (0, 0)}
    incident = lose(told, run=run)
    commit(told, run, (2, 2, 11.0))
    assert incident.steps_repeated == 1


def test_samples_of_steps_that_nobody_reported_are_said():
    """The ledger lacks them: that is told, not passed over."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 9.0))
    incident = lose(told, run=run)
    commit(told, run, (3, 2, 11.0))
    assert (incident.samples_lost, incident.stall_s) == (120, pytest.approx(1.9))


def test_samples_of_a_step_that_is_only_under_way_are_not_lost():
    """Workers of a server commit steps out of order: one that comes later takes the word back."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 8.0), (1, 1, 9.0))
    incident = lose(told, run=run)
    commit(told, run, (4, 2, 11.0))
    assert incident.samples_lost == 120
    commit(told, run, (3, 2, 11.2))
    assert incident.samples_lost == 60
    commit(told, run, (2, 2, 12.0))
    assert (incident.step, incident.samples_lost) == (4, 0)


def test_the_stall_of_steps_out_of_order_is_that_between_their_times():
    """It ends with the step that was committed first, and begins with the last one before."""
    told, run = Story(), going()
    commit(told, run, (0, 1, 8.0), (2, 1, 8.5), (1, 1, 9.0))
    incident = lose(told, run=run)
    commit(told, run, (5, 2, 11.4), (4, 2, 11.1), (3, 2, 11.3))
    assert (incident.step, incident.stall_s) == (4, pytest.approx(2.0))
    assert incident.samples_lost == 0


def test_the_steps_of_another_run_end_no_stall():
    """The run ended without a step more: what stands of it is not told of the next."""
    told, run = Story(), going()
    incident = lose(told, run=run)
    commit(told, going(run="other"), (0, 2, 99.0))
    assert incident.stall_s is None
    lose(told, 2, run=None)
    commit(told, run, (0, 3, 120.0))
    assert incident.stall_s is None


@pytest.mark.parametrize(
    ("change", "will_go"),
    [
        ({}, True),
        ({"is_paused": True}, False),
        ({"is_stopping": True}, False),
        ({"step": 100}, False),
        ({"until": 5, "step": 5}, False),
        ({"state": "paused"}, False),
    ],
)
def test_a_run_that_will_not_go_on_has_no_stall_of_its_own(change, will_go):
    """Paused, stopped or at its end: no step will follow the change."""
    run = going()
    for name, value in change.items():
        setattr(run, name, value)
    assert run.will_go is will_go


def test_steps_that_are_trained_again_are_no_part_of_the_stall():
    """Where all go back to copies, it counts from the loss, and they are counted themselves."""
    told, run = Story(), going()
    commit(told, run, *((step, 1, 5.0 + step) for step in range(5)))
    incident = lose(told, now=10.0, run=run)
    incident.detect_s = 0.5
    commit(told, run, (2, 2, 11.6), (3, 2, 11.7))
    assert incident.stall_s == pytest.approx(11.6 - 9.5 - 0.1)
    assert (incident.step, incident.steps_repeated, incident.samples_lost) == (2, 3, 0)
