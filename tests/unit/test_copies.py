"""To which step the ranks of a pipeline go back together."""

import pytest

from nbdist.train.strategies.copies import Stand, common_step

NEW = Stand(0, (), ())


def stand(step, *copies):
    return Stand(step, copies, copies)


@pytest.mark.parametrize(
    ("stands", "step"),
    [
        ([stand(7, 2, 4), stand(7, 2, 4), stand(7, 2, 4)], 4),
        ([stand(7, 2, 4), NEW, stand(7, 2, 4)], 4),
        ([NEW, stand(7, 2, 4), stand(7, 2, 4)], 4),
        ([stand(4, 2, 4), NEW, stand(4, 0, 2)], 2),
        ([stand(4, 2, 4), stand(4, 0, 2), stand(4, 2, 4)], 4),
        ([stand(7, 2, 4), NEW, NEW], None),
        ([stand(7, 2, 4), NEW, NEW, stand(7, 2, 4)], None),
        ([NEW, stand(7, 2, 4), NEW, stand(7, 2, 4)], 4),
        ([NEW, NEW], None),
        ([stand(3), stand(4)], None),
    ],
)
def test_the_newest_step_of_which_every_state_is_somewhere(stands, step):
    """A rank's state is with itself or with the next; two neighbours lost are too many."""
    assert common_step(stands) == step
