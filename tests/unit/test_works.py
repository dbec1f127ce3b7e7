"""Collectives in flight, with works that the tests end, or not."""

import threading

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


def test_a_call_that_ends():
    """Who waits goes on, or is given what it raises."""
    works, called = Works(), []
    works.call(lambda: called.append(1))
    assert called == [1]
    with pytest.raises(ZeroDivisionError):
        works.call(lambda: 1 / 0)


def test_a_call_that_never_ends():
    """Who waits is freed by a cut; that the call ends after all disturbs nobody."""
    works, begun, ends = Works(), threading.Event(), threading.Event()

    def give_up():
        begun.wait(5)
        works.give_up()

    def wait():
        begun.set()
        ends.wait(5)

    threading.Thread(target=give_up).start()
    with pytest.raises(RuntimeError, match="cut"):
        works.call(wait)
    ends.set()


def test_a_call_in_a_group_that_is_cut():
    """It is not made: nobody would free it."""
    works, called = Works(), []
    works.give_up()
    with pytest.raises(RuntimeError, match="cut"):
        works.call(lambda: called.append(1))
    assert called == []


class Sent:
    """A send or receive: torch tells of its end nobody but who waits."""

    def __init__(self, error=None):
        self.error, self.may_end = error, threading.Event()

    def wait(self):
        self.may_end.wait(5)
        if self.error is not None:
            raise self.error


def ended(error=None):
    work = Sent(error)
    work.may_end.set()
    return work


def test_sends_and_receives_that_end():
    """Who waits goes on when all have ended, or is given the first error; again and again."""
    works = Works()
    works.wait([ended(), ended()])
    with pytest.raises(RuntimeError, match="reset by peer"):
        works.wait([ended(), ended(RuntimeError("reset by peer"))])
    works.wait([ended()])


def give_up_until(is_free, works):
    """Now and then, since nobody can tell when another thread begins to wait."""
    while not is_free.wait(0.001):
        works.give_up()


def test_sends_and_receives_that_never_end():
    """A cut before or while somebody waits frees who waits; the next wait is as the first."""
    works, stuck = Works(), Sent()
    works.give_up()
    with pytest.raises(RuntimeError, match="cut"):
        works.wait([stuck])
    works.begin()
    is_free = threading.Event()
    cut = threading.Thread(target=lambda: give_up_until(is_free, works))
    cut.start()
    with pytest.raises(RuntimeError, match="cut"):
        works.wait([stuck])
    is_free.set()
    cut.join()
    assert len(works.take_stuck(0.001)) == 2
    works.begin()
    works.wait([ended()])
    stuck.may_end.set()


def test_a_cut_between_a_collectives_begin_and_the_wait_for_it():
    """Who would wait from then on is freed as well; in the next group, waits are waits again."""
    works, stuck, work = Works(), Work(), Work()
    works.give_up()
    with pytest.raises(RuntimeError, match="cut"):
        works.follow(stuck).wait()
    assert works.take_stuck(0.01) == [stuck]
    works.begin()
    promise = works.follow(work)
    work.future.set_result([torch.ones(1)])
    assert promise.wait()[0].tolist() == [1]


def test_what_another_thread_keeps():
    """Who waits is freed when it is there, and by a cut, before or after; a late word is none."""
    works = Works()
    kept, cut = works.expect(), works.expect()
    works.keep(kept)
    assert kept.wait() == []
    works.give_up()
    works.keep(cut)
    for promise in (cut, works.expect()):
        with pytest.raises(RuntimeError, match="cut"):
            promise.wait()
    assert works.take_stuck(0.01) == []


def test_a_thread_that_waits_itself():
    """It is not freed by a cut, but that it does not end is told; after one it does not begin."""
    works, may_end, has_begun = Works(), threading.Event(), threading.Event()

    class Slow:
        def wait(self):
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=works.wait_here, args=([Slow()],))
    thread.start()
    assert has_begun.wait(60)
    works.give_up()
    assert len(works.take_stuck(0.01)) == 1
    may_end.set()
    thread.join(60)
    with pytest.raises(RuntimeError, match="cut"):
        works.wait_here([Slow()])
    works.begin()
    works.wait_here([Slow()])
    works.give_up()
    assert works.take_stuck(0.01) == []
