"""Collectives in flight, with works that the tests end, or not."""

import pytest
import torch
from torch.futures import Future

from nbdist.engine.works import Works


class Work:
    """As torch's, as far as it is used."""

    def __init__(self):
        self.future = Future()

    def get_future(self):
        return self.future

    def is_completed(self):
        return self.future.done()


def test_what_a_collective_gives():
    """Who waits is given what the collective gave."""
    works, work = Works(), Work()
    promise = works.follow(work)
    assert not promise.done()
    work.future.set_result([torch.ones(2)])
    assert promise.wait()[0].tolist() == [1, 1]


def test_what_fails():
    """Who waits is given the collective's error."""
    works, work = Works(), Work()
    promise = works.follow(work)
    work.future.set_exception(RuntimeError("gloo/pair.cc: closed"))
    with pytest.raises(RuntimeError, match=r"pair\.cc"):
        promise.wait()


def test_given_up():
    """Who waits is freed by a cut though the collective never ends; that it does not is told."""
    works, ended, stuck = Works(), Work(), Work()
    promises = [works.follow(ended), works.follow(stuck)]
    works.give_up()
    for promise in promises:
        with pytest.raises(RuntimeError, match="cut"):
            promise.wait()
    ended.future.set_result([torch.ones(1)])
    assert works.take_stuck(0.01) == [stuck]
    assert works.take_stuck(0.01) == []


def test_late_result():
    """What ends after it was given up disturbs nobody."""
    works, work = Works(), Work()
    promise = works.follow(work)
    works.give_up()
    work.future.set_result([torch.ones(1)])
    with pytest.raises(RuntimeError, match="cut"):
        promise.wait()
    assert works.take_stuck(0.01) == []
