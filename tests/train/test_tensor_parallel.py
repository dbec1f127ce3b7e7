"""A model whose matrices are cut over the ranks is the same training as one process does."""

import copy
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from little import (
    CLASSES,
    FEATURES,
    WIDTH,
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
    mostly_slow,
    outcome,
    text,
    token_loss,
    usual,
)
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from nbdist.engine import runs
from nbdist.engine.works import WORKS
from nbdist.errors import RecoveryFailed, WrongState
from nbdist.train import (
    GPT,
    DataParallel,
    GPTConfig,
    TensorParallel,
    estimate,
    next_token_loss,
)

PAIRS = {
    "0.0": ColwiseParallel(),
    "1.0": RowwiseParallel(),
    "2.0": ColwiseParallel(),
    "3.0": RowwiseParallel(),
}
"""Two pairs of the little model's layers; the last two are whole."""


def pairs(**more):
    return TensorParallel(PAIRS, **more)


def make(strategy=None, **changes):
    return usual(strategy or pairs(), **changes)


def make_gpt(strategy, tied=False, **changes):
    usual = {"model": gpt(tied), "data": text(), "loss": next_token_loss, "global_batch": 16}
    return make(strategy, **usual | changes)


def fitted(strategy=None, steps=5, making=make, **changes):
    return outcome(making(strategy, **changes), steps)


CHANGES = {
    "two": (2, {}),
    "three": (3, {}),
    "four": (4, {}),
    "uneven": (2, {"global_batch": 47, "accumulate": 3}),
    "one sample": (3, {"global_batch": 1}),
    "clipped": (2, {"clip_norm": 0.01}),
    "clipped on four": (4, {"clip_norm": 0.01}),
    "counted": (2, {"loss": token_loss}),
}


@pytest.mark.parametrize("case", mostly_slow(CHANGES, "three", "uneven", "counted"))
def test_the_gradient_is_that_of_dense_layers(together, case):
    """In one batch or in three, clipped or not, whatever a sample counts: within 1e-6."""
    num, changes = CHANGES[case]
    changes = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1)} | changes
    single = {name: value for name, value in changes.items() if name != "accumulate"}
    ((_, expected, losses),) = together(1, lambda _: fitted(DataParallel(), 1, **single))
    for _, gradients, its in together(num, lambda _: fitted(steps=1, **changes)):
        assert its == pytest.approx(losses, rel=1e-6)
        assert far(gradients, expected) <= 1e-6


@pytest.mark.parametrize("tied", mostly_slow([False, True], True))
def test_the_byte_model_has_a_plan(together, tied):
    """It learns as in one process, clipped; only the `strategy=` line differs."""

    def body(strategy):
        return fitted(strategy, 8, make_gpt, tied=tied, clip_norm=1.0)

    ((whole, gradients, expected),) = together(1, lambda _: body(DataParallel()))
    for parameters, its, losses in together(2, lambda _: body(TensorParallel())):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert set(parameters) == set(whole)
        assert far(its, gradients) <= 1e-3  # after eight steps of AdamW


@pytest.mark.slow
def test_sixty_steps_of_the_byte_model(together):
    """The loss is that of one process."""
    check_sixty_steps(together, 2, TensorParallel())


def test_the_norm_is_that_of_the_whole_model(together):
    """Where some parameters are cut and others whole, each number counts once."""

    def body(strategy):
        trainer = make(strategy)
        trainer.fit(1)
        state = trainer._state
        return float(state.exchange.norm(state.gradients()))

    (expected,) = together(1, lambda _: body(DataParallel()))
    assert together(3, lambda _: body(pairs())) == pytest.approx([expected] * 3, rel=1e-6)


class Long(nn.Module):
    """A norm and two layers over (batch, length, width), then the mean over the length."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(FEATURES, 8 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        stream = self.read(inputs).unflatten(1, (8, WIDTH))
        stream = stream + self.narrow(functional.gelu(self.widen(self.norm(stream))))
        return self.head(stream.mean(1))


SEQUENCE = {
    "norm": PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    ),
    "n[o]rm": SequenceParallel(),
    "widen": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(),
}
"""The norm computes on a part of the length; a pattern of its own, as it is planned twice."""


def test_a_plan_of_ones_own(together):
    """Also one in which a norm sees a part of the length, and its gradients are summed."""

    def body(strategy):
        changes = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "model": Long}
        return fitted(strategy, 3, **changes)

    ((_, expected, losses),) = together(1, lambda _: body(DataParallel()))
    for _, gradients, its in together(2, lambda _: body(TensorParallel(SEQUENCE))):
        assert its == pytest.approx(losses, rel=1e-5)
        assert far(gradients, expected) <= 1e-5


class Slanted(nn.Module):
    """Two layers with something between them that a plan may forget."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.PReLU(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, inputs):
        return self.layers(inputs)


def test_a_plan_that_lacks_something_is_refused(together):
    """Ranks that would train a weight apart are told so in the first step, all of them."""
    strategy = TensorParallel({"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})

    def body(_):
        trainer = make(strategy, model=Slanted)
        with pytest.raises(ValueError, match=r"different gradients of layers\.1\.weight"):
            trainer.fit(1)
        return trainer.step

    assert together(2, body) == [0, 0]


def test_short_batches_and_evaluations(together):
    """Every sample counts once, though all ranks see it."""
    check_short_batches(together, 2, pairs())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)])
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, CLASSES)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs):
        self.calls += self.training
        for block in self.row:
            inputs = block(inputs)
        return self.head(self.drop(inputs))


NOISY = {"row.0": ColwiseParallel(), "row.1": RowwiseParallel()}


def test_buffers_and_what_is_dropped_are_as_in_one_process(together):
    """All ranks draw the same numbers for what each has whole, and see all samples."""

    def body(strategy):
        # Not AdamW: what a norm takes away again has a gradient of rounding alone.
        sgd = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731 - as a cell has it
        trainer = make(strategy, model=Noisy, optimizer=sgd)
        losses = trainer.fit(3)["loss"].tolist()
        return losses, {name: b.numpy().copy() for name, b in trainer.model.named_buffers()}

    ((expected, buffers),) = together(1, lambda _: body(DataParallel()))
    for losses, its in together(2, lambda _: body(TensorParallel(NOISY))):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert set(its) == set(buffers)
        for name, value in buffers.items():
            assert its[name] == pytest.approx(value, rel=1e-4), name


def test_a_rank_holds_what_was_estimated(together):
    """Bytes of parameters, gradients and optimizer state, and those that are summed, exactly."""

    def body(_):
        trainer = make_gpt(TensorParallel())
        trainer.fit(3)
        held = dict(trainer.model.named_parameters())
        of_torch = sum(
            p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes
            for p in trainer.model.whole.parameters()
        )
        assert of_torch == sum(p.nbytes for p in held.values())
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        traffic = trainer.model.division.tensors.traffic
        assert traffic.gathered_bytes == traffic.scattered_bytes == 0
        return (
            of_torch,
            sum(p.grad.nbytes for p in held.values()),
            sum(value.nbytes for value in states),
            traffic.summed_bytes,
        )

    sample = torch.zeros(1, 16, dtype=torch.int64)
    made = estimate(gpt(False), TensorParallel(), 2, global_batch=16, sample=sample)
    for held, need in zip(together(2, body), made.ranks, strict=True):
        assert held[:3] == (need.parameters, need.gradients, need.optimizer)
        assert held[3] == 3 * need.sent  # 2(n−1)/n is 1


def test_what_is_used_of_torch_is_there(together):
    """Nothing holds a group that is left; in the next one the same model computes again."""

    def body(rank):
        trainer = make()
        trainer.fit(1)
        group = weakref.ref(dist.group.WORLD)
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        gc.collect()
        assert group() is None
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2
        )
        return trainer.fit(1)["loss"].tolist()

    first, second = together(2, body)
    assert first == second


def test_a_module_gives_the_weights_of_rank_0(together):
    """Made beforehand, with other weights on each rank, it trains with those of rank 0."""

    def body(rank, strategy):
        torch.manual_seed(rank)
        model = build()
        before = [p.detach().clone() for p in model.parameters()]
        losses = fitted(strategy, 2, model=model)[2]
        is_kept = all(map(torch.equal, before, model.parameters()))
        return losses, rank > 0 or is_kept or isinstance(strategy, DataParallel)

    (expected, _), _ = together(2, lambda rank: body(rank, DataParallel()))
    for losses, is_kept in together(2, lambda rank: body(rank, pairs())):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert is_kept


def test_own_loops(together):
    """With `step.backward` or with `step.train`, the model called as with any other strategy."""
    check_own_loops(together, 2, pairs())


def test_reduced_precision(together):
    """Under autocast: within what bfloat16 can tell apart."""

    def body(strategy):
        return make_gpt(strategy, precision="bf16").fit(3)["loss"].tolist()

    (expected,) = together(1, lambda _: body(DataParallel()))
    for losses in together(2, lambda _: body(TensorParallel())):
        assert losses == pytest.approx(expected, rel=1e-2)


def test_a_step_that_failed_leaves_nothing_behind(together):
    """Half of a backward pass adds nothing to the one that comes after it."""
    strategy = TensorParallel({f"layers.{name}": style for name, style in PAIRS.items()})

    def body(_, fails):
        trainer = make(strategy, model=Flaky)
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
        return {name: value.numpy() for name, value in model.whole_parameters()}

    check_gathered(together(3, body))


def one_weight():
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    second.weight = first.weight
    return nn.Sequential(first, second)


AS_IT_IS = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (build, "auto", 'plan="auto" is for models that have a plan'),
        (build, {"7.0": ColwiseParallel()}, "no part of the model is named '7.0'"),
        (build, {"0.1": ColwiseParallel()}, "plan: ColwiseParallel for '0.1': .*only support"),
        (build, {"5": ColwiseParallel()}, r"5.weight of shape \(5, 24\) cannot be cut .* 2 ranks"),
        (build, {"0.1": AS_IT_IS}, "plan cuts no parameter"),
        (one_weight, {"0": ColwiseParallel()}, "1.weight: one parameter that is used in two"),
        (lambda: GPT(GPTConfig(num_heads=1)), "auto", "num_heads=1, which 2 ranks cannot share"),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit_are_refused(together, model, plan, words):
    """When the trainer is made, with a sentence, and before anything is sent."""

    def body(_):
        with pytest.raises(ValueError, match=words):
            make(TensorParallel(plan), model=model)
        return True

    assert all(together(2, body))


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_panels_come_back_from_the_neighbour(together, lost):
    """All go back to the last copy, and the curve is that of an undisturbed run, bit for bit."""

    def trainer():
        return make(
            TensorParallel(NOISY, copy_every=2),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            model=Noisy,
        )

    check_lost(together, 2, lost, trainer)


@pytest.mark.parametrize(("copy_every", "why"), [(0, "copy_every is 0"), (2, "lost together")])
def test_panels_that_nobody_has_are_named(together, copy_every, why):
    """Nobody trains on with other weights: the sentence says whose were lost."""

    said = rf"panels of ranks 1, 2 of 3 were lost .*{why}"
    check_nobody_has(together, lambda: make(pairs(copy_every=copy_every)), said)


def test_a_newcomer_of_a_world_that_cannot_share_the_model(together, monkeypatch):
    """It has a trainer after its replay all the same, and says with the others what is wrong."""

    def body(_):
        with monkeypatch.context() as patched:
            patched.setattr(runs, "present", lambda: SimpleNamespace(is_replaying=True))
            one = make_gpt(TensorParallel())
        with pytest.raises(RecoveryFailed, match=r"3 ranks .* num_heads=2"):
            one.fit(1)
        return True

    assert together(3, body) == [True] * 3


@pytest.mark.parametrize("is_back", [False, True])
def test_a_cut_frees_who_waits_within_torch(together, tmp_path, is_back):
    """Forward and backward, with the error that says so, though the other rank is alive."""
    mark = tmp_path / "over"

    def body(rank):
        trainer = make()
        inputs = torch.stack([trainer._state.loader.sample()[0][0]] * 4)
        if rank == 0 or is_back:
            output = trainer.model(inputs) if is_back else None
        if rank:
            deadline = time.monotonic() + 30
            while not mark.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return mark.exists()
        threading.Timer(0.2, WORKS.give_up).start()
        try:
            with pytest.raises(dist.DistNetworkError, match="cut in a collective"):
                output.sum().backward() if is_back else trainer.model(inputs)
        finally:
            mark.touch()
        return True

    assert together(2, body) == [True, True]
