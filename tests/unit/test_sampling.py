"""Which samples a step trains on, and who takes which."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.train.sampling import Sampling, permutation, share

sizes = st.integers(1, 200)


@given(num_samples=sizes, global_batch=sizes, seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_every_sample_comes_once_in_an_epoch_with_a_short_tail(
    num_samples, global_batch, seed, epoch
):
    """With tail="short" an epoch's steps are a partition of the data set."""
    sampling = Sampling(num_samples, global_batch, seed=seed, tail="short")
    first = epoch * sampling.steps_per_epoch
    batches = [sampling.batch(first + i) for i in range(sampling.steps_per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(num_samples))
    assert all(len(batch) == global_batch for batch in batches[:-1])
    assert {sampling.epoch(first + i) for i in range(sampling.steps_per_epoch)} == {epoch}


@given(num_samples=sizes, global_batch=sizes, seed=st.integers(0, 2**40))
def test_no_sample_comes_twice_in_an_epoch_with_a_dropped_tail(num_samples, global_batch, seed):
    """With tail="drop" every batch is full, and what is left over is less than a batch."""
    if num_samples < global_batch:
        with pytest.raises(ValueError, match=f"global_batch={num_samples} or less, or tail="):
            Sampling(num_samples, global_batch, seed=seed)
        return
    sampling = Sampling(num_samples, global_batch, seed=seed)
    taken = np.concatenate([sampling.batch(i) for i in range(sampling.steps_per_epoch)])
    assert len(taken) == len(set(taken.tolist())) == num_samples // global_batch * global_batch


@given(num=st.integers(0, 300), num_places=st.integers(1, 20))
def test_shares_are_a_partition_as_equal_as_possible(num, num_places):
    """Shares are contiguous, in order, cover everything once, and differ by one at most."""
    shares = [share(num, place, num_places) for place in range(num_places)]
    assert shares[0].start == 0
    assert shares[-1].stop == num
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    sizes = [s.stop - s.start for s in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    num_samples=sizes,
    global_batch=sizes,
    worlds=st.lists(st.integers(1, 7), min_size=1, max_size=12),
)
def test_no_change_of_the_world_loses_or_repeats_a_sample(num_samples, global_batch, worlds):
    """Whatever the world size of each step, an epoch's samples are consumed exactly once.

    T25, R11 (transformers#40245, horovod#2297, #3143): elastic runs that resume at another number
    of workers lost or repeated samples.
    """
    sampling = Sampling(num_samples, global_batch, seed=3, tail="short")
    consumed = []
    for step in range(sampling.steps_per_epoch):
        batch, world_size = sampling.batch(step), worlds[step % len(worlds)]
        for rank in range(world_size):
            consumed += batch[share(len(batch), rank, world_size)].tolist()
    assert sorted(consumed) == list(range(num_samples))


def test_epochs_differ_and_come_again():
    """Two epochs have different orders; the same seed gives the same ones.

    T26 (pytorch#31771, transformers#4398): the same shuffle every epoch.
    """
    orders = [permutation(50, 7, epoch).tolist() for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders == [permutation(50, 7, epoch).tolist() for epoch in range(4)]
    assert permutation(50, 8, 0).tolist() != orders[0]


def test_a_step_follows_from_seed_and_number_alone():
    """Steps looked up in any order are the same: there is no cursor that a resume could miss.

    R14, R15 (llm-foundry#1277, accelerate#2823): data that resumes too early or in another order.
    """
    forward, backward = Sampling(23, 5, seed=1, tail="short"), Sampling(23, 5, seed=1, tail="short")
    steps = list(range(30))
    ahead = {step: forward.batch(step).tolist() for step in steps}
    assert {step: backward.batch(step).tolist() for step in reversed(steps)} == ahead


def test_a_step_costs_one_permutation_an_epoch(monkeypatch):
    """Within an epoch nothing is permuted again."""
    calls = []
    monkeypatch.setattr(
        "nbdist.train.sampling.permutation",
        lambda num, seed, epoch: calls.append(epoch) or permutation(num, seed, epoch),
    )
    sampling = Sampling(1000, 10, seed=0)
    for step in range(250):
        sampling.batch(step)
    assert calls == [0, 1, 2]


def test_nothing_to_train_on_says_so():
    """An empty data set and an unknown tail are named."""
    with pytest.raises(ValueError, match="data is empty"):
        Sampling(0, 4, seed=0)
    with pytest.raises(ValueError, match="tail is 'pad'; it must be one of"):
        Sampling(10, 4, seed=0, tail="pad")
    with pytest.raises(ValueError, match="data has 3 samples and global_batch is 4"):
        Sampling(3, 4, seed=0)
