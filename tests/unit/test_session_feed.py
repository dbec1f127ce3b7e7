"""Live views in the kernel: what is relayed, and when a snapshot is asked for."""

from __future__ import annotations

import pytest

from nbdist.errors import WrongState
from nbdist.protocol import feed as fd
from nbdist.session.feed import Feeds

VIEWS = ("loss",)


class Road:
    """A link: notes what is said."""

    def __init__(self):
        self.asked, self.posted, self.error = [], [], None
        self.subscriptions = tuple

    def ask(self, order, _timeout):
        self.asked.append(order)
        if self.error:
            raise self.error

    def post(self, order):
        self.posted.append(order)


class Page:
    """Where frames go."""

    def __init__(self):
        self.road = Road()
        self.feeds = Feeds(self.road)
        self.seen, self.ends = [], []
        self.feed = self.feeds.open(self.take, views=VIEWS, ended=self.ends.append)

    def take(self, feed, frame):
        assert feed.order.name == frame.name
        self.seen.append(frame.seq)

    def hear(self, seq, *, is_snapshot=False, name=None):
        name = self.feed.order.name if name is None else name
        self.feeds.hear(fd.Frame(name=name, seq=seq, is_snapshot=is_snapshot, data=b""))


@pytest.fixture
def page():
    return Page()


def test_frames_are_relayed_from_the_first_snapshot_on(page):
    """What came before it, or for another name, is not for this page."""
    page.hear(7)
    page.hear(8, is_snapshot=True)
    page.hear(9)
    page.hear(1, is_snapshot=True, name="another")
    assert page.seen == [8, 9]
    assert page.road.posted == []


def test_a_gap_asks_for_a_snapshot_once(page):
    """Nothing is relayed until it has come: a page never draws over a hole."""
    page.hear(1, is_snapshot=True)
    for seq in (3, 4, 5):
        page.hear(seq)
    assert page.road.posted == [page.feed.order]
    page.hear(6, is_snapshot=True)
    page.hear(7)
    assert page.seen == [1, 6, 7]
    assert page.feed.num_gaps == 1


def test_acknowledgements_are_passed_on(page):
    """Under the name of the subscription."""
    page.feed.acknowledge(4)
    assert page.road.posted == [fd.Acknowledge(name=page.feed.order.name, seq=4)]


def test_a_page_that_fails_is_closed_and_harms_nothing(page, caplog):
    """The link's thread goes on; the reason is told, and logged."""

    def fail(_feed, _frame):
        raise RuntimeError("no such comm")

    page.feed._relay = fail
    page.hear(1, is_snapshot=True)
    page.hear(2)
    assert page.ends == ["its frames could not be passed on"]
    assert page.road.posted == [fd.Unsubscribe(name=page.feed.order.name)]
    assert "no such comm" in caplog.text
    assert page.feeds.subscriptions() == ()


def test_closing_is_said_once(page):
    """To the supervisor and to the page; frames that are still on their way are dropped."""
    page.feeds.close(page.feed)
    page.feeds.close(page.feed)
    page.hear(1, is_snapshot=True)
    assert page.road.posted == [fd.Unsubscribe(name=page.feed.order.name)]
    assert (page.ends, page.seen) == (["it was closed"], [])


def test_the_supervisor_may_end_it(page):
    """The reason is the supervisor's."""
    page.feeds.hear(fd.SubscriptionEnded(name=page.feed.order.name, reason="the run is over"))
    assert page.ends == ["the run is over"]
    assert page.feeds.subscriptions() == ()


def test_a_refused_subscription_leaves_nothing(page):
    """Its name is not subscribed again to a supervisor that takes over."""
    page.road.error = WrongState("16 live views are open")
    with pytest.raises(WrongState):
        page.feeds.open(page.take, views=VIEWS)
    assert page.road.subscriptions() == (page.feed.order,)


def test_all_end_with_the_cluster(page):
    """Each is told why; afterwards nothing is said."""
    page.feeds.close_all("the cluster was shut down")
    assert page.ends == ["the cluster was shut down"]
    assert page.road.posted == []


def test_each_has_a_name_of_its_own(page):
    """Also after others were closed."""
    page.feeds.close(page.feed)
    other = page.feeds.open(page.take, views=VIEWS)
    assert other.order.name != page.feed.order.name
