"""A trainer goes through several groups: its wrapper is bound anew, newcomers make their own."""

import contextlib
import gc
import multiprocessing
import os
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from trainers import FakePort

from nbdist.engine import group
from nbdist.engine.group import Groups, is_communication_error
from nbdist.protocol.ids import EngineId, Generation, Slot
from nbdist.protocol.orders import FormGroup
from nbdist.protocol.topology import Member, Membership
from nbdist.train import DataParallel, Trainer
from nbdist.train.loop import train, walk

FEATURES, STEPS = 12, 8
FORM_TIMEOUT = timedelta(seconds=30)
"""A newcomer here waits for its generation from the beginning of the test."""
BREAK_LIMIT_S = 4.5
"""To leave a group, a few hundredths of a second where nothing else runs; torch's own stall, where
something still holds the group, takes five."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Here nobody tells a member that another one will not come."""
    monkeypatch.setattr(group, "FORM_TIMEOUT", FORM_TIMEOUT)


def build():
    layers = [nn.Linear(FEATURES, 32), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def make():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(240, FEATURES, generator=generator)
    return Trainer(
        model=build,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        loss=functional.mse_loss,
        data=TensorDataset(inputs, inputs[:, :1].sin()),
        global_batch=60,
        strategy=DataParallel(bucket_mb=0.005),  # several buckets
    )


class GroupPort(FakePort):
    """Stands in the real group that there is."""

    def __init__(self, groups):
        super().__init__(None)
        self.groups = groups

    generation = property(lambda self: self.groups.generation, lambda *_: None)
    rank = property(lambda _: dist.get_rank(), lambda *_: None)
    world_size = property(lambda _: dist.get_world_size(), lambda *_: None)

    def broken(self, step, error):
        if not is_communication_error(error):
            return False
        self.told.append(("broken", step))
        self.go_until = None
        return True


def sockets():
    """How many this process has open."""
    num = 0
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            num += str(place.readlink()).startswith("socket:")
    return num


class Engine:
    """What an engine does for a trainer: forms groups, hands over, goes on, leaves."""

    def __init__(self, slot, address):
        self.slot, self.groups = slot, Groups()
        self.groups.install()
        if slot == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            address.value = self.store.port
        deadline = time.monotonic() + 10
        while not address.value and time.monotonic() < deadline:
            time.sleep(0.01)
        self.port_number, self.trainer = address.value, None
        self.told = []
        """Digest and times, for each group."""

    def form(self, generation, slots):
        """Become a member; a newcomer makes its trainer now, and is given the state."""
        members = tuple(
            Member(slot=Slot(s), engine_id=EngineId(s), pid=os.getpid() + s, host="") for s in slots
        )
        membership = Membership(generation=Generation(generation), members=members)
        order = FormGroup(
            membership=membership, store_host="127.0.0.1", store_port=self.port_number
        )
        self.groups.form(order, slots.index(self.slot), "gloo")
        is_newcomer = self.trainer is None
        if is_newcomer:
            self.trainer, self.port = make(), GroupPort(self.groups)
            self.walker = walk(self.trainer._state, self.port)
            next(self.walker)
        steps = [None] * len(slots)
        dist.all_gather_object(steps, self.trainer.step)
        state = [self.trainer.pack()]
        dist.broadcast_object_list(state, steps.index(max(steps)))
        if self.trainer.step < max(steps):
            self.trainer.unpack(state[0])

    def go(self, until):
        """Train until so many steps are committed, or the group breaks."""
        self.port.go_until = until
        for step in self.walker:
            if step is None:
                break
            train(step)

    def leave(self):
        """Leave the group; what is left of it."""
        formed, began = weakref.ref(dist.group.WORLD), time.monotonic()
        gc.disable()
        self.groups.destroy()
        is_gone, took_s = formed() is None, time.monotonic() - began
        gc.enable()
        self.told.append((self.trainer.digest(), is_gone, took_s, sockets()))

    def outcome(self):
        return {row[0]: row[1] for row in self.port.rows}, self.told


@pytest.fixture
def expected(together):
    """The losses of one process that nothing happens to."""
    return together(1, lambda _: make().fit(5 * STEPS)["loss"])[0]


def run(together, script):
    address = multiprocessing.get_context("fork").Value("i", 0)
    return together(
        max(max(slots) for slots in script) + 1,
        lambda slot: follow(Engine(slot, address), script),
        has_group=False,
    )


def follow(engine, script):
    for place, slots in enumerate(script):
        if engine.slot in slots:
            engine.form(place + 1, list(slots))
            engine.go((place + 1) * STEPS)
            engine.leave()
    return engine.outcome()


def check(outcomes, expected, script):
    """Every step has the loss that it should, replicas are equal, nothing is left of a group."""
    for slot, (losses, told) in enumerate(outcomes):
        mine = [place for place, slots in enumerate(script) if slot in slots]
        assert sorted(losses) == [k for p in mine for k in range(p * STEPS, (p + 1) * STEPS)]
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=1e-5)
        assert all(is_gone for _, is_gone, _, _ in told)
        assert max(took_s for _, _, took_s, _ in told) < BREAK_LIMIT_S
        if slot > 0:  # the first also has the store's, of whoever is connected
            assert len({num for *_, num in told}) == 1
    for place, slots in enumerate(script):
        told = [
            outcomes[slot][1][sum(slot in earlier for earlier in script[:place])] for slot in slots
        ]
        assert len({digest for digest, *_ in told}) == 1


@pytest.mark.parametrize(
    "script",
    [
        [(0, 1), (0, 1, 2), (0, 2)],
        [(0, 1, 2), (0, 1), (0, 1, 2)],
        [(0,), (0, 1), (0,), (0, 1, 2)],
    ],
)
def test_a_trainer_goes_through_groups_of_any_size(together, expected, script):
    """Gradients are right in each, newcomers' bucket layouts in step with the survivors'.

    Old and new layouts mixed end the processes of all members: pytorch#128092 and our own find.
    """
    check(run(together, script), expected, script)


def test_a_group_that_breaks_in_a_step_is_gone_at_once(together, expected):
    """The survivors repeat the step in the next group; the error's frames hold nothing."""

    def body(slot):
        engine = Engine(slot, address)
        engine.form(1, [0, 1, 2])
        engine.go(STEPS)
        if slot == 1:
            return None  # the process ends
        engine.go(2 * STEPS)
        engine.leave()
        engine.form(2, [0, 2])
        engine.go(2 * STEPS)
        return engine.port.told, *engine.outcome()

    address = multiprocessing.get_context("fork").Value("i", 0)
    for outcome in together(3, body, has_group=False)[::2]:
        story, losses, [(_, is_gone, took_s, _)] = outcome
        assert ("broken", STEPS) in story
        assert [losses[k] for k in range(2 * STEPS)] == pytest.approx(
            expected[: 2 * STEPS].tolist(), rel=1e-5
        )
        assert is_gone
        assert took_s < BREAK_LIMIT_S


def test_a_wrapper_is_let_go_when_its_run_is_over(together):
    """The next run makes its own; nothing but the trainer held the old one, or its group."""

    def body(slot):
        engine = Engine(slot, address)
        engine.form(1, [0, 1])
        engine.go(3)
        exchange = engine.trainer._state.exchange
        wrapper = weakref.ref(exchange.owned()[0])
        engine.port.is_over = True
        assert list(engine.walker) == []
        assert exchange.owned() == []
        engine.leave()
        gc.collect()
        return engine.told[0][1:3], wrapper() is None

    address = multiprocessing.get_context("fork").Value("i", 0)
    for (is_gone, took_s), is_let_go in together(2, body, has_group=False):
        assert is_gone
        assert took_s < BREAK_LIMIT_S
        assert is_let_go
