"""What a strategy is said to cost is what it costs, as far as that can be counted beforehand."""

import dataclasses

import pytest
import torch
from torch import nn

import nbdist
from nbdist.train import (
    GPT,
    DataParallel,
    DiLoCo,
    GPTConfig,
    LocalSGD,
    ParameterServer,
    Pipeline,
    Sharded,
    TensorParallel,
    estimate,
)


def gpt():
    return GPT(GPTConfig(num_layers=4, num_heads=1, width=8, context=4))


def num_bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())


TOKENS = torch.zeros(1, 4, dtype=torch.int64)


def test_data_parallel_has_all_of_it_on_each_rank():
    """4, 4 and 8 bytes for each number with AdamW; a ring sends 2(n−1)/n of the gradients."""
    whole = num_bytes(gpt())
    for num_ranks in (1, 2, 4):
        made = nbdist.estimate(gpt, DataParallel(), num_ranks)
        assert len(made.ranks) == num_ranks
        for need in made.ranks:
            assert (need.parameters, need.gradients) == (whole, whole)
            steps = 4 * len(list(gpt().parameters()))  # a count for each parameter
            assert need.optimizer == 2 * whole + steps
            assert need.sent == round(2 * (num_ranks - 1) / num_ranks * whole)
            assert need.together == 2 * whole + need.optimizer


@pytest.mark.parametrize(
    ("compress", "share"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.2539), ("topk", 0.13125)]
)
def test_compressed_gradients_are_fewer_bytes(compress, share):
    """Of what is sent as it is."""
    plain, made = (estimate(gpt, DataParallel(compress=c), 2).ranks[0] for c in (None, compress))
    assert made.sent == pytest.approx(share * plain.sent, rel=1e-3)


def test_thin_products_are_counted_by_matrices():
    """r(a+b) numbers for one of a × b, where that is fewer; the rest as it is."""
    made = estimate(
        lambda: nn.Linear(30, 20), DataParallel(compress="powersgd", powersgd_rank=2), 2
    )
    assert made.ranks[0].sent == 4 * (2 * 50 + 20)


@pytest.mark.parametrize(
    ("strategy", "share", "num_kept"),
    [
        (LocalSGD(8), 1 / 8, 1),
        (DiLoCo(8), 1 / 8, 2),
        (DiLoCo(8, momentum=0, fragments=2, delay=1), 1 / 8, 1),
        (DiLoCo(8, compress="fp16"), 1 / 16, 2),
    ],
)
def test_ranks_that_train_apart_send_once_in_a_period(strategy, share, num_kept):
    """The parameters' bytes, in a ring; what is shared is kept beside the model."""
    whole = num_bytes(gpt())
    for num_ranks in (1, 2, 4):
        for need in estimate(gpt, strategy, num_ranks).ranks:
            assert need.parameters == need.gradients == whole
            assert need.copies == num_kept * whole
            assert need.sent == round(2 * (num_ranks - 1) / num_ranks * whole * share)


@pytest.mark.parametrize(
    ("mode", "num_ranks", "sent"),
    [
        ("sync", 1, [0]),
        ("async", 2, [1, 1]),
        ("sync", 4, [3, 0, 1, 1]),
        ("async", 4, [2, 0, 1 / 2, 1 / 2]),
    ],
)
def test_a_server_alone_has_the_optimizer(mode, num_ranks, sent):
    """It and its replica; it sends the model for each push, and each update to the replica."""
    whole = num_bytes(gpt())
    needs = estimate(gpt, ParameterServer(mode), num_ranks).ranks
    assert [need.sent for need in needs] == [round(share * whole) for share in sent]
    holds = [need.optimizer > 2 * whole for need in needs]
    assert holds == [True, num_ranks > 2, False, False][:num_ranks]
    assert all(need.parameters == need.gradients == whole for need in needs)


def test_shards_are_all_of_it_together():
    """Each number is on one rank; rows are filled up for what is sent, but not for what is kept."""
    whole = num_bytes(gpt())
    for num_ranks in (1, 2, 3):
        made = estimate(gpt, Sharded(copy_every=0), num_ranks)
        assert sum(need.parameters for need in made.ranks) == whole
        assert sum(need.gradients for need in made.ranks) == whole
        sent = made.ranks[0].sent
        assert 3 * (num_ranks - 1) / num_ranks * whole <= sent <= 4 * whole * (num_ranks - 1)
        assert estimate(gpt, Sharded(), num_ranks, accumulate=3).ranks[0].sent == 3 * sent
    two = estimate(gpt, Sharded(copy_every=0), 2).ranks[0]
    assert two.sent == 3 * whole // 2  # every number of rows is even


def test_copies_are_counted():
    """Two of a rank's own state, and two of the state of the rank before it."""
    first, second = estimate(gpt, Sharded(), 2).ranks
    both = sum(need.parameters + need.optimizer for need in (first, second))
    assert first.copies == second.copies == 2 * both
    assert estimate(gpt, Sharded(copy_every=0), 2).ranks[0].copies == 0


def test_a_pipeline_has_its_stages():
    """And sends what stands between them, forward and back; its bubble is its formula's."""
    made = estimate(gpt, Pipeline(4, "1f1b", 8, copy_every=0), 4, sample=TOKENS, global_batch=16)
    assert sum(need.parameters for need in made.ranks) == num_bytes(gpt())
    stream = 16 * 4 * 8 * 4  # samples, tokens, width, bytes of a number
    assert [need.sent for need in made.ranks] == [stream, 2 * stream, 2 * stream, stream]
    assert made.idle_share == pytest.approx(3 / 11)
    assert "idle 27% of a step" in repr(made)
    blocks = gpt().pipeline_blocks()
    named = estimate(gpt, Pipeline(2, "1f1b", 4, split=[1, len(blocks) - 1]), 2)
    assert named.ranks[0].parameters == num_bytes(blocks[0])
    assert named.ranks[0].sent is None
    assert "?" in repr(named)


def test_panels_are_a_part_of_what_is_cut():
    """And the rest is whole; what is sent are the sums in each block, two forward and two back."""

    def heads():
        return GPT(GPTConfig(num_layers=4, num_heads=4, width=8, context=4))

    blocks = heads().blocks
    cut = sum(num_bytes(block.attention) + num_bytes(block.mlp) for block in blocks)
    cut -= sum(b.attention.onto_stream.bias.nbytes + b.mlp.onto_stream.bias.nbytes for b in blocks)
    stream = 16 * 4 * 8 * 4  # samples, tokens, width, bytes of a number
    for num_ranks in (1, 2, 4):
        made = estimate(heads, TensorParallel(), num_ranks, sample=TOKENS, global_batch=16)
        need = made.ranks[0]
        assert made.ranks == (need,) * num_ranks
        assert need.parameters == num_bytes(heads()) - cut + cut // num_ranks
        assert need.gradients == need.parameters
        assert need.sent == 2 * (num_ranks - 1) * 4 * 4 * stream // num_ranks
    assert estimate(heads, TensorParallel(), 2).ranks[0].sent is None
    with pytest.raises(ValueError, match="num_heads=4, which 3 ranks cannot share"):
        estimate(heads, TensorParallel(), 3)


def test_what_is_asked_for_cannot_be_counted():
    """The message says what is missing."""
    with pytest.raises(ValueError, match="give sample="):
        estimate(gpt, Pipeline(2, "1f1b", 4), 2)
    with pytest.raises(TypeError, match="known of DataParallel, LocalSGD, DiLoCo"):
        estimate(gpt, "fsdp", 2)
    with pytest.raises(TypeError, match="model is 3; it must be a Module or a function"):
        estimate(3, Sharded(), 2)
    with pytest.raises(ValueError, match="devices is 0"):
        estimate(gpt, devices=0)


def test_frozen_weights_need_no_gradient():
    """Nor a state of the optimizer; a module that is made already may be given too."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    made = estimate(module, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
    (need,) = made.ranks
    assert need.gradients == need.optimizer == num_bytes(module[1])
    assert need.parameters == num_bytes(module)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.idle_share = 0.0


def test_it_prints_as_a_table():
    """Ranks that need the same are one row."""
    lines = repr(estimate(gpt, Sharded(), 4)).splitlines()
    assert lines[0].startswith("Sharded(")
    assert lines[1].split()[:4] == ["MB", "on", "rank", "parameters"]
    assert [line.split()[0] for line in lines[2:]] == ["0-3"]
