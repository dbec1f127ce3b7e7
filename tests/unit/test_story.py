"""Incidents: opened, timed, closed."""

from __future__ import annotations

from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor import story
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
