"""Codecs, over ranks that are simulated: what is sent, what is left, what never differs."""

import math

import pytest
import torch
from parcels import CODECS, FEEDBACK, attempt, settle
from torch import nn

from nbdist.train.compression.lowrank import orthonormal, product
from nbdist.train.compression.quantise import BLOCK, decode, encode
from nbdist.train.compression.residual import Residual


@pytest.fixture(autouse=True)
def one_thread():
    """The numbers here are few: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = ((24, 40), (40,), (16, 4, 10))
NUM = sum(math.prod(shape) for shape in SHAPES)


def made(num_ranks, seed=1):
    """Parameters and gradients of so many ranks."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [[nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(num_ranks)]
    return parameters, [torch.randn(NUM, generator=generator) for _ in range(num_ranks)]


def far(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_have_the_same_bits(name, num_ranks):
    """And near the sum, as far as the codec goes; what is left makes up the rest."""
    parameters, gradients = made(num_ranks)
    codecs = [CODECS[name]() for _ in range(num_ranks)]
    parcels = attempt(codecs, parameters, gradients)
    first, expected = parcels[0].result[0], sum(gradients)
    assert all(torch.equal(parcel.result[0], first) for parcel in parcels)
    assert all(parcel.result[2] for parcel in parcels)
    assert far(first, expected) < {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}.get(name, 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_the_vote_is_exact(name, num_ranks):
    """Numbers that no 16 bits hold come through as they are."""
    parameters, gradients = made(num_ranks)
    votes = [torch.tensor([1e6 + 1, 1e-7, 3.0]) * (rank + 1) for rank in range(num_ranks)]
    codecs = [CODECS[name]() for _ in range(num_ranks)]
    for parcel in attempt(codecs, parameters, gradients, votes):
        assert torch.equal(parcel.result[1], sum(votes))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("name", "share"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.254), ("topk", 0.325 / 4)]
)
def test_the_payload_is_what_the_formula_says(name, share, num_ranks):
    """Of four bytes a number."""
    num = 24 * BLOCK
    parameters = [[nn.Parameter(torch.zeros(num))] for _ in range(num_ranks)]
    gradients = [torch.randn(num) for _ in range(num_ranks)]
    codecs = [CODECS[name]() for _ in range(num_ranks)]
    for parcel in attempt(codecs, parameters, gradients):
        assert parcel.payload_bytes / (4 * num) == pytest.approx(share, rel=1e-3)


def test_the_payload_of_a_product():
    """4r(n + m) bytes for a matrix, and a vector as it is."""
    (parcel,) = attempt([CODECS["powersgd"]()], *made(1))
    assert parcel.payload_bytes == 4 * (2 * (24 + 40) + 40 + 2 * (16 + 40))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", FEEDBACK)
def test_what_is_left_is_what_was_not_sent(name, num_ranks):
    """Sent and left are the sum of all gradients, whatever was lost on the way of each step."""
    parameters, _ = made(num_ranks)
    codecs = [CODECS[name]() for _ in range(num_ranks)]
    sent, wanted = torch.zeros(NUM), torch.zeros(NUM)
    for step in range(12):
        gradients = made(num_ranks, seed=step)[1]
        sent += attempt(codecs, parameters, gradients)[0].result[0]
        wanted += sum(gradients)
        settle(codecs)
    left = torch.zeros(NUM)
    for codec, mine in zip(codecs, parameters, strict=True):
        codec.residual.add_to(left, mine)
    assert far(sent + left, wanted) < 1e-5
    assert far(sent, wanted) > 1e-4


def mean_errors(name, num_ranks, num_steps):
    """How far the mean of what was sent is from a gradient that stays the same, step by step."""
    parameters, gradients = made(num_ranks)
    codecs = [CODECS[name]() for _ in range(num_ranks)]
    sent, errors = torch.zeros(NUM, dtype=torch.float64), []
    for step in range(num_steps):
        sent += attempt(codecs, parameters, gradients)[0].result[0]
        settle(codecs)
        errors.append(far(sent / (step + 1), sum(gradients).double()))
    return errors


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_error_of_the_mean_falls_as_one_by_the_steps(num_ranks):
    """With int8, twenty steps have 1.2/20 of the first one's error at most."""
    errors = mean_errors("int8", num_ranks, 20)
    assert errors[-1] <= 1.2 / 20 * errors[0]


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_the_error_of_the_mean_falls_with_coarse_codecs(name):
    """They need some steps to have sent everything once; from then on it falls likewise."""
    errors = mean_errors(name, 2, 80)
    assert errors[79] <= 1.2 * 20 / 80 * errors[19]
    assert errors[79] < 0.1


@pytest.mark.parametrize("name", FEEDBACK)
def test_an_attempt_that_is_repeated_counts_once(name):
    """And so does one that was skipped: its gradient is dropped, what was left before is not."""
    parameters, gradients = made(2)
    codecs, others = ([CODECS[name]() for _ in range(2)] for _ in range(2))
    for step in range(3):
        gradients = made(2, seed=step)[1]
        if step == 1:
            attempt(others, parameters, made(2, seed=77)[1])  # breaks
            attempt(others, parameters, made(2, seed=78)[1])
            settle(others, is_applied=False)  # skipped
        result = attempt(codecs, parameters, gradients)[0].result[0]
        its = attempt(others, parameters, gradients)[0].result[0]
        settle(codecs)
        settle(others)
    if name == "powersgd":  # its bases have moved on: other losses, of the same size
        assert [c.residual.total() for c in codecs] == pytest.approx(
            [c.residual.total() for c in others], rel=0.3
        )
    else:
        assert torch.equal(result, its)
        assert [c.residual.total() for c in codecs] == [c.residual.total() for c in others]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_a_gradient_that_is_not_finite_is_seen_by_all(name, value):
    """Wherever it is, on one rank; what was left before is as it was."""
    parameters, gradients = made(3)
    codecs = [CODECS[name]() for _ in range(3)]
    attempt(codecs, parameters, gradients)
    settle(codecs)
    before = [codec.residual.total() for codec in codecs]
    for place in (0, 970, NUM - 1):
        poisoned = [gradient.clone() for gradient in gradients]
        poisoned[1][place] = value
        for parcel in attempt(codecs, parameters, poisoned):
            assert not parcel.result[2]
        settle(codecs, is_applied=False)
    assert [codec.residual.total() for codec in codecs] == before
    assert attempt(codecs, parameters, gradients)[0].result[2]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num", [1, BLOCK - 1, BLOCK + 1])
def test_odd_lengths(name, num):
    """A number alone, and blocks and pieces that are not full."""
    parameters = [[nn.Parameter(torch.zeros(num))] for _ in range(3)]
    codecs = [CODECS[name]() for _ in range(3)]
    for parcel in attempt(codecs, parameters, [torch.ones(num)] * 3):
        assert parcel.result[0].sum() == pytest.approx(
            3 * (math.ceil(num * 0.1) if name == "topk" else num)
        )


def test_a_newcomer_among_others():
    """It has no residual, and a basis of its own; all have the same bits, and it catches up."""
    parameters, gradients = made(3)
    codecs = [CODECS["powersgd"]() for _ in range(3)]
    for _ in range(5):
        attempt(codecs, parameters, gradients)
        settle(codecs)
    codecs[1] = CODECS["powersgd"]()
    results = [parcel.result[0] for parcel in attempt(codecs, parameters, gradients)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert far(results[0], sum(gradients)) < 5


# ---- int8


def test_codes_are_off_by_half_a_step_at_most():
    """Of their own block's scale; a block of zeros stays zero, and one of next to nothing is so."""
    rows = torch.randn(2, 4 * BLOCK) * torch.tensor([1e-6, 1e6])[:, None]
    rows[0, :BLOCK] = 0
    rows[1, :BLOCK] = 1e-35
    coded = encode(rows)
    off = (decode(coded) - rows).abs().view(2, 4, BLOCK).amax(2)
    assert (off <= coded.scales * 0.5001 + 1e-34).all()
    assert (decode(coded)[:, :BLOCK] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_that_is_not_finite_stays_so(value):
    """All of it; the blocks beside it do not."""
    rows = torch.ones(1, 2 * BLOCK)
    rows[0, 7] = value
    back = decode(encode(rows))
    assert not back[0, :BLOCK].isfinite().any()
    assert (back[0, BLOCK:] == 1).all()


# ---- products


def test_columns_become_orthonormal():
    """Those that depend on others are left out, whatever their size."""
    columns = torch.randn(37, 5) * torch.tensor([1.0, 1e-12, 1e12, 1.0, 0.0])
    columns[:, 3] = columns[:, 0] * 2
    done = orthonormal(columns)
    assert done.T @ done == pytest.approx(torch.diag(torch.tensor([1.0, 1, 1, 0, 0])), abs=1e-6)


def test_what_ranks_must_share_does_not_depend_on_threads_or_places():
    """The same bits with one thread and with more, and wherever in memory the numbers lie."""
    columns, q = torch.randn(20_001, 4), torch.randn(33, 4)
    moved = torch.empty(columns.numel() + 3)[3:].view(columns.shape).copy_(columns)
    results = []
    for threads, its in ((1, columns), (3, moved)):
        torch.set_num_threads(threads)
        p = orthonormal(its)
        results.append((p, product(p, q)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert far(results[0][1], results[0][0] @ q.T) < 1e-6


# ---- the residual


def test_a_residual_counts_when_its_step_is_committed():
    """Not before; it grows and shrinks with the gradient's scale, and is forgotten as a whole."""
    residual, parameters = Residual(), [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    residual.note(torch.tensor([3.0, 0.0, 4.0]), parameters)
    assert residual.total() == 0
    residual.settle(is_applied=True, factor=0.5)
    assert residual.total() == 2.5
    flat = torch.ones(3)
    residual.add_to(flat, parameters)
    assert flat.tolist() == [2.5, 1.0, 3.0]
    residual.note(torch.tensor([9.0]), parameters[1:])
    residual.begin()
    residual.settle(is_applied=True, factor=1.0)
    residual.note(torch.tensor([9.0]), parameters[1:])
    residual.settle(is_applied=False, factor=2.0)
    assert residual.total() == 5
    residual.forget()
    assert residual.total() == 0


def test_alone_a_rank_sends_all_to_itself():
    """What was left is in its gradient once; a parameter without one keeps what is left of it."""
    residual, parameters = Residual(), [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    residual.note(torch.tensor([3.0, 0.0, 4.0]), parameters)
    residual.settle(is_applied=True, factor=1.0)
    parameters[0].grad = torch.ones(2)
    residual.flush(parameters)
    assert parameters[0].grad.tolist() == [4.0, 1.0]
    assert residual.total() == 5  # not committed yet
    residual.settle(is_applied=True, factor=1.0)
    assert residual.total() == 4
