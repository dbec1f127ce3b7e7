"""Checkpoints of real groups: read by other numbers of ranks and strategies, and after kills."""

import itertools
import multiprocessing
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # these two each process would import
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from nbdist import checkpoints
from nbdist.errors import FileUnwritable, WrongState
from nbdist.train import (
    GPT,
    DataParallel,
    GPTConfig,
    Mesh,
    Pipeline,
    Sharded,
    TensorParallel,
    Trainer,
    estimate,
    next_token_loss,
)

FORK = multiprocessing.get_context("fork")
STEPS, MORE = 5, 4


def build():
    layers = [nn.Sequential(nn.Linear(12, 24), nn.GELU())]
    layers += [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(24, 5))


def dataset():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 12, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 5, (96,), generator=generator))


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def make(strategy=None, **changes):
    usual = {
        "model": build,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "scheduler": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
        "loss": functional.cross_entropy,
        "data": dataset(),
        "global_batch": 48,
        "seed": 3,
    }
    trainer = Trainer(strategy=strategy or DataParallel(), **usual | changes)
    trainer.register("counter", Counter())
    return trainer


def held(trainer):
    """Name -> bytes, of this rank's parameters and their two moments; of rows, the whole ones."""
    state, model = trainer.optimizer.state, trainer.model
    whole = getattr(model, "gather", lambda _, tensor: tensor)
    return {
        name: [
            (whole(name, t.detach()) if t.dim() else t).detach().numpy().tobytes()
            for t in (p, *_moments(state[p]))
        ]
        for name, p in model.named_parameters()
    }


def _moments(state):
    return state["exp_avg"], state["exp_avg_sq"], state["step"]


def merged(parts):
    """What ranks hold, together; where two hold the same name they hold the same."""
    together_ = {}
    for part in parts:
        for name, values in part.items():
            assert together_.setdefault(name, values) == values
    return together_


def save(together, path, num, strategy, **changes):
    """Save after some steps; what was held then, and the losses afterwards."""
    partial = checkpoints.begin(path, step=STEPS, generation=1)

    def body(rank):
        trainer = make(strategy, **changes)
        trainer.fit(STEPS)
        trainer._state.registered["counter"].count = 7 + rank
        trainer.part(rank, num).write(partial)
        now = held(trainer)
        return now, trainer.fit(MORE)["loss"].tolist()

    answers = together(num, body)
    parts = [checkpoints.part_name(rank) for rank in range(num)]
    checkpoints.commit(partial, parts, step=STEPS, generation=1)
    return merged(now for now, _ in answers), answers[0][1]


def resume(together, path, num, strategy, *, is_own=False, **changes):
    """The same of a group that loads it; `is_own`: what each rank had registered comes back."""

    def body(rank):
        trainer = make(strategy, **changes)
        assert trainer.load(path) == []
        assert trainer.step == STEPS
        assert trainer._state.registered["counter"].count == 7 + is_own * rank
        now = held(trainer)
        return now, trainer.fit(MORE)["loss"].tolist()

    answers = together(num, body)
    return merged(now for now, _ in answers), answers[0][1]


LAYOUTS = {
    "replicas 2": (2, DataParallel()),
    "replicas 3": (3, DataParallel()),
    "alone": (1, DataParallel()),
    "stages 4": (4, Pipeline(4, "1f1b", 8)),
    "stages 4 on 2": (2, Pipeline(4, "interleaved", 8)),
    "stages 2": (2, Pipeline(2, "1f1b", 8)),
    "rows 2": (2, Sharded()),
    "rows 3": (3, Sharded()),
    "panels 2": (2, TensorParallel({"1.0": ColwiseParallel(), "2.0": RowwiseParallel()})),
    "panels 4": (4, TensorParallel({"1.0": ColwiseParallel(), "2.0": RowwiseParallel()})),
    "meshes 2 of 2": (4, Mesh(pipeline=Pipeline(2, "1f1b", 4), data=2)),
    "panels 2 of 2": (
        4,
        Mesh(tensor=TensorParallel({"1.0": ColwiseParallel(), "2.0": RowwiseParallel()}), data=2),
    ),
    "stages of panels 4": (
        4,
        Mesh(
            pipeline=Pipeline(2, "1f1b", 4),
            tensor=TensorParallel({"1.0": ColwiseParallel(), "2.0": RowwiseParallel()}),
        ),
    ),
    "stages of rows 4": (4, Mesh(pipeline=Pipeline(2, "1f1b", 4), data=Sharded())),
    "rows 4": (4, Sharded()),  # of the last bias, with five, the last rank has none
}
WAYS = [
    ("replicas 2", "replicas 2"),
    ("stages 4", "stages 4"),
    ("replicas 3", "replicas 2"),
    ("replicas 2", "alone"),
    ("stages 4", "replicas 2"),
    ("replicas 2", "stages 4"),
    ("stages 4", "stages 4 on 2"),
    ("stages 4 on 2", "stages 2"),
    ("rows 4", "rows 4"),
    ("rows 3", "rows 2"),
    ("rows 2", "rows 3"),
    ("rows 2", "replicas 2"),
    ("replicas 2", "rows 2"),
    ("rows 4", "alone"),
    ("stages 2", "rows 2"),
    ("rows 3", "stages 2"),
    ("panels 2", "panels 2"),
    ("panels 4", "panels 2"),
    ("panels 2", "alone"),
    ("rows 3", "panels 2"),
    ("panels 2", "rows 3"),
    ("meshes 2 of 2", "meshes 2 of 2"),
    ("meshes 2 of 2", "stages 4 on 2"),
    ("replicas 3", "meshes 2 of 2"),
    ("panels 2 of 2", "replicas 2"),
    ("rows 3", "panels 2 of 2"),
    ("stages of rows 4", "stages of panels 4"),
    ("stages of panels 4", "rows 2"),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in [
            ("stages of rows 4", "stages of rows 4"),
            ("stages of panels 4", "stages of panels 4"),
            ("stages of panels 4", "alone"),
            ("replicas 2", "stages of rows 4"),
            ("stages of rows 4", "meshes 2 of 2"),
            ("panels 4", "stages of panels 4"),
        ]
    ),
]


@pytest.mark.parametrize(("there", "here"), WAYS)
def test_any_layout_is_read_by_any_other(together, tmp_path, there, here):
    """What is loaded is what was saved, bit for bit; so is what is trained then in the same layout,
    and within 1e-6 in another."""
    saved, losses = save(together, tmp_path, *LAYOUTS[there])
    is_own = there == here and "replicas" not in there
    loaded, more = resume(together, tmp_path, *LAYOUTS[here], is_own=is_own)
    assert loaded == saved
    if there == here:
        assert more == losses
    assert more == pytest.approx(losses, rel=1e-6)


def gpt():
    return GPT(GPTConfig(context=16, width=16, num_layers=2, num_heads=2, tied=True))


def text():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 256, (48, 17), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize(
    "ways", [("stages 2", "alone"), ("alone", "stages 2"), ("stages 2", "rows 2")]
)
def test_tied_weights_are_one(together, tmp_path, ways):
    """Two stages hold them and write them, and both read them; of rows there is one set."""
    changes = {"model": gpt, "data": text(), "loss": next_token_loss, "global_batch": 16}
    saved, losses = save(together, tmp_path, *LAYOUTS[ways[0]], **changes)
    loaded, more = resume(together, tmp_path, *LAYOUTS[ways[1]], **changes)
    assert loaded == saved
    assert more == pytest.approx(losses, rel=1e-6)


def test_a_rank_with_rows_never_has_more(together, tmp_path):
    """It copies, and reads, as many bytes as it holds of parameters and optimizer state."""
    partial = checkpoints.begin(tmp_path, step=STEPS, generation=1)

    def body(rank):
        trainer = make(Sharded())
        trainer.fit(STEPS)
        part = trainer.part(rank, 3)
        part.write(partial)
        dist.barrier()
        if rank == 0:
            parts = [checkpoints.part_name(rank) for rank in range(3)]
            checkpoints.commit(partial, parts, step=STEPS, generation=1)
        dist.barrier()
        read = trainer.read(checkpoints.newest(tmp_path).path).parts
        tensors = [*read["parameters"].values()]
        tensors += [t for its in read["optimizer"]["state"].values() for t in its.values()]
        return sum(t.nbytes for t in part._tensors.values()), sum(t.nbytes for t in tensors)

    needs = [need.parameters + need.optimizer for need in estimate(build, Sharded(), 3).ranks]
    assert together(3, body) == [(need, need) for need in needs]


@pytest.mark.parametrize("strategy", [Pipeline(2, "1f1b", 8, copy_every=4), Sharded(copy_every=4)])
def test_copies_of_what_is_given_up_are_gone(together, tmp_path, strategy):
    """A stage that is lost afterwards must not come back with weights from before the load."""
    save(together, tmp_path, 2, strategy)

    def body(_):
        trainer = make(strategy)
        trainer.fit(11)
        before = [spread.step for spread in trainer._state.exchange._copies._kept]
        trainer.load(tmp_path)
        trainer.fit(1)
        return before, [spread.step for spread in trainer._state.exchange._copies._kept]

    assert together(2, body) == [([4, 8], [STEPS])] * 2


def test_scripts_save_replicas_by_one_rank(together, tmp_path):
    """And say where that cannot be done."""

    def body(rank):
        trainer = make()
        trainer.fit(STEPS)
        trainer._state.registered["counter"].count = 7
        path = trainer.save(tmp_path)
        assert (path is None) == (rank > 0)
        return held(trainer), None

    saved = merged(now for now, _ in together(2, body))
    loaded, _ = resume(together, tmp_path, 1, DataParallel())
    assert loaded == saved

    def stages(_, strategy):
        trainer = make(strategy)
        trainer.fit(1)
        with pytest.raises(WrongState, match="each rank holds a part of its own"):
            trainer.save(tmp_path)

    for strategy in (Pipeline(2, "1f1b", 8), Sharded()):
        together(2, lambda rank, its=strategy: stages(rank, its))


def test_a_full_disk_is_named(together, tmp_path):
    """The file and the reason; what was begun is gone, the one before is as it was."""

    def body(_):
        trainer = make()
        trainer.fit(1)
        trainer.save(tmp_path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(FileUnwritable, match=rf"{tmp_path}/step-1.*\(EFBIG\)"):
            trainer.save(tmp_path)
        trainer.fit(1)
        return trainer.step

    assert together(1, body) == [2]
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1
    make().load(tmp_path)


def test_a_rank_saves_while_the_others_train(together, tmp_path):
    """A save does no communication, so nobody waits for anybody in it: speechbrain#2401."""

    def body(rank, *, saves=True):
        trainer = make()
        trainer.fit(STEPS)
        writer = threading.Thread(target=lambda: None)
        if saves and rank == 0:
            part = trainer.part(0, 1)
            partial = checkpoints.begin(tmp_path, step=STEPS, generation=1)
            writer = threading.Thread(target=part.write, args=(partial,))
        digest = trainer.digest()
        writer.start()
        trainer.fit(MORE)
        writer.join()
        if saves and rank == 0:
            checkpoints.commit(partial, ["rank-0"], step=STEPS, generation=1)
        return digest, trainer.digest()

    told = together(2, body)
    assert told == together(2, lambda rank: body(rank, saves=False))
    trainer = make()
    trainer.load(tmp_path)
    assert trainer.digest() == told[0][0]


# ---- kills

CALLS = ["fsync", "open", "rename", "replace", "mkdir"]
"""Of `os`; Python's own files open by another road."""


def killed_in_call(path, number):
    """Save in a process that is killed in the so-manieth call that changes something on disk."""

    def save():
        torch.set_num_threads(1)
        trainer = make()
        trainer.load(path)
        trainer.fit(1)
        left = [number]
        for name in CALLS:
            setattr(os, name, counting(getattr(os, name), left))
        trainer.save(path)
        os._exit(0)

    def counting(call, left):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    process = FORK.Process(target=save)
    process.start()
    process.join(120)
    is_killed = process.exitcode == -signal.SIGKILL
    assert is_killed or process.exitcode == 0
    return is_killed


@pytest.mark.timeout(300)
def test_a_kill_in_any_call_leaves_this_one_or_the_one_before(together, tmp_path):
    """Call by call: until the folder has its name it is the one before, from then on this one."""
    together(1, lambda _: (trainer := make()).fit(1) and str(trainer.save(tmp_path)))
    steps, number = [], 1
    while killed_in_call(tmp_path, number):
        trainer = make()
        trainer.load(tmp_path)
        steps.append(trainer.step)
        number += 1
    assert number > 12
    assert all(step in (before, before + 1) for before, step in itertools.pairwise([1, *steps]))
    assert steps[0] == 1
    assert steps[-1] > steps[0]


def save_for_ever(path, pipe):
    """A process that goes on from the newest, and saves after each step, by two writers."""
    torch.set_num_threads(1)
    trainer = make()
    trainer.load(path)
    while True:
        began_at = time.monotonic()
        trainer.fit(1)
        partial = checkpoints.begin(path, step=trainer.step, generation=1)
        for rank in (0, 1):
            trainer.part(rank, 2).write(partial)
        parts = [checkpoints.part_name(rank) for rank in (0, 1)]
        checkpoints.commit(partial, parts, step=trainer.step, generation=1, keep=2)
        pipe.send(time.monotonic() - began_at)


def killed(path, num, moment):
    """Have it save so often, and kill it at some moment of the next step or save."""
    mine, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=save_for_ever, args=(path, theirs))
    process.start()
    try:
        theirs.close()
        for _ in range(num):
            assert mine.poll(60)
            usual_s = mine.recv()
        time.sleep(moment * usual_s)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("num", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_after_a_kill_in_a_save_the_newest_whole_one_is_loaded(together, tmp_path, num):
    """Whatever it was killed in: it is the state of one step, bit for bit, and never an older one
    than before.

    The newest was incomplete, and could not be resumed from: transformers#35782,
    speculators#739. Parts of an old one were mixed in: ray#41700.
    """
    moment, seen = random.Random(num), []
    together(1, lambda _: (trainer := make()).fit(1) and str(trainer.save(tmp_path)))
    for _ in range(num):
        killed(tmp_path, moment.randrange(1, 4), moment.random())
        trainer = make()
        trainer.load(tmp_path)
        seen.append((trainer.step, trainer.digest()))
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps))

    def reference(_):
        trainer, digests = make(), [""]
        for _ in range(steps[-1]):
            trainer.fit(1)
            digests.append(trainer.digest())
        return digests

    (digests,) = together(1, reference)
    assert seen == [(step, digests[step]) for step in steps]
