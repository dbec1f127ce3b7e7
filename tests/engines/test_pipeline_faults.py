"""A stage that is lost at any moment of a step costs no exactness: four stages, one killed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import training

MICROBATCHES, COPY_EVERY = 8, 10
STALL_S = 2.0
"""From a stage's end to the next committed step, its seat being filled again; a test asserts four
times that."""
MOMENTS = ("forward", "backward", "between sends", "optimizer")
CELL = f"""
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from nbdist.train import Pipeline, Trainer, bench_model

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(240, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (240,), generator=generator))

def make():
    return Trainer(
        model=bench_model, data=data(), loss=functional.cross_entropy, global_batch=48,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), clip_norm=1.0,
        strategy=Pipeline(4, "1f1b", {MICROBATCHES}, copy_every={COPY_EVERY}),
    )

trainer = make()
"""
ARM = """
import os, signal
from nbdist.protocol.telemetry import Kind

def arm(moment, step, count):
    '''End this process at the so-and-so-manieth time that it comes to a moment of a step.'''
    passage, left = trainer._state.exchange._passage, [count]

    def comes():
        if trainer.step >= step:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    if moment == "optimizer":
        trainer.optimizer.register_step_pre_hook(lambda *_: comes())
        return
    kind = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD}.get(moment)
    computes, tell = passage.computes, passage.tell

    def computing(its_kind, *where):
        if its_kind is kind:
            comes()
        return computes(its_kind, *where)

    def telling(its_kind, *what):
        if kind is None and its_kind is Kind.SEND:
            comes()
        return tell(its_kind, *what)

    passage.computes, passage.tell = computing, telling
"""


def lose(engines, run, until, seed):
    """One stage, at one moment; the incident when its seat is filled again."""
    chance, moment = random.Random(seed), MOMENTS[seed % len(MOMENTS)]
    victim, generation = (seed + seed // 4) % 4, engines.generation
    step = run.num_committed + chance.randrange(3, 3 + COPY_EVERY)
    count = 0 if moment == "optimizer" else chance.randrange(MICROBATCHES)
    engines.run(f"{ARM}\narm({moment!r}, {step}, {count})", ranks=victim, once=True)
    engines.wait_healthy(60, after=generation + 1)
    mark = run.num_committed + 5
    until(lambda: len(run.history["step"]) >= mark, 60, lambda: f"{run} goes on after {moment}")
    return moment, victim


def check(engines, run, lost):
    """Nothing shows in the curve, and nothing took longer than is promised."""
    run.stop()
    training.check_steps(run)
    losses = training.undisturbed(engines, len(run.history["step"]))
    np.testing.assert_array_equal(run.history["loss"], losses)
    incidents = [i for i in run.incidents if i.kind == "lost"]
    assert [i.ranks for i in incidents] == [(victim,) for _, victim in lost]
    for incident, what in zip(incidents, lost, strict=True):
        # Those since the copy, and the one in which it was lost.
        assert incident.steps_repeated <= COPY_EVERY + 1, (what, incident)
        assert incident.stall_s <= 4 * STALL_S, (what, incident)


def begin(engines, until):
    """An endless run that has begun."""
    engines.run(CELL)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: len(run.history["step"]) > 5, 60, lambda: str(run))
    return run


def test_stages_that_are_lost_in_mid_step_leave_no_trace(cluster, until):
    """One in its backward passes, one before the optimizer's step, which others may have taken."""
    engines = cluster(4)
    run = begin(engines, until)
    check(engines, run, [lose(engines, run, until, seed) for seed in (1, 7)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_stage_may_be_lost_at_any_moment(cluster, until):
    """Twelve losses: each moment on three stages, at micro-batches and steps drawn at random."""
    engines = cluster(4)
    run = begin(engines, until)
    lost = [lose(engines, run, until, seed) for seed in range(12)]
    assert len(set(lost)) == 12
    check(engines, run, lost)
