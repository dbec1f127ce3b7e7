"""To which step the ranks of a pipeline go back together, and from whose copies."""

import pytest

from nbdist.train.strategies.copies import Copies, Kept, Spread, Stand, are_together, newest


def stand(step, rank, *steps, num_ranks=3, per_rank=1, has_left=True, stride=1):
    """Where a rank stands, with copies of these steps."""

    def at(step):
        return Spread(step, num_ranks, num_ranks * per_rank)

    left = (rank - stride) % num_ranks if has_left else None

    return Stand(at(step), rank, tuple(Kept(at(s), rank, left) for s in steps))


def row(*told, num_ranks=3):
    """Ranks 0, 1, …, each given as its step and the steps of its copies; None: a newcomer."""
    return [
        stand(0, rank, num_ranks=num_ranks)
        if mine is None
        else stand(mine[0], rank, *mine[1:], num_ranks=num_ranks)
        for rank, mine in enumerate(told)
    ]


@pytest.mark.parametrize(
    ("stands", "step"),
    [
        (row((7, 2, 4), (7, 2, 4), (7, 2, 4)), 7),
        (row((7, 2, 4), (7, 2, 4), (8, 2, 4)), 4),
        (row((7, 2, 4), None, (7, 2, 4)), 4),
        (row(None, (7, 2, 4), (7, 2, 4)), 4),
        (row((4, 2, 4), None, (4, 0, 2)), 2),
        (row((4, 2, 4), (4, 0, 2), (4, 2, 4)), 4),
        (row((7, 2, 4), None, None), None),
        (row((7, 2, 4), None, None, (7, 2, 4), num_ranks=4), None),
        (row(None, (7, 2, 4), None, (7, 2, 4), num_ranks=4), 4),
        (row(None, None, num_ranks=2), None),
        (row((3,), (4,), num_ranks=2), None),
    ],
)
def test_the_newest_step_of_which_every_state_is_somewhere(stands, step):
    """A rank's state is with itself or with the next; two neighbours lost are too many."""
    found = newest(stands, len(stands))
    assert (found and found.step) == step


def test_those_that_are_left_have_the_states_of_all():
    """Ranks 0, 1 and 3 of four; without 2 and 3, nobody has what 2 had."""
    four = row((7, 4), (7, 4), (7, 4), (7, 4), num_ranks=4)
    assert newest([four[0], four[1], four[3]], 3) == Spread(4, 4, 4)
    assert newest(four[:2], 2) is None


def test_copies_at_the_opposite_rank_outlive_half_of_all():
    """Whichever half, as long as nobody goes together with who has its copy."""
    four = [stand(7, rank, 4, num_ranks=4, stride=2) for rank in range(4)]
    for staying in ((0, 1), (2, 3), (0, 3), (1, 2)):
        assert newest([four[rank] for rank in staying], 2) == Spread(4, 4, 4)
    assert newest([four[0], four[2]], 2) is None


def test_what_is_kept_on_the_spot_counts_where_all_are_there():
    """Before a change of size each keeps its present state alone: it is newer than the copies."""
    here = [stand(7, rank, 7, num_ranks=2, has_left=False) for rank in (0, 1)]
    newcomers = row(None, None, None, None, num_ranks=4)[2:]
    assert newest([*here, *newcomers], 4) == Spread(7, 2, 2)
    assert newest([here[0], *newcomers], 3) is None


def test_of_two_cuts_at_one_step_the_present_one_is_taken():
    """It costs no transfer of what ranks have already."""
    both = [
        Stand(now, rank, (Kept(now, rank, (rank - 1) % 3), *before.kept))
        for rank, before in enumerate(row((4, 4), (4, 4), (4, 4), num_ranks=4)[:3])
        for now in [Spread(4, 3, 3)]
    ]
    assert newest(both, 3) == Spread(4, 3, 3)


@pytest.mark.parametrize(
    ("stands", "answer"),
    [
        (row((7,), (7,), (7,)), True),
        (row((7,), (6,), (7,)), False),
        (row((7,), (7,), (7,), (7,), num_ranks=4)[:3], False),
        ([stand(7, 0), stand(7, 2), stand(7, 1)], False),
        ([stand(7, 0, num_ranks=2), stand(7, 1, num_ranks=2, per_rank=2)], False),
    ],
)
def test_ranks_are_together_where_nothing_is_to_be_done(stands, answer):
    """The same step, and of the same cut each the part of its number."""
    assert are_together(stands, range(len(stands))) is answer


class State:
    """What a rank holds, in words."""

    def __init__(self, step):
        self.step = step

    def copy(self):
        return f"step {self.step}".encode()

    def take_back(self, data):
        raise NotImplementedError

    def move(self, module, copies):
        raise NotImplementedError


def test_copies_of_two_steps_are_kept():
    """The oldest goes; a step that was gone back to is the newest again."""
    copies = Copies()
    for step in (2, 4, 6):
        copies.keep(Spread(step, 1, 2), 0, State(step))
    (mine,) = copies.gather(Spread(7, 1, 2), 0, 0, 1)
    assert mine == stand(7, 0, 4, 6, num_ranks=1, per_rank=2, has_left=False)
    held = State(7)
    assert list(copies.fetch([mine], Spread(6, 1, 2), 0, held, wanted=[0])) == [b"step 6"]
    assert list(copies.fetch([mine], newest([mine], 1), 0, held, wanted=None)) == [b"step 7"]
    copies.drop_after(4)
    assert newest(copies.gather(Spread(0, 1, 2), 0, 0, 1), 1).step == 4


def test_a_model_on_one_rank_is_kept_there_alone():
    """There is no neighbour that could have a copy, and no group is asked."""

    class Keeper:
        def copy(self):
            return b"state"

    copies, now = Copies(), Spread(4, 1, 1)
    copies.renew(now, 0, Keeper(), [1], 1)
    assert copies.has(now)
    assert not copies.is_empty
