"""A trainer's state as a whole: packed, loaded, compared; its rates; what it fetches."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset
from trainers import FakePort, Samples, go, make

from nbdist.engine.port import Drivable, is_trainer
from nbdist.protocol import values
from nbdist.train import Trainer
from nbdist.train.loading import Loader, Part
from nbdist.train.rates import present_rate, set_base_rate

PACK_LIMIT_S = 0.01
"""For 10 MB, each way; a test asserts four times that."""


class Counter:
    """Something of the user's own."""

    def __init__(self):
        self.count, self.history = 0, torch.zeros(3)

    def state_dict(self):
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state):
        self.count, self.history = state["count"], state["history"]


def scheduled(**changes):
    return make(scheduler=lambda o: lr_scheduler.StepLR(o, 3), **changes)


def trained(num=5, **changes):
    trainer = scheduled(**changes)
    trainer.register("counter", Counter())
    trainer._state.registered["counter"].count = 7
    go(trainer, FakePort(num))
    return trainer


def test_a_trainer_is_what_the_engine_drives():
    """It has everything that an engine asks of one."""
    trainer = make()
    assert isinstance(trainer, Drivable)
    assert is_trainer(trainer)


@pytest.mark.parametrize("name", ["drive", "is_replicated", "owned"])
def test_what_lacks_a_part_is_no_trainer(name):
    """It is refused with a sentence where a run begins: an engine that asked for it would end."""
    parts = {key: None for key in vars(Drivable) if not key.startswith("_")}
    assert is_trainer(type("Like", (), parts)())
    del parts[name]
    assert not is_trainer(type("Unlike", (), parts)())


def test_a_state_is_taken_over_whole():
    """Digests are equal then, and so is everything that is trained afterwards."""
    one, other = trained(), scheduled(seed=3)
    other.register("counter", Counter())
    parameters, group = list(other.model.parameters()), other.optimizer.param_groups[0]["params"]
    assert one.digest() != other.digest()
    other.unpack(one.pack())
    assert one.digest() == other.digest()
    assert other.step == 5
    assert other._state.registered["counter"].count == 7
    assert all(a is b for a, b in zip(parameters, other.model.parameters(), strict=True))
    assert all(a is b for a, b in zip(group, parameters, strict=True))
    for trainer in (one, other):
        go(trainer, FakePort(9))
    assert one.digest() == other.digest()
    assert present_rate(one.optimizer) == present_rate(other.optimizer)


def test_what_was_taken_over_is_ones_own():
    """Training on does not write into what was loaded, nor do two who loaded it share it."""
    data = trained().pack()
    copies = [scheduled(), scheduled()]
    for copy in copies:
        copy.register("counter", Counter())
        copy.unpack(data)
    digest = copies[1].digest()
    go(copies[0], FakePort(8))
    copies[0]._state.registered["counter"].history += 1
    assert copies[1].digest() == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.model[1].running_mean.view(-1)[0].add_(1e-6),
        lambda t: t.optimizer.param_groups[0].update(lr=0.5),
        lambda t: t.optimizer.state[t.model[0].weight]["exp_avg"].view(-1)[0].add_(1e-6),
        lambda t: t.scheduler.__dict__.update(last_epoch=1),
        lambda t: t._state.registered["counter"].__dict__.update(count=8),
        lambda t: t._state.__dict__.update(num_skipped=1),
        lambda t: t._state.__dict__.update(step=4),
    ],
    ids=["buffer", "rate", "optimizer", "scheduler", "registered", "skipped", "step"],
)
def test_a_digest_sees_everything(change):
    """Any part that differs makes another digest; that of the parameters stays as it is."""
    trainer = trained()
    digest, parameters = trainer.digest(), trainer.parameter_digest()
    change(trainer)
    assert trainer.digest() != digest
    assert trainer.parameter_digest() == parameters


def test_the_parameters_have_a_digest_of_their_own():
    """It differs where they do."""
    trainer = trained()
    digest = trainer.parameter_digest()
    trainer.model[0].weight.data.view(-1)[0].add_(1e-6)
    assert trainer.parameter_digest() != digest


class Locked(Counter):
    """Has a state that no other process can be given."""

    def state_dict(self):
        return {"lock": threading.Lock()}


class Broken(Counter):
    """Has a state that cannot be asked for."""

    def state_dict(self):
        raise ValueError("not yet")


@pytest.mark.parametrize(
    ("odd", "words"), [(Locked, "cannot pickle"), (Broken, "ValueError: not yet")]
)
def test_a_run_does_not_begin_with_a_state_that_cannot_be_handed_over(odd, words):
    """Before a rank is lost, and not when one joins: the error names what was registered."""
    trainer = make()
    trainer.register("fine", Counter())
    trainer.register("odd", odd())
    with pytest.raises(TypeError, match=f"'odd'.*{words}"):
        asyncio.run(trainer.drive(FakePort(3)))
    assert trainer.step == 0


def test_a_trainer_is_handed_over_whole():
    """Packed by value it comes without group and port, and trains on as the other does."""
    one = trained(num_workers=0)
    other = values.unpack(values.pack(one))
    assert isinstance(other, Trainer)
    assert other.digest() == one.digest()
    for trainer in (one, other):
        go(trainer, FakePort(8))
    assert other.digest() == one.digest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": lambda: nn.Linear(4, 1)}, "other parameters"),
        (
            {
                "model": lambda: nn.Sequential(
                    nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 1)
                )
            },
            r"shape \(8, 4\) in the state and \(9, 4\)",
        ),
        ({"scheduler": None}, "scheduler"),
    ],
)
def test_the_state_of_another_trainer_is_refused(changes, words):
    """The message says what differs, and nothing was loaded."""
    data, other = (
        trained().pack(),
        make(**{"scheduler": lambda o: lr_scheduler.StepLR(o, 3)} | changes),
    )
    other.register("counter", Counter())
    digest = other.digest()
    with pytest.raises(ValueError, match=words):
        other.unpack(data)
    assert other.digest() == digest


def test_states_of_ten_megabytes_are_quick():
    """A newcomer waits for both, and so do all others; counted is what this process computes."""
    side = 930  # three such matrices with Adam's two: 10 MB
    trainer = make(
        model=lambda: nn.Linear(side, side), data=TensorDataset(*[torch.zeros(8, side)] * 2)
    )
    trainer.fit(1)
    times = []
    for _ in range(5):
        began = time.process_time()
        data = trainer.pack()
        packed = time.process_time()
        trainer.unpack(data)
        times.append((packed - began, time.process_time() - packed))
    assert 10e6 < len(data) < 11e6
    for which in zip(*times, strict=True):
        assert min(which) <= 4 * PACK_LIMIT_S


# ---- rates


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def groups(kind=torch.optim.SGD, **more):
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    return kind([{"params": [one]}, {"params": [other], "lr": 0.2}], lr=0.1, **more)


def test_a_rate_is_set_for_all_groups_in_proportion():
    """Without a scheduler it is used from the next step on."""
    optimizer = groups()
    set_base_rate(optimizer, None, 0.05)
    assert rates(optimizer) == pytest.approx([0.05, 0.1])
    assert present_rate(optimizer) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=20),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [4]
        ),
    ],
)
def test_a_scheduler_goes_on_from_the_new_base(make_scheduler):
    """From then on rates are those of a run that has had the new base from its start."""
    optimizer, other = groups(), groups()
    for group in other.param_groups:
        group["lr"] /= 2
    scheduler = make_scheduler(optimizer)
    base = optimizer.param_groups[0]["initial_lr"]
    reference = make_scheduler(other)
    set_base_rate(other, reference, base / 2)
    for step in range(9):
        if step == 3:
            set_base_rate(optimizer, scheduler, base / 2)
        if step >= 3:
            assert rates(optimizer) == pytest.approx(rates(other))
        for each in (optimizer, other):
            each.step()
        scheduler.step()
        reference.step()


def test_a_rate_that_is_a_tensor_is_changed_in_place():
    """A compiled optimizer goes on pointing at it."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    set_base_rate(optimizer, None, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.5)


# ---- loading


def part(*indices, step=0, first=0):
    return Part(step, first, np.array(indices))


def test_tensors_are_cut_as_samples_would_be_collated():
    """A set of tensors is fetched at once, to the same batch as sample by sample."""
    data = TensorDataset(torch.arange(12).reshape(6, 2), torch.arange(6))
    ((_, quick),) = Loader(data).batches(0, lambda _: [part(4, 1, 1)])
    ((_, slow),) = Loader(list(data)).batches(0, lambda _: [part(4, 1, 1)])
    for one, other in zip(quick, slow, strict=True):
        assert torch.equal(one, other)


def test_what_was_prepared_is_given_once_and_for_its_part_only():
    """Another part, or the same a second time, is fetched."""
    tensors = torch.arange(12).reshape(6, 2)
    loader = Loader(TensorDataset(tensors))
    wanted, other = part(1, 2), part(1, 2)
    loader.prepare(wanted)
    prepared = loader._prepared[1]
    ((_, batch),) = loader.batches(0, lambda _: [wanted])
    assert batch is prepared
    ((_, again),) = loader.batches(0, lambda _: [wanted])
    assert again is not prepared
    loader.prepare(wanted)
    ((_, batch),) = loader.batches(0, lambda _: [other])
    assert batch is not loader._prepared
    assert torch.equal(batch[0], tensors[1:3])
    loader.prepare(wanted)
    loader.forget()
    assert loader._prepared is None


def test_samples_of_ones_own_set_are_not_fetched_ahead():
    """They may draw random numbers, or count: they are asked for when they are trained on."""
    data = Samples()
    Loader(data).prepare(part(1, 2))
    assert data.asked == []


def test_a_set_that_gives_many_at_once_is_asked_so():
    """`__getitems__`, as torch's own loader does."""

    class Many:
        def __len__(self):
            return 4

        def __getitem__(self, _):
            raise AssertionError

        def __getitems__(self, indices):
            return [torch.tensor(i) for i in indices]

    ((_, batch),) = Loader(Many()).batches(0, lambda _: [part(3, 1)])
    assert batch.tolist() == [3, 1]
