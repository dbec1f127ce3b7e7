"""What is told of payloads is the formula sheet, and the wire carries what follows from them."""

import pytest
import torch
from counted import num_sent, payloads, taken
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op, Road
from nbdist.train import (
    DataParallel,
    DiLoCo,
    LocalSGD,
    Mesh,
    ParameterServer,
    Pipeline,
    Sharded,
    TensorParallel,
    Trainer,
    estimate,
)

WIDTH, DEPTH, BATCH, NUM = 256, 6, 192, 3
NUM_VOTE_BYTES = 3 * 2 * 4
"""Of data parallelism: three numbers, as two of float32 each, with the gradients."""


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def make(strategy, **changes):
    return Trainer(
        model=build,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        loss=functional.mse_loss,
        data=TensorDataset(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)),
        global_batch=BATCH,
        strategy=strategy,
        **changes,
    )


def told(together, strategy, num=NUM, **changes):
    """What each of so many ranks handed over in its fourth step."""

    def body(_):
        make(strategy, **changes).fit(4)
        return payloads(since=3)[3]

    return together(num, body)


def of(strategy, num=NUM, **changes):
    sample = torch.ones(1, WIDTH)
    asked = {"global_batch": BATCH, "sample": sample} | changes
    return estimate(build, strategy, num, **asked).ranks


PANELS = TensorParallel(
    {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(),
        "3": ColwiseParallel(),
        "4": RowwiseParallel(),
    },
    copy_every=0,
)
STAGES = Pipeline(2, "1f1b", 4, split=[3, 3], copy_every=0)
SUM, SEND = Op.ALL_REDUCE, Road(Op.SEND, Axis.PIPELINE, 2)
PAIRED = {
    "panels": (2, PANELS, {Road(SUM, Axis.TENSOR, 2)}),
    "stages and replicas": (
        4,
        Mesh(pipeline=STAGES, data=2),
        {SEND, Road(SUM, Axis.DATA, 2)},
    ),
    "panels and replicas": (
        4,
        Mesh(tensor=PANELS, data=2),
        {Road(SUM, Axis.TENSOR, 2), Road(SUM, Axis.DATA, 2)},
    ),
    "stages of panels": (
        4,
        Mesh(pipeline=STAGES, tensor=TensorParallel(PANELS.plan)),
        {SEND, Road(SUM, Axis.TENSOR, 2)},
    ),
    "stages of rows": (
        4,
        Mesh(pipeline=STAGES, data=Sharded()),
        {
            SEND,
            Road(SUM, Axis.DATA, 2),
            Road(Op.ALL_GATHER, Axis.DATA, 2),
            Road(Op.REDUCE_SCATTER, Axis.DATA, 2),
        },
    ),
}
"""Ranks, strategy, and which ways there are beside votes."""


@pytest.mark.parametrize("case", PAIRED)
def test_parts_in_one_or_two_directions_hand_over_what_was_estimated(together, case):
    """And beside it a number for each parameter, by which ranks tell whether they need it, and the
    vote."""
    num, strategy, roads = PAIRED[case]
    flags = Road(SUM, Axis.DATA, 2)
    num_flags = {"panels and replicas": 2 * DEPTH}.get(case, DEPTH) * (flags in roads)
    needs = of(strategy, num)
    for need, its in zip(needs, told(together, strategy, num), strict=True):
        votes = {road: its.pop(road) for road in list(its) if road.axis is Axis.ALL}
        assert votes == {Road(SUM, Axis.ALL, num): 3 * 8}
        assert set(its) == roads
        sent = sum(road.sent_bytes(payload) for road, payload in its.items())
        assert sent == need.sent + flags.sent_bytes(4 * num_flags)


def test_data_parallel_hands_over_its_gradients(together):
    """Once, all bytes of them and the vote, whatever the number of batches."""
    strategy = DataParallel(bucket_mb=0.5)
    road = Road(Op.ALL_REDUCE, Axis.DATA, NUM)
    needs = of(strategy)
    for rank, roads in enumerate(told(together, strategy, accumulate=2)):
        assert roads == {road: needs[rank].gradients + NUM_VOTE_BYTES}
        sent = road.sent_bytes(roads[road] - NUM_VOTE_BYTES)
        assert round(sent) == needs[rank].sent


def test_sharded_gathers_twice_and_sums_once(together):
    """For each batch; of a gather the payload is a rank's own rows."""
    strategy = Sharded(copy_every=0)
    gather, scatter = (Road(op, Axis.DATA, NUM) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))
    needs = of(strategy, accumulate=2)
    for need, roads in zip(needs, told(together, strategy, accumulate=2), strict=True):
        (vote,) = (road for road in roads if road.axis is Axis.ALL)
        assert vote.op is Op.ALL_REDUCE
        assert roads.pop(vote) == 3 * 8
        assert set(roads) == {gather, scatter}
        assert roads[gather] * NUM == 2 * roads[scatter]
        assert sum(road.sent_bytes(payload) for road, payload in roads.items()) == need.sent


def test_a_pipeline_sends_what_stands_between_its_stages(together):
    """Each micro-batch once forward, and a gradient back."""
    strategy = Pipeline(NUM, "1f1b", 4, copy_every=0)
    road = Road(Op.SEND, Axis.PIPELINE, 2)
    for need, roads in zip(of(strategy), told(together, strategy), strict=True):
        assert roads[road] == need.sent
        assert [road.axis for road in roads if road.axis is not Axis.PIPELINE] == [Axis.ALL]


def test_copies_are_told_apart(together):
    """In the steps in which they are made; each rank sends its own state to the next one."""

    def body(_):
        make(Pipeline(NUM, "1f1b", 4, copy_every=2)).fit(4)
        return {step: road in roads for step, roads in payloads().items()}

    road = Road(Op.SEND, Axis.COPIES, 2)
    assert together(NUM, body) == [{step: step % 2 == 0 for step in range(5)}] * NUM


def test_ranks_that_train_apart_hand_over_parameters_once_in_a_period(together):
    """All of them, in one step of four."""

    def body(_):
        make(LocalSGD(4)).fit(8)
        road = Road(Op.ALL_REDUCE, Axis.DATA, NUM)
        return sum(roads.get(road, 0) for roads in payloads().values())

    whole = of(LocalSGD(4))[0].parameters
    assert together(NUM, body) == [2 * whole] * NUM


@pytest.mark.parametrize("compress", [None, "int8"])
def test_outer_gradients_are_what_the_estimate_says(together, compress):
    """On average over a period: 2Ψ/H, times (n−1)/n; or as many codes and scales."""
    strategy = DiLoCo(4, fragments=2, delay=1, compress=compress)

    def body(_):
        make(strategy).fit(8)
        return sum(
            road.sent_bytes(num)
            for step, roads in payloads().items()
            for road, num in roads.items()
            if road.axis is Axis.DATA and step > 0
        )

    for need, sent in zip(of(strategy), together(NUM, body), strict=True):
        assert round(sent / 8) == need.sent


def test_a_server_and_its_workers_send_the_model(together):
    """A worker its gradients, and gets parameters back; the server sends its replica the same."""

    def body(_):
        make(ParameterServer("sync")).fit(4)
        roads = [roads for step, roads in payloads().items() if step >= 1]
        road, copied = (Road(Op.SEND, axis, 2) for axis in (Axis.DATA, Axis.COPIES))
        return [sum(its.get(one, 0) for its in roads) for one in (road, copied)]

    whole = of(ParameterServer("sync"))[0].parameters
    server, replica, worker = together(NUM, body)
    for sent, copied in (server, worker[:1] + server[1:]):
        assert 2 * whole <= sent <= 5 * whole
        assert 2 * whole <= copied <= 5 * whole
    assert replica == [0, 0]


WIRED = {
    "replicas": (NUM, DataParallel()),
    "stages": (NUM, Pipeline(NUM, "1f1b", 4, copy_every=0)),
    "rows": (NUM, Sharded(copy_every=0)),
} | {case: (num, strategy) for case, (num, strategy, _) in PAIRED.items()}


@pytest.mark.parametrize("case", WIRED)
def test_the_wire_carries_what_follows(together, case):
    """By the kernel's count of what the group's sockets sent, within 3 %; no more, no less.

    As much is what each rank says that it has sent since the run began.
    """

    num, strategy = WIRED[case]

    def body(_):
        trainer = make(strategy)
        trainer.fit(1)
        sent = num_sent(lambda: trainer.fit(10))
        records = taken()
        said = records["value"][records["kind"] == Kind.SENT]
        roads = [r for s, r in payloads(records, since=1).items() if s < 11]
        told = sum(road.sent_bytes(n) for step in roads for road, n in step.items())
        return sent, told, said.tolist()

    found = together(num, body)
    for sent, told, said in found:
        assert sent == pytest.approx(told, rel=0.03), found
        assert said[-1] == pytest.approx(told, rel=0.03), found
        assert said[-11] == 0  # it began, and told so before the first of ten steps
