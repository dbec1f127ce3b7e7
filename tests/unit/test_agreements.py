"""Whether replicas are identical: what is looked at when, and what is said of it."""

import numpy as np
import pytest
import torch
from agreeing import BLOCKS, CHANGED_AT, WHAT, WHO, AgreeingRun
from stories import synthetic_story
from torch import nn

from nbdist.protocol.looks import DIGEST_BITS, MAX_BLOCKS, Of, is_due, packed, unpacked
from nbdist.protocol.tables import num_rows
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.supervisor.agreements import NUM_KEPT, NUM_OPEN, AgreementReader, Agreements
from nbdist.supervisor.history import Budget
from nbdist.train.agreement import MAX_BYTES, blocks, digest, stride_of
from nbdist.views.agreements import looks, sentence
from nbdist.views.lanes import lanes

PLENTY = 10_000_000


def told(step, digests, *, generation=1, at=None, is_anchor=False):
    """One slot's digests of one look."""
    records = np.zeros(len(digests), RECORD)
    records["kind"], records["step"], records["generation"] = Kind.DIGEST, step, generation
    records["value"] = digests
    records["ident"] = [packed(Of(block, 1, is_anchor)) for block in range(len(digests))]
    records["t1_ns"] = int(1e9 * (step if at is None else at))
    return records


def looked(agreements, step, *digests, **more):
    """A look, of slots in their order."""
    for slot, its in enumerate(digests):
        agreements.add(slot, told(step, its, **more))


def read(agreements, since=0.0):
    """What a new reader is told, as views see it."""
    return looks({"agreement": AgreementReader(since).read(agreements)})


# ---- what a rank tells


def test_all_ranks_look_at_the_same_boundaries():
    """After the first step of a run or in a group, every hundred, and after the last; once each."""
    due = [step for step in range(7, 251) if is_due(step, 7, None, 250)]
    assert due == [8, 100, 200, 250]
    assert not is_due(100, 7, 100, 250)
    assert not is_due(100, 100, None, 250)
    assert is_due(101, 100, None, 101)


def test_what_a_digest_is_of_is_told_in_one_number():
    """All of it comes back."""
    for of in (Of(0), Of(MAX_BLOCKS - 1), Of(0, 2), Of(3, 1, True), Of(17, 40_000, True)):
        assert unpacked(packed(of)) == of
        assert packed(of) <= np.iinfo(np.int32).max


def test_a_block_is_a_child_or_one_of_a_list():
    """So few that each has a bit; of more, neighbours are one."""
    model = nn.ModuleDict(
        {"first": nn.Linear(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}
    )
    found = blocks(model.named_parameters())
    assert list(found) == ["first", "layers.0", "layers.1"]
    assert [len(tensors) for tensors in found.values()] == [2, 2, 2]
    many = blocks((f"{i}.weight", torch.ones(1)) for i in range(100))
    assert len(many) == MAX_BLOCKS
    assert sum(map(len, many.values())) == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_tells_any_bit(dtype):
    """Equal for equal values, another for another one, and a float64 holds it exactly."""
    tensor = torch.arange(60).to(dtype).reshape(6, 10)
    same, other = tensor.clone(), tensor.clone()
    other[5, 9] += 1
    value = digest([tensor, torch.tensor(1.0)], 1, 0)
    assert (
        value == digest([same, torch.tensor(1.0)], 1, 0) != digest([other, torch.tensor(1.0)], 1, 0)
    )
    assert value == int(value) < 2**DIGEST_BITS
    assert digest([tensor.t()], 1, 0) == digest([tensor.t().contiguous()], 1, 0)


def test_of_a_large_model_another_part_is_looked_at_each_time():
    """One value in so many; in so many turns every one."""
    large = torch.zeros(MAX_BYTES // 4 * 3)
    stride = stride_of([large])
    assert stride == 3
    other = large.clone()
    other[7] = 1
    seen = [digest([large], stride, turn) != digest([other], stride, turn) for turn in range(6)]
    assert seen == [False, True, False, False, True, False]
    assert digest([torch.zeros(1), torch.zeros(0)], 5, 3) == digest([torch.zeros(1)], 5, 3)


# ---- what is found


def test_who_differs_in_what_and_since_when():
    """The first look that found it, and the newest."""
    agreements = Agreements(Budget(PLENTY))
    for step in range(0, 3_000, 100):
        changed = 9.0 if step >= 500 else 2.0
        looked(agreements, step, [1.0, 2.0], [1.0, changed], [1.0, 2.0])
    first, newest = read(agreements)
    assert (first.step, newest.step) == (500, 2_900)
    assert first.differs == newest.differs == {0: (), 1: (1,), 2: ()}
    for step in (2_931, *range(3_000, 5_000, 100)):  # the next run
        looked(agreements, step, [1.0, 2.0], [1.0, 9.0], [1.0, 2.0])
    assert [look.step for look in read(agreements, since=2_930)] == [2_931, 4_900]
    assert [look.step for look in read(agreements)] == [500, 4_900]


def test_of_two_that_differ_the_first_is_the_measure():
    """And one alone is compared with nobody."""
    agreements = Agreements(Budget(PLENTY))
    looked(agreements, 0, [1.0])
    assert read(agreements) == []
    looked(agreements, 100, [1.0], [2.0])
    assert [look.differs for look in read(agreements)] == [{0: (), 1: (0,)}]


def test_slots_tell_one_after_the_other():
    """A reader is told again when another slot has told; nothing where nothing is new."""
    agreements, reader = Agreements(Budget(PLENTY)), AgreementReader(0.0)
    looked(agreements, 0, [1.0, 2.0], [1.0, 2.0])
    assert num_rows(reader.read(agreements)) == 2
    assert num_rows(reader.read(agreements)) == 0
    agreements.add(2, told(0, [1.0, 2.0])[:1])
    assert num_rows(reader.read(agreements)) == 2
    agreements.add(2, told(0, [1.0, 2.0])[1:])
    assert num_rows(reader.read(agreements)) == 3


def test_a_step_that_is_looked_at_twice():
    """By two runs one after the other, in one group: each for itself, in any order of slots."""
    agreements = Agreements(Budget(PLENTY))
    for slot, second in ((0, 1.0), (1, 5.0)):
        agreements.add(slot, told(50, [1.0], at=50))
        agreements.add(slot, told(50, [second], at=60))
    assert [(look.step, look.found) for look in read(agreements, since=55)] == [(50, {1: (0,)})]
    assert [look.found for look in read(agreements)] == [{1: (0,)}]


def test_what_is_kept_is_bounded():
    """However many looks come, and where there is no room the digests are counted."""
    budget = Budget(PLENTY)
    agreements = Agreements(budget)
    for step in range(2_000):
        looked(agreements, step, [1.0], [float(step % 2)])
    assert len(agreements.looks()) <= NUM_OPEN + NUM_KEPT
    assert budget.num_bytes <= NUM_OPEN * 2 * 8 * MAX_BLOCKS
    none = Agreements(Budget(0))
    looked(none, 0, [1.0], [1.0])
    assert (none.looks(), none.num_left_out) == ([], 2)


# ---- what is said


def test_it_is_said_in_words():
    """Who, in what, at which step, since when, how often it is looked at, and at how much."""
    agreements = Agreements(Budget(PLENTY))
    assert sentence([]).startswith("No two replicas are known")
    looked(agreements, 0, [1.0, 2.0], [1.0, 2.0])
    assert sentence(read(agreements)) == (
        "At step 0 all 2 replicas in 2 blocks were identical, bit for bit; looked at every 100 "
        "steps."
    )
    looked(agreements, 100, [1.0, 2.0], [1.0, 3.0])
    assert sentence(read(agreements)) == (
        "At step 100 slot 1 differs in block 1; first seen at step 100; looked at every 100 steps."
    )
    looked(agreements, 200, [1.0, 2.0], [1.0, 2.0])
    assert "; but at step 100 slot 1 differs in block 1; looked" in sentence(read(agreements))


def test_of_ranks_that_train_apart_it_is_said_what_is_compared():
    """Their parameters differ as they should."""
    agreements = Agreements(Budget(PLENTY))
    looked(agreements, 8, [1.0], [1.0], is_anchor=True)
    assert sentence(read(agreements)).startswith(
        "At step 8 what all 2 replicas in 1 block had come to at the last outer step was identical"
    )


def test_a_cell_for_each_block_of_each_slot():
    """One that differs is seen by its height too."""
    story = synthetic_story(AgreeingRun(length_s=15.0))
    shown, drawn = looks(story.tables), lanes(story, "agreement")
    assert next(look.step for look in shown if look.found) == CHANGED_AT
    assert shown[-1].found == {WHO: (WHAT,)}
    assert len(drawn.bars) == 4 * BLOCKS
    (other,) = (bar for bar in drawn.bars if bar.what.endswith("differs"))
    assert (other.lane, int(other.began)) == (WHO, WHAT)
    assert other.bottom - other.top > 2 * (drawn.bars[0].bottom - drawn.bars[0].top)
