"""The world in words and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbdist
from nbdist.errors import TargetError
from nbdist.protocol.orders import SeatView, WorldView
from nbdist.protocol.topology import EMPTY, Member, Membership
from nbdist.session import status
from nbdist.session.status import (
    check_cell,
    check_limit,
    chosen_ranks,
    crowding,
    lack_of,
    rank_status,
    trouble_of,
    why_unhealthy,
)


def seat(slot=0, state="member", **more):
    about = {
        "rank": slot,
        "engine_id": 10 + slot,
        "pid": 100 + slot,
        "host": "here",
        "device": "cpu",
        "generation": 4,
        "rss_bytes": 5_000,
        "activity": "waits in barrier",
        "is_holder": True,
    }
    return SeatView(slot=slot, state=state, **about | more)


def world(*states, phase="running", reason=""):
    """Seats in these states; those that are members are in group 4."""
    members = tuple(
        Member(slot=slot, engine_id=10 + slot, pid=100 + slot, host="here")
        for slot, state in enumerate(states)
        if state == "member"
    )
    return WorldView(
        phase=phase,
        membership=Membership(generation=4, members=members) if members else EMPTY,
        seats=tuple(seat(slot, state) for slot, state in enumerate(states)),
        size=len(states),
        num_formed=len(members),
        healthy=False,
        reason=reason,
        incidents=(),
    )


def test_a_row_has_what_the_supervisor_says_of_a_seat():
    """Nothing is made up: what training measures is not known here."""
    row = rank_status(seat(2, rank=1, not_restored={"x": "it differs"}))
    assert (row.rank, row.slot, row.state, row.generation) == (1, 2, "member", 4)
    assert (row.pid, row.host, row.device, row.memory_bytes) == (102, "here", "cpu", 5_000)
    assert (row.activity, row.not_restored) == ("waits in barrier", {"x": "it differs"})
    assert (row.step, row.samples_per_second) == (None, None)


def test_the_step_of_a_run_is_that_of_its_members():
    """A newcomer has committed nothing yet."""
    assert rank_status(seat(0), 41).step == 41
    assert rank_status(seat(1, "replaying", rank=None), 41).step is None


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("waits in native code, {}/train/loop.py line 106: torch.autograd.backward(", "trains"),
        ("waits in all_reduce, {}/train/vote.py line 6: f(x)", "trains, in all_reduce"),
        (
            "waits in barrier, {}/data/text.py line 2",
            "waits in barrier, nbdist/data/text.py line 2",
        ),
        ("waits in barrier, cell line 2: dist.barrier()",) * 2,
        ("", ""),
    ],
)
def test_what_a_rank_does_is_said_without_lines_of_ours(told, shown):
    """The user's own lines stay."""
    package = Path(nbdist.__file__).parent
    assert rank_status(seat(activity=told.format(package))).activity == shown


def test_an_empty_seat_is_a_row_too():
    """It has no rank and no process."""
    row = rank_status(seat(1, "empty", rank=None, pid=None, engine_id=None))
    assert (row.rank, row.pid, row.state) == (None, None, "empty")


@pytest.mark.parametrize(
    ("view", "after", "text"),
    [
        (world("member"), None, "not healthy after 30 s: the world is running"),
        (
            world("member", "replaying", "given up", phase="restoring", reason="names are copied"),
            None,
            "not healthy after 30 s: the world is restoring, slot 1 is replaying; "
            "slot 2 is given up (names are copied)",
        ),
        (
            world("member"),
            4,
            "not healthy after 30 s: the world is running; generation 4 has not passed 4",
        ),
        (world("member"), 3, "not healthy after 30 s: the world is running"),
        (
            world("starting", phase="starting", reason="the first engines are being started"),
            0,
            "not healthy after 30 s: the world is starting, slot 0 is starting; "
            "generation 0 has not passed 0 (the first engines are being started)",
        ),
    ],
)
def test_a_wait_in_vain_says_what_is_missing(view, after, text):
    """The phase, the seats that are no members, the generation, and the supervisor's reason."""
    assert why_unhealthy(view, 30.0, after) == text


@pytest.mark.parametrize(
    ("began", "now", "text"),
    [
        (world("member", "member"), world("member", "starting"), ""),
        (
            world("member", "member", "member", "starting"),
            world("member", "member", "member", "starting"),
            "began on 3 of 4 ranks (ranks 0-2): slot 3 was starting",
        ),
        (
            world("member", "starting"),
            world("member", "member"),
            "began on 1 of 2 ranks (rank 0): slot 1 joined later",
        ),
    ],
)
def test_a_cell_lacks_what_was_not_in_the_group_that_it_began_in(began, now, text):
    """However the world looks by the time that the cell was admitted."""
    assert lack_of(began.membership, now) == text


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (world("member", "member"), ""),
        (world("member", "member", phase="breaking", reason="rank 1 is gone"), ""),
        (world("member", "starting"), "1 of 2 ranks: slot 1 is starting"),
        (
            world("given up", "member", "empty"),
            "1 of 3 ranks: slot 0 is given up, slot 2 is empty",
        ),
        (world("member", phase="failed", reason="no engine survived"), "no engine survived"),
    ],
)
def test_trouble_is_what_keeps_cells_from_some_seats(view, text):
    """Nothing where all are members; the reason where nothing goes on."""
    assert trouble_of(view) == text


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (0, (0,)),
        (2, (2,)),
        (np.int64(1), (1,)),
        ([2, 0], (0, 2)),
        ((1, 1), (1,)),
        (range(3), (0, 1, 2)),
        ({2, 1}, (1, 2)),
        (np.array([0, 2]), (0, 2)),
        ((rank for rank in (2, 1)), (1, 2)),
    ],
)
def test_a_rank_or_several_are_chosen(ranks, chosen):
    """In order, each once, as Python's own integers."""
    found = chosen_ranks(ranks, 3)
    assert found == chosen
    assert {type(rank) for rank in found} == {int}


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        (3, r"rank 3 is not in the present world \(ranks 0-2\)"),
        (-1, "rank -1 is not in"),
        ([0, 9], "rank 9 is not in"),
        ([], "chooses no rank"),
        ("0", "a rank or several, as integers"),
        (1.0, "a rank or several, as integers"),
        ([0.5], "a rank or several, as integers"),
        (None, "a rank or several, as integers"),
        (True, "chooses no rank"),
    ],
)
def test_what_chooses_no_rank_is_refused(ranks, match):
    """The message has what was given and what there is."""
    with pytest.raises(TargetError, match=match):
        chosen_ranks(ranks, 3)


def test_in_an_empty_world_there_is_no_rank_to_choose():
    """And it is said so."""
    with pytest.raises(TargetError, match=r"\(no rank\)"):
        chosen_ranks(0, 0)


def test_engines_that_share_cores_are_told_however_they_came(monkeypatch):
    """Asked for at the start or added later."""
    monkeypatch.setattr(status, "default_num_engines", lambda: 2)
    assert crowding(2) == []
    assert crowding(3) == ["3 engines share 2 CPU cores or GPUs"]


@pytest.mark.parametrize("timeout", [None, 1, 0.5])
def test_a_cell_is_text_and_its_limit_seconds(timeout):
    """Or no limit."""
    check_cell("f()", timeout)


@pytest.mark.parametrize("timeout", [None, "5", [5], 1j])
def test_where_there_must_be_a_limit_it_is_seconds(timeout):
    """Nothing else can be waited for."""
    check_limit(np.float32(0.5), may_be_none=False)
    with pytest.raises(TypeError, match=r"timeout=.*: seconds$"):
        check_limit(timeout, may_be_none=False)


@pytest.mark.parametrize(
    ("code", "timeout", "match"),
    [
        (None, None, "code=None"),
        (b"f()", None, r"code=b'f\(\)'.*text"),
        ("f()", "5", "timeout='5': seconds, or None for no limit"),
    ],
)
def test_what_is_no_cell_or_no_limit_is_named(code, timeout, match):
    """Before anything is sent."""
    with pytest.raises(TypeError, match=match):
        check_cell(code, timeout)
