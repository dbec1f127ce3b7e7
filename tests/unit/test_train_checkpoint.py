"""A trainer's state in a checkpoint: written, read, refused. One process; no group."""

import json

import pytest
import torch
import torch.distributed.checkpoint  # the first save would import it
from torch import nn
from torch.optim import lr_scheduler
from trainers import Samples, make

from nbdist import checkpoints
from nbdist.errors import CheckpointUnreadable, WrongState
from nbdist.train.checkpoint import Part, _origin_of
from nbdist.train.parting import Origin
from nbdist.train.resume import _states


class Counter:
    """Something of the user's own."""

    def __init__(self, count=0):
        self.state = {"count": count, "history": torch.zeros(3), "names": ["a", ("b", None)]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def scheduled(**changes):
    trainer = make(scheduler=lambda o: lr_scheduler.StepLR(o, 3), **changes)
    trainer.register("counter", Counter())
    return trainer


def trained(num=5, **changes):
    trainer = scheduled(**changes)
    trainer._state.registered["counter"].state["count"] = 7
    trainer.fit(num)
    return trainer


def by_two(trainer, path):
    """As two replicas would write it: each its share."""
    partial = checkpoints.begin(path, step=trainer.step, generation=2)
    for rank in (0, 1):
        Part(trainer._state, rank, 2).write(partial)
    parts = [checkpoints.part_name(rank) for rank in (0, 1)]
    return checkpoints.commit(partial, parts, step=trainer.step, generation=2).path


@pytest.mark.parametrize("save", [lambda t, path: t.save(path), by_two], ids=["one", "two"])
def test_training_goes_on_bit_by_bit(tmp_path, save):
    """Optimizer, rates, scheduler, buffers, random numbers, samples and what was registered."""
    one, other = trained(), scheduled()
    folder = save(one, tmp_path)
    parameters = list(other.model.parameters())
    assert other.load(folder.parent) == []
    assert other.digest() == one.digest()
    assert other.step == 5
    assert other._state.registered["counter"].state["count"] == 7
    assert all(a is b for a, b in zip(parameters, other.model.parameters(), strict=True))
    losses = [trainer.fit(6)["loss"].tolist() for trainer in (one, other)]
    assert losses[0] == losses[1]
    assert other.digest() == one.digest()


def test_one_that_has_trained_on_goes_back(tmp_path):
    """Also by a single step, which is how a rank that lags would be brought forward."""
    one = trained(4)
    folder = one.save(tmp_path)
    digest = one.digest()
    for num in (1, 3):
        one.fit(num)
        one.load(folder)
        assert one.digest() == digest


def test_each_writes_its_share(tmp_path):
    """Nothing twice, nothing left out, and about as much each."""
    folder = by_two(trained(), tmp_path)
    indices = [
        {p["key"] for p in json.loads((folder / part / "tensors.json").read_text())}
        for part in ("rank-0", "rank-1")
    ]
    assert not indices[0] & indices[1]
    assert {"parameters/0.weight", "buffers/1.running_mean", "optimizer/3.bias/exp_avg"} <= (
        indices[0] | indices[1]
    )
    assert all(indices)


def test_copies_are_of_the_moment(tmp_path):
    """What is trained before they are written does not come into them."""
    one, other = trained(), scheduled()
    digest = one.digest()
    part = Part(one._state, 0, 1)
    one.fit(2)
    one._state.registered["counter"].state["history"] += 1
    partial = checkpoints.begin(tmp_path, step=5, generation=0)
    part.write(partial)
    checkpoints.commit(partial, ["rank-0"], step=5, generation=0)
    other.load(tmp_path)
    assert other.digest() == digest


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """Loading never comes to pickle, and refuses what would run."""
    folder = trained().save(tmp_path)
    for way in (
        "load",
        "loads",
        "Unpickler",
    ):  # the last is what torch.load takes, unless forbidden
        monkeypatch.setattr(f"pickle.{way}", lambda *_, **__: pytest.fail("unpickled"))
    scheduled().load(folder)
    assert not list(folder.rglob(".metadata"))


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_what_could_not_be_read_is_not_written(tmp_path):
    """It is said at the save, and of which object."""
    trainer = trained()
    trainer._state.registered["counter"].state["it"] = Runs()
    with pytest.raises(TypeError, match=r"register\('counter', …\): its state_dict\(\) cannot be"):
        trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    """The ranks' weights become one with it."""
    with pytest.raises(WrongState, match="train a step, then save"):
        scheduled().save(tmp_path)


def wider():
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 1))


def deeper():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1), nn.Linear(1, 1)
    )


def shallower():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


MISFITS = {
    "shapes": ({"model": wider}, r"other shapes: 0.weight \(8, 4\) instead of \(9, 4\), 0.bias"),
    "lacks": ({"model": deeper}, r"it lacks 4.weight, 4.bias\. Make"),
    "has more": ({"model": shallower}, "it has 3.bias, 3.weight, which this trainer's model has"),
    "optimizer": ({"optimizer": sgd}, "the state of AdamW, and the optimizer is SGD"),
    "scheduler": ({"scheduler": None}, "only one of them has a scheduler"),
}


@pytest.mark.parametrize("how", MISFITS)
def test_another_trainer_is_refused(tmp_path, how):
    """All that differs is named, and nothing of the trainer has changed."""
    folder = trained().save(tmp_path)
    changes, why = MISFITS[how]
    other = make(**{"scheduler": lambda o: lr_scheduler.StepLR(o, 3)} | changes)
    other.register("counter", Counter())
    digest = other.digest()
    with pytest.raises(CheckpointUnreadable, match=why):
        other.load(folder)
    assert other.digest() == digest


def test_what_was_not_registered_is_named(tmp_path):
    """In either direction."""
    folder = trained().save(tmp_path)
    other = make(scheduler=lambda o: lr_scheduler.StepLR(o, 3))
    with pytest.raises(CheckpointUnreadable, match="differ in what was registered: counter"):
        other.load(folder)


def test_other_samples_are_said(tmp_path):
    """Another seed, batch or data set is no mistake, but no continuation either."""
    folder = trained().save(tmp_path)
    other = scheduled(seed=4, data=Samples(48))
    notes = other.load(folder)
    assert [note.split(":")[0] for note in notes] == [
        "seed is 4 here and was 3 when it was saved",
        "num_samples is 48 here and was 40 when it was saved",
    ]


def two_groups(named):
    named = list(named)
    heavy = [pair for pair in named if "weight" in pair[0]]
    light = [pair for pair in named if "weight" not in pair[0]]
    return torch.optim.AdamW([{"params": heavy, "lr": 1e-3}, {"params": light}], lr=1e-2)


def test_groups_keep_their_settings(tmp_path):
    """By the parameters that are in them; where they are cut otherwise it is said."""
    one = make(optimizer=two_groups)
    one.fit(2)
    one.optimizer.param_groups[0]["lr"] = 5e-4
    folder = one.save(tmp_path)
    other = make(optimizer=two_groups)
    other.load(folder)
    assert [g["lr"] for g in other.optimizer.param_groups] == [5e-4, 1e-2]
    assert other.digest() == one.digest()
    with pytest.raises(CheckpointUnreadable, match="different settings when they were saved"):
        make().load(folder)


def test_in_a_step_nothing_is_loaded(tmp_path):
    """The step would be of another training then."""
    trainer = trained()
    folder = trainer.save(tmp_path)
    for step in trainer.steps(1):
        with step:
            for inputs, target in step.batches():
                with pytest.raises(WrongState, match="this trainer trains now"):
                    trainer.load(folder)
                step.backward(nn.functional.mse_loss(trainer.model(inputs), target))
    assert trainer.step == 6


def test_what_is_kept_of_a_piece_lies_as_the_piece():
    """A single number is whole; what is neither could not be read again, and is refused."""
    rows, origin = torch.zeros(2, 3), Origin((5, 3), (3, 0))
    assert _origin_of(torch.ones(2, 3), "0.weight", "exp_avg", rows, origin) == origin
    assert _origin_of(torch.ones(()), "0.weight", "step", rows, origin) == Origin((), ())
    with pytest.raises(WrongState, match=r"of 0.weight, .* keeps row_var of shape \(2, 1\)"):
        _origin_of(torch.ones(2, 1), "0.weight", "row_var", rows, origin)
    whole = torch.zeros(5, 3)
    assert _origin_of(torch.ones(5, 1), "w", "row_var", whole, Origin.whole(whole)) == Origin(
        (5, 1), (0, 0)
    )


def test_who_has_no_rows_may_keep_nothing_of_them():
    """What the optimizer keeps of a parameter is then said by those that have some."""
    kept, nothing = {"tensors": ["exp_avg"], "others": {}}, {"tensors": [], "others": {}}
    rests = [{"states": {"a": kept, "b": nothing}}, {"states": {"a": nothing}}]
    assert _states(rests) == {"a": kept, "b": nothing}
