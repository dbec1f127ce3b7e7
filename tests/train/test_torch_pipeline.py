"""What is used of torch's pipelining does what is expected, and a stage tells what it does."""

import contextlib
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import _utils
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from nbdist.engine.emit import RING
from nbdist.protocol.plans import unpacked
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.train import Pipeline, Trainer
from nbdist.train.strategies import actions, schedules, torch_pipeline
from nbdist.train.strategies.passage import Passage

WIDTH, BATCH = 8, 16
FORWARD_S, BACKWARD_S = 0.04, 0.08
MAY_DIFFER = 4 * 0.03
"""Four times the bound: `nbdist bench --only pipelines` holds the bound itself."""
COMPUTED = [Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]


def make(strategy, block=nn.Linear):
    data = TensorDataset(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
    return Trainer(
        model=lambda: nn.Sequential(*[block(WIDTH, WIDTH) for _ in range(strategy.stages)]),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        loss=nn.functional.mse_loss,
        data=data,
        global_batch=BATCH,
        strategy=strategy,
    )


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_lie_where_torch_has_them(name, ranks):
    """In a loop or in a V."""
    facts = schedules.named(name)
    stages = ranks * (facts.per_rank or 2)
    theirs = _utils.generate_stage_to_rank_mapping(ranks, stages, style=facts.lay)
    assert schedules.owners(name, stages, ranks) == tuple(theirs[s] for s in range(stages))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_what_is_planned_is_what_is_done(together, name):
    """Every rank tells its forward and backward passes in the order of torch's own plan, which is
    a schedule without a fault."""
    stages = 2 * (schedules.named(name).per_rank or 2)

    def planned(_):
        trainer, told = make(Pipeline(stages, name, 4)), {}
        exchange = trainer._state.exchange
        end = exchange.end
        exchange.end = lambda: (told.update(exchange.planned()), end())
        trainer.fit(2)
        return told, RING.drain(4096).records

    letters = dict(zip(COMPUTED, "FBIW", strict=True))
    for rank, (told, data) in enumerate(together(2, planned)):
        assert actions.check(actions.parse(told), stages, 4)
        records = np.frombuffer(data, RECORD)
        mine = records[records["kind"] == Kind.PLANNED]
        assert set(mine["step"].tolist()) == {0}  # once in a group
        assert mine["ident"].tolist() == list(range(len(told[rank])))
        ordered = [unpacked(value) for value in mine["value"].tolist()]
        assert [str(action) for action, _ in ordered] == told[rank]
        assert {num_stages for _, num_stages in ordered} == {stages}
        for step in range(2):
            mine = records[(records["step"] == step) & np.isin(records["kind"], COMPUTED)]
            done = [f"{int(r['value'])}{letters[r['kind']]}{r['ident']}" for r in mine]
            assert merged(done) == merged(told[rank])


def merged(listed):
    """torch runs I and W as one B where they follow one another."""
    out = []
    for text in listed:
        if out and "W" in text and out[-1] == text.replace("W", "I"):
            out[-1] = text.replace("W", "B")
        else:
            out.append(text)
    return out


def test_sends_and_receives_are_told_with_their_bytes(together):
    """One of each for every micro-batch and direction."""

    def body(_):
        make(Pipeline(2, "1f1b", 4)).fit(1)
        return RING.drain(4096).records

    for data in together(2, body):
        records = np.frombuffer(data, RECORD)
        for kind in (Kind.SEND, Kind.RECEIVE):
            mine = records[records["kind"] == kind]
            assert mine["ident"].tolist() == [0, 1, 2, 3]
            assert (mine["value"] == BATCH // 4 * WIDTH * 4).all()


class Sleeping(nn.Module):
    """Takes its time, in both directions."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            time.sleep(FORWARD_S)
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            time.sleep(BACKWARD_S)
            return gradient.clone()

    def __init__(self, *_):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Sleeping.Function.apply(x * self.scale)


def idle_share(told, step):
    """Of all ranks together, from the first to the last that any of them computes."""
    spans = [np.frombuffer(data, RECORD) for data in told]
    spans = [r[(r["step"] == step) & np.isin(r["kind"], COMPUTED)] for r in spans]
    busy = sum(float((r["t1_ns"] - r["t0_ns"]).sum()) for r in spans)
    window = max(r["t1_ns"].max() for r in spans) - min(r["t0_ns"].min() for r in spans)
    return 1 - busy / (window * len(spans))


def test_the_bubble_is_that_of_the_formula(together):
    """Two ranks, four micro-batches, stages that sleep; a busy machine only adds to it, so the
    least of some steps counts."""

    def body(_):
        make(Pipeline(2, "1f1b", 4), Sleeping).fit(7)
        return RING.drain(4096).records

    told = together(2, body)
    expected = schedules.named("1f1b").idle_share(2, 1, 4)
    least = min(idle_share(told, step) for step in range(1, 7))
    assert least == pytest.approx(expected, abs=MAY_DIFFER)


def test_a_slow_rank_is_slow(together):
    """What it computes takes longer by the factor, and its compute time is told without it."""

    def body(rank):
        trainer = make(Pipeline(2, "1f1b", 4), Sleeping)
        passage = trainer._state.exchange._passage
        begin = passage.begin
        passage.begin = lambda key, _: begin(key, 3.0 if rank else 1.0)
        trainer.fit(2)
        records = np.frombuffer(RING.drain(4096).records, RECORD)
        mine = records[(records["step"] == 1) & (records["kind"] == Kind.FORWARD)]
        return float((mine["t1_ns"] - mine["t0_ns"]).min()) * 1e-9, trainer._state.compute_s

    (usual, one), (slow, other) = together(2, body)
    with_rest_s = 3 * 4 * (FORWARD_S + BACKWARD_S)
    assert usual < 2.9 * FORWARD_S <= slow
    assert max(one, other) < with_rest_s


def plan_of(name, ranks, num_microbatches):
    """torch's plan for so many ranks, made by one that stands for all."""
    facts = schedules.named(name)
    num_stages = ranks * (facts.per_rank or 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    held = make(Pipeline(num_stages, name, num_microbatches)).model
    passage = Passage(contextlib.nullcontext)
    made = torch_pipeline.make(
        held, name, num_microbatches, passage, device=torch.device("cpu"), loss=torch.add
    )
    return actions.idle_share(actions.parse(torch_pipeline.planned(made)), num_stages)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_formulas_are_what_torchs_plans_come_to(together, name):
    """A walk through the plan leaves idle what the formula says."""
    (share,) = together(1, lambda _: plan_of(name, 4, 16), has_group=False)
    per_rank = schedules.named(name).per_rank or 2
    assert share == pytest.approx(schedules.named(name).idle_share(4, per_rank, 16))
