"""Ranks along two axes are the same training as one process does."""

import itertools

import pytest
import torch
import torch.distributed as dist
from little import (
    CLASSES,
    FEATURES,
    WIDTH,
    check_short_batches,
    check_sixty_steps,
    far,
    gpt,
    mostly_slow,
    text,
    token_loss,
    usual,
)
from little import build as build_layers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from nbdist.train import (
    DataParallel,
    Evaluate,
    Mesh,
    Pipeline,
    Sharded,
    TensorParallel,
    estimate,
    next_token_loss,
)

PAIRS = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
PIPED = Mesh(pipeline=Pipeline(2, "1f1b", 4), data=2)
CUT = Mesh(tensor=TensorParallel(PAIRS), data=2)
BOTH = Mesh(pipeline=Pipeline(2, "1f1b", 4), tensor=TensorParallel(PAIRS))
ROWS = Mesh(pipeline=Pipeline(2, "1f1b", 4), data=Sharded())
MESHES = {"pipelines": PIPED, "tensors": CUT, "pipelines of panels": BOTH, "of rows": ROWS}
OF_GPT = [
    Mesh(pipeline=2, data=2),
    Mesh(tensor=2, data=2),
    Mesh(pipeline=2, tensor=2),
    Mesh(pipeline=2, data=Sharded()),
]


def gradients_of(strategy, **changes):
    """Of the first step, as far as this rank has them, and the loss."""
    changes = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1)} | changes
    trainer = usual(strategy, **changes)
    (loss,) = trainer.fit(1)["loss"].tolist()
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    if isinstance(strategy, Mesh) and (strategy.tensor is not None or strategy.within):
        gradients = {n: trainer.model.gather(n, grad) for n, grad in gradients.items()}
    return {name: grad.numpy() for name, grad in gradients.items()}, loss


CHANGES = {
    "even": {},
    "uneven": {"global_batch": 47, "accumulate": 3},
    "few": {"global_batch": 9},
    "counted": {"loss": token_loss},
    "clipped": {"clip_norm": 0.01},
}


QUICK = [*itertools.product(("pipelines", "tensors"), ("uneven", "counted"))]
QUICK += [("pipelines of panels", "uneven"), ("of rows", "uneven")]


@pytest.mark.parametrize(
    ("kind", "case"), mostly_slow([*itertools.product(MESHES, CHANGES)], *QUICK)
)
def test_the_gradient_is_that_of_one_process(together, kind, case):
    """Whatever the shares of the models are, and however often they go through them."""
    strategy = MESHES[kind]
    changes = CHANGES[case]
    single = {name: value for name, value in changes.items() if name != "accumulate"}
    ((expected, loss),) = together(1, lambda _: gradients_of(DataParallel(), **single))
    answers = together(4, lambda _: gradients_of(strategy, **changes))
    for gradients, its in answers:
        assert its == pytest.approx(loss, rel=1e-6)
        assert far(gradients, {name: expected[name] for name in gradients}) <= 2e-6
    assert set().union(*(gradients for gradients, _ in answers)) == set(expected)


@pytest.mark.parametrize("tied", mostly_slow([False, True], True))
def test_the_byte_model_learns_alike(together, tied):
    """By its own plan or cut into stages, whose first and last may share a weight; clipped, and
    evaluated: only the `strategy=` line differs."""

    def body(strategy):
        trainer = usual(
            strategy,
            model=gpt(tied),
            data=text(),
            loss=next_token_loss,
            global_batch=16,
            clip_norm=1.0,
            evaluate=Evaluate(text(), every=3, batch=5),
        )
        losses = trainer.fit(6)["loss"].tolist()
        return losses + [e.metrics["loss"] for e in trainer.evaluations]

    (expected,) = together(1, lambda _: body(DataParallel()))
    assert len(expected) == 8
    for strategy in OF_GPT:
        for losses in together(4, lambda _, its=strategy: body(its)):
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", MESHES.values(), ids=MESHES)
def test_short_batches_and_evaluations(together, strategy):
    """Each model takes a part of the batch, and of the set that is evaluated."""
    check_short_batches(together, 4, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OF_GPT, ids=repr)
def test_sixty_steps_of_the_byte_model(together, strategy):
    """The loss is that of one process."""
    check_sixty_steps(together, 4, strategy)


class Sometimes(nn.Module):
    """A layer that only some samples need, dropout, and a norm that keeps statistics."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        x = self.other(x) if x[0, 0] > 0 else self.one(x)
        return self.drop(self.norm(x))


SOMETIMES = Pipeline(2, "1f1b", 2, split=[2, 1])


def build_sometimes():
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), Sometimes(), nn.Linear(WIDTH, CLASSES))


def test_twins_stay_equal(together):
    """Whatever their samples need of the model, in parameters, statistics and what the optimizer
    keeps; and they draw different random numbers."""

    def body(_):
        trainer = usual(Mesh(pipeline=SOMETIMES, data=2), model=build_sometimes)
        trainer.fit(4)
        unused = dict(trainer.model.named_parameters()).get("1.unused")
        assert unused is None or (unused.tolist(), unused.grad) == ([1.0] * 3, None)
        return trainer.digest(), trainer._state.exchange._passage.first

    first, second, third, fourth = together(4, body)
    assert first[0] == third[0] != second[0] == fourth[0]
    assert [first[1], second[1], third[1], fourth[1]] == [0, 0, 2, 2]


def test_rows_are_the_training_of_twins(together):
    """In losses and statistics, whatever their samples need, and with the same random numbers."""

    def body(data):
        trainer = usual(Mesh(pipeline=SOMETIMES, data=data), model=build_sometimes)
        losses = trainer.fit(4)["loss"].tolist()
        unused = dict(trainer.model.named_parameters()).get("1.unused")
        assert unused is None or (set(unused.tolist()), unused.grad) == ({1.0}, None)
        return losses, {name: b.double().numpy() for name, b in trainer.model.named_buffers()}

    twins = together(4, lambda _: body(2))
    for (losses, buffers), (its, their) in zip(
        together(4, lambda _: body(Sharded())), twins, strict=True
    ):
        assert losses == pytest.approx(its, rel=1e-5)
        assert not their or far(buffers, their) <= 1e-5


@pytest.mark.parametrize("strategy", [BOTH, ROWS], ids=["panels", "rows"])
def test_an_own_loop_over_stages_that_are_divided(together, strategy):
    """It calls `step.train`; what an attempt that broke has left in the stages is let go."""

    def body(strategy):
        trainer = usual(strategy)
        for step in trainer.steps(4):
            division = getattr(trainer.model, "division", None)
            if division is not None and step.number == 2:
                division.come()
                for parameter in trainer.model.stages.parameters():
                    parameter.grad = torch.ones_like(parameter)
                trainer._state.exchange.begin(dist.get_rank(), 4, step.generation)
            with step:
                for batch in step.batches():
                    step.train(batch)
        return trainer.history["loss"].tolist()

    (expected,) = together(1, lambda _: body(DataParallel()))
    for losses in together(4, lambda _: body(strategy)):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_plan_that_stages_lack_something_of_is_refused(together):
    """On all ranks, also on those whose stages are as they should be."""

    def build():
        row = [nn.Linear(FEATURES, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH)]
        return nn.Sequential(*row, nn.Linear(WIDTH, CLASSES))

    def body(_):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        stages = Pipeline(2, "1f1b", 4, split=[3, 1])
        trainer = usual(Mesh(pipeline=stages, tensor=TensorParallel(plan)), model=build)
        with pytest.raises(ValueError, match=r"different gradients of 1\.weight, which each has"):
            trainer.fit(1)
        return trainer.step

    assert together(4, body) == [0] * 4


def test_a_made_module_is_taken_from_rank_0(together):
    """By all ranks, whichever part they hold."""

    def body(rank, strategy):
        torch.manual_seed(rank)
        return usual(strategy, model=build_layers()).fit(3)["loss"].tolist()

    (expected,) = together(1, lambda rank: body(rank, DataParallel()))
    for strategy in MESHES.values():
        for losses in together(4, lambda rank, its=strategy: body(rank, its)):
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", OF_GPT, ids=repr)
def test_a_rank_holds_what_was_estimated(together, strategy):
    """Bytes of parameters, gradients and optimizer state, exactly; rows are all that stays between
    steps."""

    def body(_):
        trainer = usual(strategy, model=gpt(False), data=text(), loss=next_token_loss)
        trainer.fit(3)
        held = list(trainer.model.parameters())
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        here = {id(p): p for module in trainer.model.modules() for p in module._parameters.values()}
        return (
            sum(p.nbytes for p in held),
            sum(p.grad.nbytes for p in held),
            sum(value.nbytes for value in states),
            sum(p.untyped_storage().nbytes() for p in here.values() if p is not None)
            if strategy.within == Sharded()
            else 0,
        )

    sample = torch.zeros(1, 16, dtype=torch.int64)
    made = estimate(gpt(False), strategy, 4, global_batch=48, sample=sample)
    for (*held, here), need in zip(together(4, body), made.ranks, strict=True):
        assert held == [need.parameters, need.gradients, need.optimizer]
        assert here == 0


def test_twins_share_what_is_written(together):
    """Of a checkpoint: what two hold is written once, some of it by each."""

    def body(rank):
        trainer = usual(PIPED)
        trainer.fit(1)
        return sum(tensor.nbytes for tensor in trainer.part(rank, 4)._tensors.values())

    written = together(4, body)
    made = estimate(build_layers, PIPED, 4, sample=torch.zeros(1, FEATURES))
    needs = [need.parameters + need.optimizer for need in made.ranks]
    assert [written[0] + written[2], written[1] + written[3]] == needs[:2]
    assert all(0 < its < need for its, need in zip(written, needs, strict=True))


def test_groups_of_another_size_are_refused(together):
    """By a sentence, when the trainer is made."""

    def body(_):
        with pytest.raises(
            ValueError, match=r"a mesh of 2 x 2 ranks, and the group has 3: start 4"
        ):
            usual(PIPED)
        with pytest.raises(ValueError, match=r"there must be a multiple of 2, since a model lies"):
            usual(Mesh(pipeline=2, data=DataParallel()))
        with pytest.raises(ValueError, match=r"a multiple of 2, since so many hold the same"):
            usual(CUT)
        dist.barrier()  # else one might be gone before the others have formed the group
        return dist.get_rank()

    assert together(3, body) == [0, 1, 2]
