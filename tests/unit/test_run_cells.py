"""Cells that are inside their own training loop: engines end and come, and the cell goes on."""

from __future__ import annotations

import base64
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nbdist.errors import CellFailed, EngineDied
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.protocol.topology import Member, Membership
from nbdist.session.cell_run import GRACE_AFTER_DEATH_S, CellRun
from nbdist.session.cells import Cells

SOON_S = 3.0


def group(generation, *slots, **pids):
    """A membership; engines have pid 100 + slot, or as `s2=905` says."""
    return Membership(
        generation=generation,
        members=tuple(
            Member(
                slot=slot, engine_id=10 + slot, pid=pids.get(f"s{slot}", 100 + slot), host="here"
            )
            for slot in slots
        ),
    )


GROUP = group(3, 0, 1, 2)


def trains(is_training=True, cell="c1"):
    return rn.CellTrains(cell=cell, is_training=is_training)


def send_to(slot, pid, cell="c1"):
    return rn.SendCellTo(cell=cell, slot=slot, engine_id=pid, pid=pid)


def lost(slot, pid=None):
    about = {"rank": None, "signal": "SIGKILL", "exit_code": None, "guess": "", "last_lines": ()}
    return od.EngineLost(slot=slot, pid=pid or 100 + slot, **about)


def printed(text):
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text}}


def answer(value=None):
    ours = {} if value is None else {"value": base64.b64encode(values.pack(value)).decode()}
    return SimpleNamespace(_content={METADATA: ours})


class Remote(Exception):  # noqa: N818 - called as ipyparallel calls it
    """What ipyparallel makes of a reply that says what an engine raised."""

    def __init__(self, ename, evalue="", engine_info=None):
        super().__init__(evalue)
        self.ename, self.evalue, self.traceback = ename, evalue, []
        released = {METADATA: {"released": ename == "RunEnded"}}
        self.engine_info = released if engine_info is None else engine_info


def vanished():
    """What ipyparallel makes up when it finds an engine gone."""
    return Remote("EngineError", engine_info={})


def reply(run, rank, result=None, *, pid=None):
    future = Future()
    future.set_result(answer(rank) if result is None else result)
    run.on_reply(rank, future, pid=pid)
    run.on_idle(rank, None, pid=pid)


def is_over(run, later=0.0):
    return run.is_over(time.monotonic() + later)


def states(run):
    return {rank: output.state for rank, output in run.outputs.items()}


@pytest.fixture
def run():
    """A cell on slots 0, 1 and 2, which trains."""
    made = CellRun("c1", od.CellAdmitted(membership=GROUP, ranks=(0, 1, 2)))
    made.on_trains(trains())
    return made


def replace_engine(run, slot=1, pid=901, generation=5):
    """A seat is lost and filled again, as the supervisor tells it."""
    run.on_lost(lost(slot))
    others = [s for s in GROUP.slots if s != slot]
    run.on_world(group(generation - 1, *others))
    run.on_send_to(send_to(slot, pid))
    assert run.take_newcomers() == (slot,)
    run.on_world(group(generation, *GROUP.slots, **{f"s{slot}": pid}))


# ---- an engine is replaced


def test_a_rank_that_dies_does_not_end_a_cell_that_trains(run):
    """Not at once, and not after a while."""
    run.on_lost(lost(1))
    assert states(run) == {0: "running", 1: "lost", 2: "running"}
    assert not is_over(run, later=3600)
    assert (run.errors, run.died_at) == ({}, None)


def test_the_cell_goes_on_with_the_engine_that_takes_the_seat(run):
    """Under the same rank, with a line that says so; its outcome is that of the last engine."""
    run.on_iopub(1, printed("step 1\nst"), pid=101)
    replace_engine(run)
    run.on_iopub(1, printed("step 2\n"), pid=901)
    for rank, pid in ((0, 100), (1, 901), (2, 102)):
        assert not is_over(run, later=3600)
        reply(run, rank, pid=pid)
    assert is_over(run)
    run.on_trains(trains(is_training=False))
    result = run.result()
    assert result.values == {0: 0, 1: 1, 2: 2}
    assert result.outputs[1] == (
        "step 1\nst\n[the engine on slot 1 was replaced: the cell goes on with the new]\nstep 2\n"
    )
    assert (result.generation, result.notes) == (5, ())


def test_what_still_comes_from_an_engine_that_was_replaced_is_not_the_new_ones(run):
    """Neither its output nor what ipyparallel makes up for it."""
    replace_engine(run)
    text = run.outputs[1].text
    run.on_iopub(1, printed("late"), pid=101)
    reply(run, 1, vanished(), pid=101)
    assert run.outputs[1].text == text
    reply(run, 0)
    reply(run, 2)
    assert not is_over(run, later=3600)
    reply(run, 1, pid=901)
    assert is_over(run)


def test_a_seat_may_be_lost_again_and_again(run):
    """Each newcomer is sent the cell; one that dies before that is passed over."""
    replace_engine(run)
    run.on_lost(lost(1, 901))
    run.on_send_to(send_to(1, 902))
    run.on_lost(lost(1, 902))
    assert not run.has_newcomers
    run.on_send_to(send_to(1, 903))
    run.on_send_to(send_to(1, 903))
    assert run.take_newcomers() == (1,)
    run.on_send_to(send_to(1, 903))  # a supervisor that took over says it again
    assert run.take_newcomers() == ()
    assert run.outputs[1].text.count("was replaced") == 2


def test_a_newcomer_that_ends_before_it_is_in_the_world_is_lost(run):
    """The supervisor tells nothing of it; ipyparallel does, or does not even know it."""
    run.on_lost(lost(1))
    run.on_world(group(4, 0, 2))
    run.on_send_to(send_to(1, 901))
    run.take_newcomers()
    reply(run, 1, vanished(), pid=901)
    assert states(run)[1] == "lost"
    run.on_send_to(send_to(1, 902))
    run.take_newcomers()
    assert states(run)[1] == "running"
    run.on_unreachable(1)
    assert states(run)[1] == "lost"
    assert run.errors == {}


def test_a_newcomer_is_not_taken_for_one_that_left(run):
    """It may be sent the cell before the group without its predecessor is heard of."""
    run.on_lost(lost(1))
    run.on_send_to(send_to(1, 901))
    run.take_newcomers()
    run.on_world(group(4, 0, 2))
    assert states(run)[1] == "running"
    run.on_world(group(5, 0, 1, 2, s1=901))
    for rank in (0, 1, 2):
        reply(run, rank)
    assert run.result().values == {0: 0, 1: 1, 2: 2}


# ---- the world grows and shrinks


def test_a_slot_that_is_not_filled_again_has_no_outcome_but_a_note(run):
    """Ranks are those of the final world."""
    run.on_iopub(1, printed("last words\n"))
    run.on_lost(lost(1))
    run.on_world(group(4, 0, 2))
    reply(run, 0)
    reply(run, 2)
    assert is_over(run)
    result = run.result()
    assert result.values == {0: 0, 1: 2}
    note = "rank 1 (slot 1) has no outcome: it was lost on the way"
    assert result.notes == (note,)
    shown = run.progress(done=True)
    assert (shown.ranks[1].text, shown.ranks[1].state) == ("last words\n", "lost")
    assert shown.notes == (note,)
    assert run.progress(done=False).notes == ()


def test_an_engine_that_is_scaled_away_is_not_waited_for(run):
    """No notice of a loss comes for it: the world without it is one."""
    run.on_world(group(4, 0, 1))
    assert states(run) == {0: "running", 1: "running", 2: "lost"}
    reply(run, 2, vanished())
    reply(run, 0)
    reply(run, 1)
    assert run.result().values == {0: 0, 1: 1}


def test_a_slot_that_is_added_gets_a_row(run):
    """With a line that says when it came."""
    run.on_send_to(send_to(3, 903))
    assert run.take_newcomers() == (3,)
    run.on_world(group(4, 0, 1, 2, 3, s3=903))
    for rank in range(4):
        reply(run, rank)
    result = run.result()
    assert result.values == {0: 0, 1: 1, 2: 2, 3: 3}
    assert "slot 3 has joined" in result.outputs[3]


def test_a_row_never_takes_the_number_of_another():
    """Where ranks and slots differ, a newcomer gets the next number; outcomes go by final rank."""
    gap = group(3, 0, 2)
    run = CellRun("c1", od.CellAdmitted(membership=gap, ranks=(0, 1)))
    run.on_trains(trains())
    run.on_send_to(send_to(1, 901))
    assert run.take_newcomers() == (2,)
    run.on_world(group(4, 0, 1, 2, s1=901))
    for rank in (0, 1, 2):
        reply(run, rank)
    assert run.result().values == {0: 0, 1: 2, 2: 1}


def test_nobody_waits_for_one_that_comes_too_late(run):
    """When all others are done, neither a lost one nor one that was not admitted yet counts."""
    run.on_lost(lost(1))
    run.on_world(group(4, 0, 2))
    run.on_send_to(send_to(1, 901))
    run.take_newcomers()
    reply(run, 0)
    assert not is_over(run, later=3600)
    reply(run, 2)
    assert is_over(run)
    assert run.result().values == {0: 0, 1: 2}


def test_a_cell_whose_engines_are_all_gone_waits_for_the_supervisors_word(run):
    """It may fill the seats again, or say that the world is gone."""
    for slot in (0, 1, 2):
        run.on_lost(lost(slot))
    assert not is_over(run, later=3600)
    run.on_world_gone("no engine survived")
    assert is_over(run)
    with pytest.raises(CellFailed, match="no engine survived"):
        run.result()


def test_a_cell_that_nobody_ended_failed(run):
    """There is nothing that it could return."""
    for slot in (0, 1, 2):
        run.on_lost(lost(slot))
    run.on_trains(trains(is_training=False))
    assert is_over(run)
    with pytest.raises(CellFailed, match="every engine that ran the cell is gone"):
        run.result()


# ---- after the training, and errors


def test_after_its_training_a_death_ends_the_cell(run):
    """As that of any other cell."""
    replace_engine(run)
    run.on_trains(trains(is_training=False))
    run.on_lost(lost(1, 901))
    assert is_over(run, later=GRACE_AFTER_DEATH_S + 0.1)
    with pytest.raises(EngineDied) as caught:
        run.result()
    assert (caught.value.slot, caught.value.rank, caught.value.pid) == (1, 1, 901)


def test_worlds_before_and_after_the_training_change_nothing():
    """The membership of a cell is fixed, but while it trains."""
    run = CellRun("c1", od.CellAdmitted(membership=GROUP, ranks=(0, 1, 2)))
    run.on_world(group(4, 0, 1))
    assert (run.world, states(run)[2]) == (GROUP, "running")
    run.on_trains(trains())
    run.on_world(group(3, 0, 1))  # the same generation is no news
    assert run.world == GROUP


def test_a_rank_whose_run_ended_on_another_did_not_fail(run):
    """The cause leads, even where the consequence came first."""
    reply(run, 0, Remote("RunEnded", "ValueError: no"))
    reply(run, 2, Remote("RunEnded", "ValueError: no"))
    reply(run, 1, Remote("ValueError", "no"))
    assert states(run) == {0: "released", 1: "error", 2: "released"}
    with pytest.raises(CellFailed, match=r"^ValueError: no \(rank 1\)$") as caught:
        run.result()
    assert list(caught.value.errors) == [1]
    assert caught.value.notes[0] == "rank 0 was released from its training loop"


def test_a_run_that_ended_everywhere_says_why(run):
    """No rank is the cause: the reason that all were given leads."""
    for rank in (0, 1, 2):
        reply(run, rank, Remote("RunEnded", "RecoveryFailed: 2 of 3 ranks"))
    with pytest.raises(CellFailed, match=r"^RecoveryFailed: 2 of 3 ranks$"):
        run.result()


def test_an_error_of_an_engine_that_was_replaced_is_forgotten(run):
    """Its successor's outcome counts."""
    reply(run, 1, Remote("ValueError", "no"))
    run.on_lost(lost(1))
    run.on_send_to(send_to(1, 901))
    run.take_newcomers()
    run.on_world(group(4, 0, 1, 2, s1=901))
    for rank in (0, 1, 2):
        reply(run, rank)
    assert run.result().values == {0: 0, 1: 1, 2: 2}


def test_a_break_of_the_new_group_is_this_cells(run):
    """Who waited in what, in the group in which it trains now."""
    replace_engine(run)
    run.on_released(od.RanksReleased(generation=3, waiting={0: "old"}, reason="old"))
    assert run.break_reason == ""
    run.on_released(od.RanksReleased(generation=5, waiting={0: "barrier"}, reason="new"))
    assert run.break_reason == "new"


# ---- between steps


def test_a_cell_says_between_which_steps_it_ran():
    """As a note beside its output."""
    admitted = od.CellAdmitted(membership=GROUP, ranks=(0,), between=(41, 42))
    run = CellRun("c1", admitted)
    reply(run, 0)
    assert run.progress(done=True).notes == ("ran between steps 41 and 42",)
    assert run.result().notes == ("ran between steps 41 and 42",)


# ---- from the order to the end


class Link:
    """The supervisor, as far as cells need it."""

    def __init__(self):
        self.heard = []

    def ask(self, order, _timeout):
        self.heard.append(order)
        return od.CellAdmitted(membership=GROUP, ranks=(0, 1, 2))

    def say(self, order):
        self.heard.append(order)


class Client:
    """The engines: each keeps its future until a test ends it."""

    def __init__(self):
        self.futures, self.changed = {}, threading.Condition()
        self.codes = []

    def wait_known(self, _engine_id, _is_gone):
        return True

    def execute(self, engine_id, code, metadata, hook):
        future = Future()
        future.iopub_callbacks, future.output = [], Future()
        hook(future)
        with self.changed:
            self.codes.append((engine_id, code, metadata[METADATA]["cell"]))
            self.futures[engine_id] = future
            self.changed.notify_all()
        return future

    def end(self, engine_id, value):
        with self.changed:
            assert self.changed.wait_for(lambda: engine_id in self.futures, SOON_S)
        future = self.futures[engine_id]
        for callback in future.iopub_callbacks:
            callback(printed(f"engine {engine_id}\n"))
        future.output.set_result(None)
        future.set_result(answer(value))


@pytest.fixture
def begun():
    """A cell that runs in a thread of its own: cells, client, name, and the future result."""
    link, client = Link(), Client()
    cells, result = Cells(link, client), Future()

    def work():
        try:
            result.set_result(cells.run("for step in trainer.steps(9): ..."))
        except BaseException as error:  # noqa: BLE001 - the future raises it
            result.set_exception(error)

    thread = threading.Thread(target=work, name="test-cell")
    thread.start()
    with client.changed:
        assert client.changed.wait_for(lambda: len(client.futures) == 3, SOON_S)
    (cell,) = cells.open_cells()
    yield SimpleNamespace(link=link, client=client, cells=cells, cell=cell, result=result)
    thread.join(SOON_S)
    assert not thread.is_alive()


def view_of(membership):
    return od.WorldView(
        phase="running", membership=membership, seats=(), size=3, num_formed=3, healthy=True,
        reason="", incidents=(),
    )  # fmt: skip


def test_a_cell_that_trains_is_sent_to_the_newcomer(begun):
    """By the thread that runs it, with the same code under the same name."""
    cells, client = begun.cells, begun.client
    cells.on_notice(trains(cell="another"))
    cells.on_notice(trains(cell=begun.cell))
    cells.on_notice(lost(1))
    cells.on_notice(view_of(group(4, 0, 2)))
    cells.on_notice(send_to(1, 901, cell="another"))
    cells.on_notice(send_to(1, 901, cell=begun.cell))
    with client.changed:
        assert client.changed.wait_for(lambda: 901 in client.futures, SOON_S)
    cells.on_notice(view_of(group(5, 0, 1, 2, s1=901)))
    for engine_id, value in ((10, "a"), (901, "b"), (12, "c")):
        client.end(engine_id, value)
    result = begun.result.result(SOON_S)
    assert result.values == {0: "a", 1: "b", 2: "c"}
    assert result.outputs[1].endswith("engine 901\n")
    code = "for step in trainer.steps(9): ..."
    assert client.codes == [(e, code, begun.cell) for e in (10, 11, 12, 901)]
    assert begun.link.heard[-1].succeeded


def test_a_cell_that_was_interrupted_is_sent_to_nobody(begun, monkeypatch):
    """Who comes then comes too late, and the thread does not spin meanwhile."""
    looks = []
    wait = CellRun.wait_for_change

    def press(_):
        monkeypatch.setattr(CellRun, "wait_for_change", lambda r: looks.append(wait(r)))
        raise KeyboardInterrupt

    begun.cells.on_notice(trains(cell=begun.cell))
    begun.cells.on_notice(lost(1))
    monkeypatch.setattr(CellRun, "wait_for_change", press)
    deadline = time.monotonic() + SOON_S
    while not any(isinstance(o, od.InterruptCell) for o in begun.link.heard):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    begun.cells.on_notice(send_to(1, 901, cell=begun.cell))
    time.sleep(0.06)
    assert len(looks) < 10
    begun.client.end(10, "a")
    begun.client.end(12, "c")
    with pytest.raises(KeyboardInterrupt):
        begun.result.result(SOON_S)
    assert 901 not in begun.client.futures
