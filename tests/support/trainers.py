"""Trainers, and a port that orders, breaks and holds as a supervisor would."""

import asyncio

import torch
from torch import nn
from torch.utils.data import Dataset

from nbdist.train import Trainer

NUM_SAMPLES, GLOBAL_BATCH = 40, 8


class GroupError(RuntimeError):
    """Stands for what a collective raises when a peer is gone."""


class Samples(Dataset):
    """Remembers which samples were asked for."""

    def __init__(self, num=NUM_SAMPLES):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(num, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.asked = []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.inputs[i], self.targets[i]


class FakePort:
    """Goes on as it was told beforehand; says what it was told."""

    def __init__(self, *until):
        self.go_until, *self.orders = until
        self.is_over, self.fault, self.wants_hold = False, None, False
        self.settings, self.generation, self.rank, self.world_size = [], 1, 0, 1
        self.slow_factor, self.patience_s, self.others_come = 1.0, 0.0, False
        self.told, self.rows, self.evaluations, self.begun = [], [], [], []

    def poll(self):
        pass

    def wait(self):
        if not self.orders:
            self.is_over = True
            return
        order = self.orders.pop(0)
        if callable(order):
            order()
        else:
            self.go_until = order

    async def wait_async(self):
        await asyncio.sleep(0)
        self.wait()

    def begin_step(self, step, *, patient):
        self.begun.append((step, patient))

    def hold(self, step):
        if self.go_until is not None:
            self.go_until, self.wants_hold = None, False
            self.told.append(("held", step))

    def committed(self, row):
        self.rows.append(row)

    def broken(self, step, error):
        if not isinstance(error, GroupError):
            return False
        self.told.append(("broken", step))
        self.go_until = None
        self.generation += 1
        return True

    def evaluated(self, evaluation):
        self.evaluations.append(evaluation)

    def raised(self, error):
        self.is_over, self.go_until = True, None
        self.told.append(("raised", str(error)))

    def left(self, step):
        self.is_over = True
        self.told.append(("left", step))


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def make(data=None, **changes):
    arguments = {
        "model": build,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "loss": nn.functional.mse_loss,
        "data": Samples() if data is None else data,
        "global_batch": GLOBAL_BATCH,
        "seed": 3,
    }
    return Trainer(**arguments | changes)


def go(trainer, port):
    """The task's loop."""
    asyncio.run(trainer.drive(port))


def break_in(trainer, phase, step):
    """Have the group break once, in one phase of a step."""
    state, pending = trainer._state, [step]

    def breaks():
        if state.step == step and pending:
            pending.clear()
            raise GroupError(phase)

    if phase == "data":
        fetch = state.loader.batches
        state.loader.batches = lambda *a: (breaks(), fetch(*a))[1]
    elif phase == "forward":
        state.module.register_forward_hook(lambda *_: breaks())
    elif phase == "backward":
        backward = state.exchange.backward
        state.exchange.backward = lambda *a, **k: (backward(*a, **k), breaks())[0]
    elif phase == "vote":
        sum_ = state.exchange.sum_
        state.exchange.sum_ = lambda tensor: (sum_(tensor), breaks())[0]
    elif phase == "buffers":
        settle = state.buffers.settle
        state.buffers.settle = lambda *a, **k: (settle(*a, **k), breaks())[0]
