"""The training loop against a port that orders, breaks and holds as a supervisor would."""

import numpy as np
import pytest
import torch
from torch import nn
from trainers import GLOBAL_BATCH, FakePort, GroupError, Samples, break_in, go, make

from nbdist.errors import WrongState
from nbdist.train import Evaluate
from nbdist.train.loop import Aside, own, train, walk
from nbdist.train.step import Step


def losses(port):
    return [row[1] for row in port.rows]


@pytest.fixture
def undisturbed():
    """A trainer after 12 steps, and what its port was told."""
    trainer, port = make(), FakePort(12)
    go(trainer, port)
    return trainer, port


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "vote", "buffers"])
def test_a_broken_step_is_repeated_as_if_nothing_had_been(undisturbed, phase):
    """Wherever the group breaks, the step comes again on the same samples, to the same end."""
    reference, calm = undisturbed
    trainer, port = make(data := Samples()), FakePort(12, 12)
    break_in(trainer, phase, 5)
    go(trainer, port)
    assert port.told == [("broken", 5), ("held", 12)]
    assert trainer.digest() == reference.digest()
    assert losses(port) == losses(calm)
    assert [row[0] for row in port.rows] == list(range(12))
    assert [row[4] for row in port.rows] == [1] * 5 + [2] * 7
    again = 0 if phase == "data" else GLOBAL_BATCH
    asked = data.asked[: 5 * GLOBAL_BATCH] + data.asked[5 * GLOBAL_BATCH + again :]
    assert asked == reference._state.loader._fetcher._data.asked


def test_nothing_is_communicated_after_a_break(monkeypatch):
    """Between a break and the next order to go on, the loop only waits."""
    trainer = make(evaluate=Evaluate(Samples(), every=3))
    calls, port = [], FakePort(12)
    port.orders = [lambda: None, lambda: calls.clear() or None, lambda: None, 12]
    break_in(trainer, "backward", 3)
    sum_ = trainer._state.exchange.sum_
    trainer._state.exchange.sum_ = lambda tensor: (calls.append(port.go_until), sum_(tensor))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: pytest.fail("called"))
    go(trainer, port)
    assert None not in calls
    assert trainer.step == 12


def test_an_evaluation_that_breaks_is_repeated():
    """It comes once for its step, although the group broke in it."""
    trainer, port = make(evaluate=Evaluate(Samples(), every=4)), FakePort(12, 12)
    run, pending = trainer._state.evaluator.run, [True]

    def breaks(*args):
        if trainer.step == 8 and pending:
            pending.clear()
            raise GroupError
        return run(*args)

    trainer._state.evaluator.run = breaks
    go(trainer, port)
    assert [evaluation.step for evaluation in port.evaluations] == [4, 8, 12]
    assert port.told == [("broken", 8), ("held", 12)]


def test_an_evaluation_is_repeated_in_the_next_group():
    """A rank that has done it before the group broke does it again, as those do that have not."""
    trainer = make(evaluate=Evaluate(Samples(), every=4))
    port = FakePort(4, lambda: setattr(port, "generation", 2), 4, 4, 12)
    before = []
    port.hold_before, port.hold = (
        port.hold,
        lambda step: (
            before.append((step, trainer.digest())),
            port.hold_before(step),
        ),
    )
    go(trainer, port)
    assert [evaluation.step for evaluation in port.evaluations] == [4, 4, 8, 12]
    assert len({digest for step, digest in before if step == 4}) == 1


def test_what_was_evaluated_is_no_part_of_the_state():
    """Ranks on either side of an evaluation that broke have equal digests."""
    trainers = [make(), make(evaluate=Evaluate(Samples(), every=4))]
    for trainer in trainers:
        go(trainer, FakePort(4))
    assert trainers[0].digest() == trainers[1].digest()
    assert trainers[0].pack() == trainers[1].pack()


def test_the_vote_holds_at_a_common_boundary():
    """A wish to hold is said in the vote, and the loop stands after that very step."""
    trainer, port = make(), FakePort(12, 12)
    commit = port.committed
    port.committed = lambda row: (commit(row), setattr(port, "wants_hold", row[0] == 3))
    go(trainer, port)
    assert port.told == [("held", 5), ("held", 12)]
    assert trainer.step == 12


def test_settings_are_taken_at_a_boundary():
    """A new rate is used from the next step on, and scheduled from there."""
    trainer = make(scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k))
    port = FakePort(2, 4)
    go_on = port.wait
    port.wait = lambda: (port.settings.append({"lr": 1.0}) if port.orders else None, go_on())
    go(trainer, port)
    assert [row[6] for row in port.rows] == pytest.approx([1e-2, 5e-3, 0.25, 0.125])


def test_users_random_numbers_are_not_disturbed():
    """Training draws its own; what a cell draws is as if nothing had been trained."""

    def draw():
        return torch.rand(2).tolist(), np.random.randn(3).tolist()

    torch.manual_seed(0)
    np.random.seed(0)
    expected = [draw(), draw()]
    torch.manual_seed(0)
    np.random.seed(0)
    first = draw()
    go(make(), FakePort(3))
    assert [first, draw()] == expected


def test_an_error_of_the_users_ends_the_run():
    """It is told once, and raised; buffers and gradients are as after the last commit."""
    trainer, port = make(), FakePort(12)
    before = {}

    def loss(output, target):
        if trainer.step == 4:
            before.update(
                {n: b.clone() for n, b in zip("abc", trainer._state.buffers._kept, strict=True)}
            )
            raise ZeroDivisionError("mine")
        return nn.functional.mse_loss(output, target)

    trainer._state.objective._loss = loss
    with pytest.raises(ZeroDivisionError, match="mine"):
        go(trainer, port)
    assert port.told == [("raised", "mine")]
    assert all(p.grad is None for p in trainer.model.parameters())
    for buffer, kept in zip(trainer.model.buffers(), before.values(), strict=True):
        assert torch.equal(buffer, kept)


# ---- own loops


def test_an_own_loop_does_what_a_task_does(undisturbed):
    """The same steps, to the same end, broken and repeated too."""
    reference, _ = undisturbed
    trainer, port = make(), FakePort(12, 12)
    break_in(trainer, "backward", 7)
    attempts = []
    for step in own(trainer._state, port):
        with step:
            for x, y in step.batches():
                step.backward(nn.functional.mse_loss(trainer.model(x), y), count=len(x))
        attempts.append((step.number, step.attempt, step.generation))
    assert trainer.digest() == reference.digest()
    assert attempts[6:9] == [(6, 0, 1), (7, 0, 1), (7, 1, 2)]
    assert port.told == [("broken", 7), ("held", 12)]


def test_an_own_loop_that_is_left_early_says_where():
    """A break is told, once."""
    trainer, port = make(), FakePort(12)
    for step in own(trainer._state, port):
        train(step)
        if step.number == 3:
            break
    del step
    assert port.told == [("left", 4)]


def test_the_fault_of_a_run_is_raised_in_an_own_loop():
    """Where the run has failed elsewhere, the loop raises what the port says."""
    trainer, port = make(), FakePort(2)
    port.fault = WrongState("failed on rank 1")
    with pytest.raises(WrongState, match="rank 1"):
        go_through(own(trainer._state, port))
    assert trainer.step == 2


def go_through(steps):
    for step in steps:
        train(step)


def one_step(body, **changes):
    trainer = make(**changes)
    for step in trainer.steps(1):
        body(trainer, step)


def in_step(inner):
    def body(trainer, step):
        with step:
            inner(trainer, step)

    return body


def loss_of(trainer, batch):
    return nn.functional.mse_loss(trainer.model(batch[0]), batch[1])


def nothing(_trainer, _step):
    pass


def outside(_trainer, step):
    list(step.batches())


def without_backward(trainer, step):
    for batch in step.batches():
        loss_of(trainer, batch)


def with_loss_backward(trainer, step):
    for batch in step.batches():
        loss_of(trainer, batch).backward()


def twice(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch))
        step.backward(loss_of(trainer, batch))


def left_early(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch))
        break


def skipped(trainer, step):
    for number, batch in enumerate(step.batches()):
        if number == 1:
            continue
        step.backward(loss_of(trainer, batch))


def stepped(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch))
    trainer.optimizer.step()


def cleared(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch))
    trainer.optimizer.zero_grad()


def detached(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch).detach())


def again(trainer, step):
    for batch in step.batches():
        step.backward(loss_of(trainer, batch))
    list(step.batches())


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (nothing, WrongState, "was not run"),
        (outside, WrongState, "inside `with step:`"),
        (in_step(nothing), WrongState, "did not train"),
        (in_step(without_backward), WrongState, "not called for a batch"),
        (in_step(with_loss_backward), WrongState, "takes the place of loss.backward"),
        (in_step(twice), WrongState, "twice for one batch"),
        (in_step(left_early), WrongState, "left after 1 of 2 batches"),
        (in_step(skipped), WrongState, "count=0"),
        (in_step(stepped), WrongState, "optimizer.step() was called"),
        (in_step(cleared), WrongState, "gradients are gone"),
        (in_step(detached), ValueError, "does not depend on the model"),
        (in_step(again), WrongState, "called before in this step"),
    ],
)
def test_a_loop_that_is_written_wrongly_is_told_what_to_change(body, error, words):
    """Each way to write an own loop wrongly has its message."""
    with pytest.raises(error) as raised:
        one_step(body, accumulate=2)
    assert words in str(raised.value)


def test_a_step_knows_what_it_is():
    """Its fields; generators follow from step and sample alone; numbers are noted."""
    trainer = make()
    seen = []
    for step in trainer.steps(6):
        with step:
            for x, y in step.batches():
                step.backward(nn.functional.mse_loss(trainer.model(x), y))
            step.log(double=2 * step.number)
        seen.append((step.number, step.attempt, step.epoch, len(step.indices)))
    assert seen == [(i, 0, i // 5, 8) for i in range(6)]
    assert trainer.logged["double"] == [(i, 2.0 * i) for i in range(6)]
    draws = [torch.rand(1, generator=step.generator(i)).item() for i in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_a_trainer_that_does_not_fit_waits_where_another_group_is_to_come():
    """With other seats filled it may fit; where none comes, or not in time, it makes do."""
    for is_late in (False, True):
        trainer, port = make(), FakePort(2)
        state = trainer._state
        state.exchange.fits = lambda *_: False
        port.others_come, port.patience_s = True, 60.0
        walker = walk(state, port)
        assert [type(next(walker)), type(next(walker))] == [Aside, Aside]
        if is_late:
            port.patience_s = -1.0
        else:
            port.others_come = False
        step = next(walker)
        assert isinstance(step, Step)
        train(step)
        assert trainer.step == 1
        walker.close()
