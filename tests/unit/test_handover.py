"""Which names a newcomer is given, by whom, and what is said of the rest."""

from __future__ import annotations

import pytest

from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol.runs import TRAINER, RunSpec
from nbdist.protocol.topology import Member, Membership
from nbdist.supervisor.handover import Handover
from nbdist.supervisor.instructions import Tell

GENERATION = 4


class Exchange:
    """A hand-over between the slots of a group, by the events that it takes."""

    def __init__(self, slots, newcomers):
        members = tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in slots)
        self.hand = Handover(Membership(generation=GENERATION, members=members), newcomers)

    def digests(self, slot, **digests):
        """One member's names; `module_1` stands for `module:1`, `import_1` for `import:1`."""
        digests = {name: digest.replace("_", ":", 1) for name, digest in digests.items()}
        event = ev.NamesFingerprinted(slot=slot, generation=GENERATION, digests=digests)
        return [(t.slot, t.order) for t in self.hand.take(event)]

    def offered(self, slot, **failed):
        event = ev.NamesOffered(
            slot=slot, generation=GENERATION, sha256="ab", num_bytes=7, failed=failed
        )
        return {t.slot: t.order for t in self.hand.take(event)}

    def received(self, slot, **failed):
        event = ev.NamesReceived(slot=slot, generation=GENERATION, failed=failed)
        assert self.hand.take(event) == []


def decide(newcomer, *survivors):
    """What goes to a newcomer of these digests, and what is left unsettled."""
    exchange = Exchange(tuple(range(len(survivors) + 1)), (len(survivors),))
    told = exchange.digests(len(survivors), **newcomer)
    for slot, held in enumerate(survivors):
        told += exchange.digests(slot, **held)
    names = told[0][1].names if told else ()
    return set(names), exchange.hand.unsettled[len(survivors)]


def test_everybody_is_asked_for_digests():
    """The first step is the same order to every member."""
    order = od.FingerprintNames(generation=GENERATION)
    assert Exchange((0, 1, 3), (1,)).hand.begin() == [Tell(s, order) for s in (0, 1, 3)]


@pytest.mark.parametrize(
    ("newcomer", "survivors", "copied", "unsettled"),
    [
        ({"x": "int_1"}, [{"x": "int_1"}] * 2, set(), set()),
        ({}, [{"x": "int_1"}] * 2, {"x"}, set()),
        ({"x": "int_2"}, [{"x": "int_1"}] * 2, {"x"}, set()),
        ({"x": "int_2"}, [{"x": "int_0"}, {"x": "int_1"}], set(), set()),  # x = rank
        ({}, [{"x": "int_0"}, {"x": "int_1"}], set(), {"x"}),
        ({}, [{"x": "int_0"}, {}], set(), set()),
        ({}, [{}, {"x": "int_0"}], set(), set()),
        ({}, [{"np": "import_1"}, {}], set(), set()),
        ({}, [{"np": "import_1"}] * 2, {"np"}, set()),
        ({"mine": "int_1"}, [{}, {}], set(), set()),
        ({}, [{"f": ""}] * 2, set(), {"f"}),
        ({"f": ""}, [{"f": ""}] * 2, set(), set()),
        ({"f": "int_1"}, [{"f": ""}] * 2, set(), set()),
        ({"x": ""}, [{"x": "int_1"}] * 2, {"x"}, set()),
        ({"x": "int_2"}, [{"x": "int_1"}], set(), {"x"}),  # one survivor: may be x = rank
        ({}, [{"x": "int_1"}], {"x"}, set()),
        ({"m": "module_2"}, [{"m": "module_1"}], {"m"}, set()),
        ({"o": "optimizer_2"}, [{"o": "optimizer_1"}], {"o"}, set()),
        ({"d": "ddp_2"}, [{"d": "ddp_1"}], {"d"}, set()),
        ({"m": "module_1"}, [{"m": "module_1"}], set(), set()),
        ({"m": "module_2"}, [{"m": "module_0"}, {"m": "module_1"}], set(), {"m"}),
        ({"m": "module_1"}, [{"m": "module_0"}, {"m": "module_1"}], set(), {"m"}),
        ({"o": "optimizer_2"}, [{"o": "optimizer_0"}, {"o": "optimizer_1"}], set(), {"o"}),
        ({"d": "ddp_2"}, [{"d": "ddp_0"}, {"d": "ddp_1"}], set(), {"d"}),
        ({}, [{"d": "ddp_0"}, {"d": "ddp_1"}], set(), {"d"}),
        ({}, [{"m": "module_0"}, {}], set(), set()),
        ({"t": "tensor_2"}, [{"t": "tensor_0"}, {"t": "tensor_1"}], set(), set()),
        ({}, [{"np": "import_1"}, {"np": "import_2"}], set(), set()),
    ],
)
def test_what_is_copied_and_what_is_left(newcomer, survivors, copied, unsettled):
    """Equal on all survivors, and missing or different here, is copied; the rest is listed."""
    names, left = decide(newcomer, *survivors)
    assert names == copied
    assert set(left) == unsettled
    assert all(left.values())


@pytest.mark.parametrize("kind", ["module", "optimizer", "ddp"])
def test_replicas_that_differ_are_said_to(kind):
    """What the replay made of one is no replica of anybody's: the user is told why."""
    _, left = decide({"m": f"{kind}_2"}, {"m": f"{kind}_0"}, {"m": f"{kind}_1"})
    assert left == {"m": "differs between the survivors, though it should be a replica"}


def test_the_lowest_survivor_offers_to_those_that_lack_something():
    """Donor is the lowest slot that is no newcomer; receivers are ranks."""
    exchange = Exchange((0, 2, 3, 5), (0, 5))
    exchange.digests(0)
    exchange.digests(3, a="int_1", b="int_1")
    exchange.digests(5, a="int_1", b="int_1")
    told = exchange.digests(2, a="int_1", b="int_1")
    order = od.OfferNames(generation=GENERATION, names=("a", "b"), receivers=(0,))
    assert told == [(2, order)]
    assert not exchange.hand.is_done


def test_each_receiver_is_told_its_own_names():
    """What the donor could not pack is left out and listed for those that lack it."""
    exchange = Exchange((0, 1, 2), (1, 2))
    exchange.digests(1, a="int_1")
    exchange.digests(2, b="int_1")
    exchange.digests(0, a="int_1", b="int_1", c="int_1")
    orders = exchange.offered(0, c="cannot be sent", z="never asked for")
    assert {slot: order.names for slot, order in orders.items()} == {1: ("b",), 2: ("a",)}
    assert {(o.donor, o.sha256, o.num_bytes) for o in orders.values()} == {(0, "ab", 7)}
    assert exchange.hand.unsettled == {1: {"c": "cannot be sent"}, 2: {"c": "cannot be sent"}}
    exchange.received(1)
    assert not exchange.hand.is_done
    exchange.received(2, a="it cannot be loaded")
    assert exchange.hand.is_done
    assert exchange.hand.unsettled[2]["a"] == "it cannot be loaded"


def test_nothing_to_give_is_done_at_once():
    """When nobody lacks anything the last digest ends the hand-over."""
    exchange = Exchange((0, 1), (1,))
    assert exchange.digests(0, a="int_1") == []
    assert not exchange.hand.is_done
    assert exchange.digests(1, a="int_1") == []
    assert exchange.hand.is_done


def test_reports_out_of_turn_change_nothing():
    """A second digest, an early offer, an unexpected receipt: no order and no end."""
    exchange = Exchange((0, 1), (1,))
    assert exchange.offered(0) == {}
    exchange.received(1)
    assert not exchange.hand.is_done
    exchange.digests(0, a="int_1")
    assert exchange.digests(1)
    assert exchange.digests(1, a="int_1") == []
    exchange.received(0)
    assert not exchange.hand.is_done
    exchange.received(1)
    assert exchange.hand.is_done


def test_the_digest_of_a_stranger_does_not_stand_for_a_member():
    """The plan waits for every member, whatever else is reported."""
    exchange = Exchange((0, 1), (1,))
    exchange.digests(0, a="int_1")
    assert exchange.digests(7, a="int_1") == []
    assert not exchange.hand.is_done
    assert exchange.digests(1)


# ---- with a run

RUN = RunSpec(run="r", name="trainer")
LOOP = RunSpec(run="c.0", name="", cell="c")


class RunExchange:
    """A hand-over under a run: `steps` of each slot, None where there is no trainer."""

    def __init__(self, steps, newcomers=(), run=RUN):
        members = tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in steps)
        group = Membership(generation=GENERATION, members=members)
        self.hand = Handover(group, newcomers, run, steps)
        self.told = self.hand.begin()
        for slot in steps if newcomers else ():
            event = ev.NamesFingerprinted(slot=slot, generation=GENERATION, digests={})
            self.told = self.hand.take(event)

    @property
    def offer(self):
        """Who offers which names to which ranks."""
        ((slot, order),) = [(t.slot, t.order) for t in self.told]
        return slot, order.names, order.receivers

    def offered(self, slot, digest="d", **failed):
        event = ev.NamesOffered(
            slot=slot,
            generation=GENERATION,
            sha256="ab",
            num_bytes=7,
            failed=failed,
            trainer_digest=digest,
        )
        return {t.slot: t.order.names for t in self.hand.take(event)}

    def received(self, slot, digest="d", **failed):
        event = ev.NamesReceived(
            slot=slot, generation=GENERATION, failed=failed, trainer_digest=digest
        )
        self.hand.take(event)


@pytest.mark.parametrize(
    ("steps", "donor", "receivers"),
    [
        ({0: 5, 1: 6, 2: 6}, 1, (0,)),
        ({0: 6, 1: 5, 2: 5}, 0, (1, 2)),
        ({0: 5, 2: 5, 3: 6}, 3, (0, 1)),
        ({0: None, 1: 0, 2: 0}, 1, (0,)),
    ],
)
def test_laggards_are_given_the_trainer_by_the_lowest_holder_of_the_newest_step(
    steps, donor, receivers
):
    """At once, without asking for digests: nobody is new."""
    exchange = RunExchange(steps)
    assert exchange.hand.is_needed
    assert exchange.offer[0] == donor
    assert TRAINER in exchange.offer[1]
    assert exchange.offer[2] == receivers
    assert exchange.hand.step == max(s for s in steps.values() if s is not None)


def test_nothing_is_handed_over_where_all_have_the_same_step():
    """No newcomer and no laggard."""
    assert not RunExchange({0: 5, 1: 5}).hand.is_needed


@pytest.mark.parametrize(
    ("step", "run", "names"),
    [
        (0, RUN, (TRAINER,)),
        (None, RUN, (TRAINER, "trainer")),
        (0, LOOP, (TRAINER,)),
    ],
)
def test_a_newcomer_is_given_the_state_and_the_trainer_itself_where_it_has_none(step, run, names):
    """Made by the replay it only lacks the state; a loop's trainer is in the cell."""
    exchange = RunExchange({0: 5, 1: step}, newcomers=(1,), run=run)
    assert exchange.offer == (0, names, (1,))
    assert set(exchange.offered(0)[1]) == set(names)
    exchange.received(1)
    assert exchange.hand.is_done
    assert exchange.hand.unsettled == {1: {}}


def test_a_newcomer_is_no_holder():
    """However far its trainer says it is."""
    assert RunExchange({0: 9, 1: 5}, newcomers=(0,)).offer[0] == 1


@pytest.mark.parametrize("digest", ["other", ""])
def test_a_trainer_that_is_not_the_donors_is_unfit(digest):
    """Its engine is named with the reason, and the hand-over does not end with it."""
    exchange = RunExchange({0: 5, 1: 4})
    exchange.offered(0)
    exchange.received(1, digest)
    assert set(exchange.hand.unfit) == {1}
    assert not exchange.hand.is_done


@pytest.mark.parametrize("is_over", [False, True])
def test_a_donor_that_cannot_give_its_trainer_trains_on(is_over):
    """Whatever its state_dict() raises, it may be the last that has a state; who lacks it goes."""
    exchange = RunExchange({0: 5, 1: 4, 2: 5})
    if is_over:  # it was asked before, and sends nothing
        exchange.hand.drop_run()
    assert exchange.offered(0, "", **{TRAINER: "TypeError: cannot pickle"}) == {}
    assert set(exchange.hand.unfit) == {1}
    assert "rank 0" in exchange.hand.unfit[1]
    assert "cannot pickle" in exchange.hand.unfit[1]
    assert not exchange.hand.is_done


def test_a_run_that_ends_meanwhile_makes_nobody_unfit():
    """Engines have let go of its trainer: names are still given, the trainer is not asked for."""
    exchange = RunExchange({0: 5, 1: 4})
    exchange.offered(0)
    exchange.hand.drop_run()
    exchange.received(1, "")
    assert exchange.hand.is_done
    members = tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in (0, 1))
    hand = Handover(Membership(generation=GENERATION, members=members), (1,), RUN, {0: 5, 1: 0})
    hand.begin()
    hand.drop_run()
    for slot in (0, 1):
        told = hand.take(ev.NamesFingerprinted(slot=slot, generation=GENERATION, digests={}))
        assert told == []
    assert hand.is_done
