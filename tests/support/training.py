"""What the tests of training runs have the engines train, and how they check what was trained.

The model counts: beside an MLP it has a parameter with a place for each sample, whose gradient is
one for each time that the sample is trained on. So what was applied can be counted afterwards,
without believing the ledger.
"""

from __future__ import annotations

import random
import time

import numpy as np

NUM_SAMPLES = 6000
BATCH = 60
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH

CELL = f"""
import time
import torch
from nbdist.train import DataParallel, Evaluate, Trainer, bench_model

class Data:
    def __init__(self, pause_s=0.0):
        self.pause_s = pause_s
    def __len__(self):
        return {NUM_SAMPLES}
    def __getitem__(self, i):
        if self.pause_s:
            time.sleep(self.pause_s)
        generator = torch.Generator().manual_seed(int(i))
        x = torch.randn(64, generator=generator)
        return (x, int(i)), x[:10] * 0.5 + torch.randn(10, generator=generator)

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = bench_model()
        self.count = torch.nn.Parameter(torch.zeros({NUM_SAMPLES}))
    def forward(self, batch):
        x, i = batch
        return self.inner(x), self.count[i]

def loss(output, target):
    y, count = output
    return torch.nn.functional.mse_loss(y, target) + (count.detach() - count).mean()

def sgd(named):
    named = list(named)
    inner = [(n, p) for n, p in named if n != "count"]
    counts = [(n, p) for n, p in named if n == "count"]
    return torch.optim.SGD(
        [dict(params=inner, lr=0.05, momentum=0.9), dict(params=counts, lr=1.0, momentum=0.0)],
        lr=0.05,
    )

def make(**more):
    usual = dict(model=Counting, optimizer=sgd, loss=loss, data=Data(), seed=0)
    return Trainer(**(usual | dict(global_batch={BATCH}) | more))

trainer = make()
"""

SLEEPING = """
class Sleeps(torch.utils.data.Dataset):
    '''The model's work is a rest: on a busy machine too the ranks are equally quick.'''

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.ones(4), torch.ones(1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        time.sleep(0.02)
        return self.layer(x)

import time
from nbdist.train import DataParallel, Trainer
trainer = Trainer(
    model=Model, optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    loss=torch.nn.functional.mse_loss, data=Sleeps(), global_batch=60, seed=0,
    strategy=DataParallel(),
)
"""


_IN_PARTS = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from nbdist.train import Evaluate, Mesh, Pipeline, Sharded, TensorParallel, Trainer, bench_model

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(240, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (240,), generator=generator))

def make(**more):
    usual = dict(model=bench_model, data=data(), loss=functional.cross_entropy, global_batch=47)
    usual |= dict(optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), clip_norm=1.0)
    usual |= dict(evaluate=Evaluate(data(), every=25))
    return Trainer(**(usual | dict(strategy=STRATEGY) | more))
"""


def cell_in_parts(strategy, before=""):
    """A trainer whose ranks hold parts of a model, as a cell makes it; `before`: more lines."""
    return f"{_IN_PARTS}\n{before}\nSTRATEGY = {strategy}\ntrainer = make()\n"


def cell(strategy):
    """The same with another strategy, given as it is written in a cell."""
    return f"{CELL}trainer = make(strategy={strategy})\n"


def undisturbed(engines, steps, make="make()"):
    """Losses of a run of the same seed in which nothing happens."""
    engines.run(f"reference = {make}", once=True)
    return engines.train("reference", steps=steps).wait(120).history["loss"]


def check_steps(run, first=0):
    """Every step is committed once, in order."""
    steps = run.history["step"]
    assert steps.tolist() == list(range(first, first + len(steps)))


def check_samples(engines, num_steps, name="trainer"):
    """Every sample was applied as often as the steps say: none lost, none repeated."""
    code = f"({name}.model.count.detach() * {BATCH}).round().to(torch.int64)"
    counts = engines.run(code, once=True).values
    epochs, rest = divmod(num_steps, STEPS_PER_EPOCH)
    for rank, count in counts.items():
        times = np.bincount(count.numpy(), minlength=epochs + 2)
        assert times[epochs] == NUM_SAMPLES - rest * BATCH, (rank, times)
        assert times[epochs + 1] == rest * BATCH, (rank, times)


def check_replicas(engines, name="trainer"):
    """All ranks hold the same parameters, bit for bit."""
    digests = engines.parameter_digest(name)
    assert set(digests) == set(range(engines.world_size))
    assert len(set(digests.values())) == 1, digests


def passed(run, step):
    return len(run.history["step"]) >= step


def go_on(run, until, num=15):
    """Wait until so many more steps are committed."""
    mark = len(run.history["step"]) + num
    until(lambda: passed(run, mark), 60, "the run goes on")


def disturb(engines, run, until, *, between=None):
    """Of two ranks both are killed and one is stopped, each filled again; a third comes, is killed,
    and is given back. `between`: called while both are there, after the kills."""
    go_on(run, until)
    for rank, how in ((1, "KILL"), (0, "KILL"), (1, "STOP")):
        if how == "STOP" and between is not None:
            between()
        before = engines.generation
        engines.kill(rank, signal=how)
        engines.wait_healthy(60, after=before + 1)
        go_on(run, until)
    engines.scale(3)
    go_on(run, until)
    engines.kill(2)
    go_on(run, until)
    engines.wait_healthy(60)
    engines.scale(2)
    go_on(run, until)


def kill_each(engines, until, cell, num_kills, seed, *, rtol=1e-5):
    """Kill ranks in turn, at random moments, and compare with a run that nothing happens to.

    Each rank holds a part of its own, and the cell has copies made every five steps.
    """
    moment = random.Random(seed)
    engines.run(cell)
    run = engines.train("trainer", steps=1_000_000)
    for number in range(num_kills):
        before, mark = engines.generation, len(run.history["step"]) + moment.randrange(7, 20)
        until(lambda mark=mark: passed(run, mark), 60, "the run goes on")
        time.sleep(moment.random() * 0.02)  # the moment is not to be that of a commit
        engines.kill(number % engines.world_size)
        engines.wait_healthy(60, after=before + 1)
    mark = len(run.history["step"]) + 12
    until(lambda: passed(run, mark), 60, "the run goes on")
    run.stop()
    check_steps(run)
    losses = undisturbed(engines, len(run.history["step"]))
    np.testing.assert_allclose(run.history["loss"], losses, rtol=rtol)
    assert len([i for i in run.incidents if i.kind == "lost"]) == num_kills
    assert all(i.steps_repeated <= 6 for i in run.incidents), run.incidents
