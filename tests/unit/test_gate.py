"""Cells and membership changes: which cells run, which wait, who is waited for in vain."""

from __future__ import annotations

from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor.gate import ENDED_S, NUM_ENDED, Gate, WaitingCell
from nbdist.supervisor.instructions import AdmitCell, RefuseCell

PAIR = Membership(
    generation=3,
    members=tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in (0, 2)),
)


def waiting(*cells):
    gate = Gate()
    gate.waiting = [WaitingCell(cell, ranks) for cell, ranks in cells]
    return gate


def test_everything_that_waits_is_admitted_in_order():
    """First come, first admitted; no ranks named means all."""
    gate = waiting(("a", None), ("b", (1,)))
    assert gate.admit(PAIR) == [AdmitCell("a", PAIR, (0, 1)), AdmitCell("b", PAIR, (1,))]
    assert gate.open == {"a", "b"}
    assert gate.waiting == []
    assert gate.admit(PAIR) == []


def test_a_rank_that_is_not_there_is_refused_and_the_others_admitted():
    """The refusal names the rank and those that there are; the cell never counts as open."""
    gate = waiting(("a", (0, 2)), ("b", (-1,)), ("c", None))
    first, second, third = gate.admit(PAIR)
    assert (first.kind, second.kind) == ("TargetError", "TargetError")
    assert "no rank 2: the present world has ranks 0-1" in first.message
    assert "no rank -1" in second.message
    assert third.cell == "c"
    assert gate.open == {"c"}


def test_everything_that_waits_is_refused():
    """A failed world turns all away, once."""
    gate = waiting(("a", None), ("b", None))
    assert gate.refuse("RecoveryFailed", "gone") == [
        RefuseCell("a", "RecoveryFailed", "gone"),
        RefuseCell("b", "RecoveryFailed", "gone"),
    ]
    assert gate.refuse("RecoveryFailed", "gone") == []


def test_a_failure_counts_while_its_cell_is_open():
    """Failures of cells that are not open, or are over, are not kept."""
    gate = waiting(("a", None))
    gate.failed_on("a", 0, 1.0)
    gate.admit(PAIR)
    gate.failed_on("b", 0, 1.0)
    assert gate.failed == {}
    gate.failed_on("a", 0, 1.0)
    assert gate.failed_slots("a") == {0}
    gate.end("a", 2.0)
    assert (gate.open, gate.failed) == (set(), {})
    assert gate.failed_slots("a") == set()


def test_a_rank_waits_in_vain_since_the_first_failure_in_its_cell():
    """Only for one that runs the same cell and did not raise itself."""
    gate = waiting(("a", None), ("b", None))
    gate.admit(PAIR)
    assert gate.stuck_since("a", 2) is None
    gate.failed_on("a", 0, 5.0)
    gate.failed_on("a", 1, 4.0)
    assert gate.stuck_since("a", 2) == 4.0
    assert gate.stuck_since("a", 0) is None
    assert gate.stuck_since("b", 2) is None
    assert gate.stuck_since(None, 2) is None
    assert gate.failed_slots(None) == set()


def test_the_user_can_only_interrupt_a_cell_that_is_open():
    """One that waits at the door or is over has nobody who waits in it; the end forgets it."""
    gate = waiting(("a", None))
    gate.interrupt("a", 1.0)
    assert gate.interrupted == {}
    gate.admit(PAIR)
    gate.interrupt("a", 2.0)
    assert gate.stuck_since("a", 0) == 2.0
    gate.end("a", 3.0)
    gate.interrupt("a", 4.0)
    assert gate.interrupted == {}


def test_an_interrupt_frees_those_that_raised_too():
    """The user wants all of them back, whatever else has happened in the cell."""
    gate = waiting(("a", None))
    gate.admit(PAIR)
    gate.failed_on("a", 0, 1.0)
    gate.interrupt("a", 2.0)
    assert {gate.stuck_since("a", slot) for slot in (0, 2)} == {2.0}


def test_a_wait_in_a_cell_that_is_over_is_for_nothing_after_a_moment():
    """A beat may be a little older than the end; then it counts, whoever raised or interrupted."""
    gate = waiting(("a", None), ("b", None))
    gate.admit(PAIR)
    gate.failed_on("a", 0, 1.0)
    gate.interrupt("a", 2.0)
    gate.end("a", 5.0)
    assert {gate.stuck_since("a", slot) for slot in (0, 2)} == {5.0 + ENDED_S}
    assert gate.stuck_since("b", 0) is None
    assert gate.stuck_since("never seen", 0) is None


def test_of_the_cells_that_are_over_only_the_last_are_known():
    """What is remembered of them is bounded, and the oldest go first."""
    gate = Gate()
    for number in range(NUM_ENDED + 3):
        gate.end(f"{number}", float(number))
    assert list(gate.ended) == [f"{number}" for number in range(3, NUM_ENDED + 3)]
    assert gate.stuck_since("2", 0) is None
