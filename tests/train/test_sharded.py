"""A model that is cut by rows over the ranks is the same training as one process does."""

import copy
import gc
import re
import resource
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counted import num_sent
from little import (
    FEATURES,
    Flaky,
    build,
    check_gathered,
    check_lost,
    check_nobody_has,
    check_own_loops,
    check_short_batches,
    check_sixty_steps,
    far,
    gpt,
    outcome,
    text,
    token_loss,
    usual,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.errors import OutOfMemory, WrongState
from nbdist.train import (
    DataParallel,
    Sharded,
    estimate,
    next_token_loss,
)
from nbdist.train.strategies.axes import Portion


def make(strategy=None, **changes):
    return usual(strategy or Sharded(), **changes)


def fitted(strategy=None, steps=5, **changes):
    return outcome(make(strategy, **changes), steps)


def test_two_ranks_are_ddp_bit_by_bit(together):
    """After five steps of AdamW all weights are those of DistributedDataParallel."""
    (expected, _, losses), _ = together(2, lambda _: fitted(DataParallel()))
    for parameters, _, its in together(2, lambda _: fitted()):
        assert its == pytest.approx(losses, rel=1e-6)  # torch adds a mean up by where it lies
        assert set(parameters) == set(expected)
        for name, value in expected.items():
            assert (parameters[name] == value).all(), name


@pytest.mark.parametrize(
    ("num", "changes"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (3, {"global_batch": 47}),
        (4, {"global_batch": 3}),
        (3, {"global_batch": 48, "accumulate": 3}),
        (3, {"global_batch": 7, "accumulate": 3}),
        (2, {"clip_norm": 0.01}),
        (2, {"loss": token_loss}),
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(together, num, changes):
    """Shares equal or not, or empty; in one batch or in three; clipped or not: within 1e-6.

    A sum over the ranks that is taken for their mean, or the other way round, would be n times as
    large (pytorch#162338).
    """
    changes = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1)} | changes
    single = {name: value for name, value in changes.items() if name != "accumulate"}
    ((_, expected, losses),) = together(1, lambda _: fitted(steps=1, **single))
    for _, gradients, its in together(num, lambda _: fitted(steps=1, **changes)):
        assert its == pytest.approx(losses, rel=1e-6)
        assert far(gradients, expected) <= 1e-6


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.ModuleList([nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)])
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs):
        self.calls += self.training
        for block in self.row:
            inputs = block(inputs)
        return inputs * self.frozen


def test_buffers_and_frozen_weights_are_as_with_ddp(together):
    """Running means are each rank's share, averaged; what is frozen stays as it is."""

    def body(strategy):
        trainer = make(strategy, model=Noisy)
        losses = trainer.fit(3)["loss"].tolist()
        return losses, {name: b.numpy().copy() for name, b in trainer.model.named_buffers()}

    (expected, buffers), _ = together(2, lambda _: body(DataParallel()))
    for losses, its in together(2, lambda _: body(Sharded())):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert set(its) == set(buffers)
        for name, value in buffers.items():
            assert its[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_byte_model_learns_as_in_one_process(together, tied):
    """Only the `strategy=` line differs; a weight at both ends stays one weight."""

    def body(strategy):
        return fitted(
            strategy,
            8,
            model=gpt(tied),
            data=text(),
            loss=next_token_loss,
            global_batch=16,
            clip_norm=1.0,
        )

    ((whole, _, expected),) = together(1, lambda _: body(DataParallel()))
    for parameters, _, losses in together(3, lambda _: body(Sharded())):
        assert losses == pytest.approx(expected, rel=1e-3)
        assert set(parameters) == set(whole)


@pytest.mark.slow
def test_sixty_steps_of_the_byte_model(together):
    """The loss is that of one process."""
    check_sixty_steps(together, 3, Sharded())


def test_short_batches_and_evaluations(together):
    """Ranks whose parts of a set differ evaluate together, and every sample counts once."""
    check_short_batches(together, 3, Sharded())


def test_a_rank_holds_its_rows_and_no_more(together):
    """Of parameters, gradients and optimizer state; as many bytes as were estimated."""

    def body(rank):
        trainer = make()
        trainer.fit(2)
        held = dict(trainer.model.named_parameters())
        for name, rows in held.items():
            num, *rest = trainer.model.origins[name].shape
            expected = (len(range(num)[Portion(rank, 3).rows(num)]), *rest)
            assert rows.shape == rows.grad.shape == expected
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        of_torch = sum(p.to_local().nbytes for p in trainer.model.whole.parameters())
        assert of_torch == sum(rows.nbytes for rows in held.values())
        return of_torch, sum(value.nbytes for value in states)

    needs = estimate(build, Sharded(), 3).ranks
    assert together(3, body) == [(need.parameters, need.optimizer) for need in needs]


def test_collectives_carry_what_was_estimated(together):
    """Two gathers and one sum of gradients, each (n−1)/n of the padded bytes, exactly."""

    def body(_):
        trainer = make(accumulate=2)
        trainer.fit(4)
        traffic = trainer.model.fsdp.traffic
        return traffic.gathered_bytes, traffic.scattered_bytes

    needs = estimate(build, Sharded(), 3, accumulate=2).ranks
    for (gathered, scattered), need in zip(together(3, body), needs, strict=True):
        assert gathered == 2 * scattered
        assert gathered + scattered == 4 * need.sent


def test_the_wire_carries_no_more(together):
    """Beside what was estimated, 3 % at most: no sum is made on ranks that do not keep it."""

    def body(_):
        trainer = make(
            Sharded(copy_every=0),
            model=lambda: deep(4),
            data=ones(),
            loss=functional.mse_loss,
        )
        trainer.fit(1)
        return num_sent(lambda: trainer.fit(2))

    needs = estimate(lambda: deep(4), Sharded(), 3).ranks
    for sent, need in zip(together(3, body), needs, strict=True):
        assert sent == pytest.approx(2 * need.sent, rel=0.03)


def test_what_is_used_of_torch_is_there(together):
    """Names of FSDP's that are not public: the group is put in and taken out by them."""

    def body(_):
        trainer = make()
        trainer.fit(1)
        fsdp = trainer.model.fsdp
        fsdp.let_go()
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        assert all(its.mesh_info.shard_process_group is None for its in fsdp._groups())
        return group() is None

    assert together(2, body) == [True, True]


def test_a_module_gives_the_weights_of_rank_0(together):
    """Made beforehand, with other weights on each rank, it trains with those of rank 0."""

    def body(rank, strategy):
        torch.manual_seed(rank)
        return fitted(strategy, 2, model=build())[2]

    expected, _ = together(2, lambda rank: body(rank, DataParallel()))
    for losses in together(2, lambda rank: body(rank, Sharded())):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_own_loops(together):
    """With `step.backward` or with `step.train`, the model called as with any other strategy."""
    check_own_loops(together, 2, Sharded())


def test_reduced_precision(together):
    """Under autocast, as DistributedDataParallel does it."""
    (_, _, expected), _ = together(2, lambda _: fitted(DataParallel(), precision="bf16"))
    for _, _, losses in together(2, lambda _: fitted(precision="bf16")):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_step_that_failed_leaves_nothing_behind(together):
    """Half of a backward pass adds nothing to the one that comes after it."""

    def body(_, fails):
        trainer = make(model=Flaky, strategy=Sharded(lambda its: its.layers))
        first = trainer.fit(2)["loss"].tolist()
        if fails:
            Flaky.fails = True
            with pytest.raises(KeyError, match="mine"):
                trainer.fit(1)
        last = trainer.fit(3)["loss"].tolist()
        return first + last, trainer.digest()

    expected = together(2, lambda rank: body(rank, False))
    assert together(2, lambda rank: body(rank, True)) == expected


def test_what_one_rank_cannot_give(together):
    """A state dict of the whole model is gathered by all ranks, or refused with a sentence."""

    def body(_):
        model = make().model
        with pytest.raises(WrongState, match="whole_parameters"):
            model.state_dict()
        with pytest.raises(TypeError, match="cannot be sent or copied"):
            copy.deepcopy(model)
        with pytest.raises(ValueError, match="scale is a parameter without dimensions"):
            make(model=Scaled)
        return {name: value.numpy() for name, value in model.whole_parameters()}

    check_gathered(together(3, body))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_rows_come_back_from_the_neighbour(together, lost):
    """All go back to the last copy, and the curve is that of an undisturbed run, bit for bit."""

    def trainer():
        return make(
            Sharded(copy_every=2),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            model=Noisy,
        )

    check_lost(together, 3, lost, trainer)


@pytest.mark.parametrize(("copy_every", "why"), [(0, "copy_every is 0"), (2, "lost together")])
def test_rows_that_nobody_has_are_named(together, copy_every, why):
    """Nobody trains on with other weights: the sentence says whose were lost."""

    said = rf"rows of ranks 1, 2 of 3 were lost .*{why}"
    check_nobody_has(together, lambda: make(Sharded(copy_every=copy_every)), said)


LAYERS, SIDE = 24, 1024


class Even(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIDE, SIDE), 1 / SIDE))

    def forward(self, inputs):
        return inputs @ self.weight


def deep(num_layers=LAYERS):
    return nn.Sequential(*(Even() for _ in range(num_layers)))


def limit(more_bytes):
    """This process may have so much more memory than it has now."""
    status = Path("/proc/self/status").read_text()
    now = 1024 * int(re.search(r"VmData:\s*(\d+) kB", status)[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes,) * 2)


def ones():
    return TensorDataset(torch.ones(96, SIDE), torch.zeros(96, SIDE))


@pytest.mark.slow
def test_a_model_that_one_rank_cannot_hold(together):
    """With a third of what the model needs beside what a process needs, four ranks train it."""
    need = sum(estimate(deep).ranks[0][:3])

    def body(_, strategy):
        dist.all_reduce(torch.zeros(1))  # threads and buffers of the group are not the model's
        torch.ones(64, 64, requires_grad=True).sum().backward()
        limit(need // 3)
        try:
            trainer = make(
                strategy,
                model=deep,
                data=ones(),
                loss=functional.mse_loss,
                global_batch=8,
            )
            return trainer.fit(2)["loss"].tolist()
        except OutOfMemory as error:
            return str(error)

    for answer in together(4, lambda rank: body(rank, Sharded(copy_every=0))):
        assert len(answer) == 2, answer
    for answer in together(2, lambda rank: body(rank, DataParallel())):
        assert "strategy=Sharded() some rows of each parameter" in answer
