"""A model whose group has another size is cut anew, and trains on from what is known of all."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from little import mostly_slow
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from nbdist.errors import RecoveryFailed
from nbdist.train import (
    GPT,
    DataParallel,
    GPTConfig,
    Mesh,
    Pipeline,
    Sharded,
    TensorParallel,
    Trainer,
    next_token_loss,
)

FEATURES, CLASSES, WIDTH = 12, 5, 24
GROUP_TIMEOUT = timedelta(seconds=20)


def build():
    """Six blocks, one of which keeps statistics, and four of which draw random numbers."""
    layers = [nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def numbers():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (96,), generator=generator))


def text():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 256, (96, 17), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def make(strategy, **changes):
    usual = {
        "model": build,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
        "loss": functional.cross_entropy,
        "data": numbers(),
        "global_batch": 48,
        "clip_norm": 0.5,
    }
    return Trainer(strategy=strategy, **usual | changes)


def gpt(strategy):
    config = GPTConfig(num_layers=3, num_heads=2, width=32, context=16, tied=True)
    return make(strategy, model=lambda: GPT(config), data=text(), loss=next_token_loss)


class Rank:
    """A process that is in one group after the other."""

    def __init__(self, number, folder, make_trainer):
        self.number, self.folder, self._make = number, folder, make_trainer
        self.trainer = None

    def form(self, place, members):
        """Leave the present group, and be in this one; whether this process is in it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.number in members and len(members) > 1:
            dist.init_process_group(
                "gloo",
                f"file://{self.folder}/group-{place}",
                rank=members.index(self.number),
                world_size=len(members),
                timeout=GROUP_TIMEOUT,
            )
        return self.number in members

    def train(self, until):
        """Until so many steps are committed; a newcomer makes its trainer first."""
        self.trainer = self.trainer or self._make()
        self.trainer.fit(until - self.trainer.step)

    def outcome(self):
        """Step -> loss as it was trained last, and how many steps were trained more than once."""
        if self.trainer is None:
            return {}, 0
        history = self.trainer.history
        losses = dict(zip(history["step"].tolist(), history["loss"].tolist(), strict=True))
        return losses, len(history["step"]) - len(losses)


@pytest.fixture
def follow(together, tmp_path):
    """`follow(script, make)`: what becomes of each process; script: members, and until when."""

    def play(script, make_trainer):
        def body(number):
            rank = Rank(number, tmp_path, make_trainer)
            for place, (members, until) in enumerate(script):
                if rank.form(place, members):
                    rank.train(until)
            return rank.outcome()

        return together(max(max(m) for m, _ in script) + 1, body, has_group=False)

    return play


CASES = {
    "a stage is lost": ("1f1b", 1, [((0, 1, 2, 3), 8), ((0, 1, 3), 14)], 2),
    "the first is lost": ("1f1b", 1, [((0, 1, 2), 8), ((1, 2), 14)], 2),
    "the last is lost": ("gpipe", 1, [((0, 1, 2), 8), ((0, 1), 14)], 2),
    "one is left": ("1f1b", 1, [((0, 1), 8), ((1,), 14)], 2),
    "some join": ("1f1b", 1, [((0, 1), 8), ((0, 1, 2), 14)], 0),
    "one is not alone any more": ("1f1b", 1, [((0,), 8), ((0, 1), 14)], 0),
    "two on each": ("interleaved", 2, [((0, 1, 2), 8), ((0, 2), 14)], 2),
    "a V": ("zbv", 2, [((0, 1, 2), 8), ((0, 1), 14)], 2),
    "back again": ("1f1b", 1, [((0, 1, 2), 8), ((0, 1), 12), ((0, 1, 2), 18)], 2),
    "nobody has trained": ("1f1b", 1, [((0, 1, 2), 0), ((0, 1), 8)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_is_cut_anew_for_those_that_are_there(follow, together, case):
    """The curve is that of a group that stayed as it was, bit for bit; copies of every third step
    say what is trained again."""
    schedule, per_rank, script, num_again = CASES[case]
    num_steps, num_ranks = script[-1][1], len(script[0][0])

    def trainer():
        num = dist.get_world_size() if dist.is_initialized() else 1
        return make(Pipeline(per_rank * num, schedule, 8, copy_every=3))

    def undisturbed(_):
        one = trainer()
        return one.fit(num_steps)["loss"].tolist()

    expected = together(num_ranks, undisturbed)[0]
    outcomes = follow(script, trainer)
    for number in script[-1][0]:
        losses, again = outcomes[number]
        assert losses == {step: expected[step] for step in losses}
        assert set(losses) >= set(range(script[-2][1], num_steps))
        if all(number in members for members, _ in script):
            assert len(losses) == num_steps
            assert again == num_again


def test_a_weight_at_both_ends_stays_one(follow, together):
    """It moves with the ends, and with what the optimizer keeps of it."""

    def undisturbed(_):
        return gpt(Pipeline(3, "1f1b", 8, copy_every=3)).fit(12)["loss"].tolist()

    expected = together(3, undisturbed)[0]
    script = [((0, 1, 2), 7), ((0, 2), 12)]
    outcomes = follow(script, lambda: gpt(Pipeline(3, "1f1b", 8, copy_every=3)))
    assert outcomes[0][0] == outcomes[2][0] == dict(enumerate(expected))


def check_curves(outcomes, script, expected):
    """Who is in the last group has trained its steps, and all steps as one process does."""
    for number in script[-1][0]:
        losses, _ = outcomes[number]
        assert set(losses) >= set(range(script[-2][1], script[-1][1]))
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)


ROWS = {
    "one of four is lost": [((0, 1, 2, 3), 8), ((0, 1, 3), 14)],
    "one is left": [((0, 1), 8), ((1,), 14)],
    "some join": [((0, 1), 8), ((0, 1, 2), 14)],
    "one is not alone any more": [((0,), 8), ((0, 1), 14)],
    "back again": [((0, 1, 2), 8), ((0, 2), 12), ((0, 1, 2), 18)],
    "nobody has trained": [((0, 1, 2), 0), ((0, 1), 8)],
}


def rows(copy_every=3):
    return gpt(Sharded(copy_every=copy_every))


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_cut_anew_for_those_that_are_there(follow, together, case):
    """The curve is that of one process, with what the optimizer keeps of each row."""
    script = ROWS[case]
    expected = together(1, lambda _: gpt(DataParallel()).fit(script[-1][1])["loss"].tolist())[0]
    outcomes = follow(script, rows)
    check_curves(outcomes, script, expected)


PANELS = {
    "two of four are lost": [((0, 1, 2, 3), 8), ((0, 2), 14)],
    "one is left": [((0, 1), 8), ((1,), 14)],
    "some join": [((0, 1), 8), ((0, 1, 2, 3), 14)],
    "back again": [((0, 1, 2, 3), 8), ((0, 2), 12), ((0, 1, 2, 3), 18)],
    "nobody has trained": [((0, 1, 2, 3), 0), ((0, 1), 8)],
}


def panels(strategy=None):
    config = GPTConfig(num_layers=2, num_heads=4, width=32, context=16, tied=True)
    strategy = strategy or TensorParallel(copy_every=3)
    return make(strategy, model=lambda: GPT(config), data=text(), loss=next_token_loss)


@pytest.mark.parametrize("case", mostly_slow(PANELS, "two of four are lost"))
def test_panels_are_cut_anew_where_heads_divide(follow, together, case):
    """The curve is that of one process, with what the optimizer keeps of each panel."""
    script = PANELS[case]
    expected = together(1, lambda _: panels(DataParallel()).fit(script[-1][1])["loss"].tolist())[0]
    outcomes = follow(script, panels)
    check_curves(outcomes, script, expected)


OWN = {rank: [f"{rank}{kind}{i}" for kind in "FB" for i in range(3)] for rank in range(3)}


def test_heads_that_three_cannot_share_end_the_run(together, tmp_path):
    """With a sentence, on each rank that is left."""

    def body(number):
        rank = Rank(number, tmp_path, panels)
        assert rank.form(0, (0, 1, 2, 3))
        rank.train(4)
        if rank.form(1, (0, 1, 3)):
            with pytest.raises(
                RecoveryFailed, match=r"3 ranks that the group has now: num_heads=4"
            ):
                rank.train(8)
        return True

    assert all(together(4, body, has_group=False))


TWINS = {
    "one comes from its twin": ([((0, 1, 2, 3), 8), ((0, 1, 2, 4), 14)], 0),
    "the first two change places": ([((0, 1, 2, 3), 8), ((4, 1, 2, 5), 14)], 0),
    "both twins are lost": ([((0, 1, 2, 3), 8), ((0, 4, 2, 5), 14)], 2),
    "one model is left": ([((0, 1, 2, 3), 8), ((0, 1), 14)], 0),
    "its parts are of two": ([((0, 1, 2, 3), 8), ((1, 2), 14)], 0),
    "one rank is left": ([((0, 1, 2, 3), 8), ((2,), 14)], 2),
    "another model joins": ([((0, 1), 8), ((0, 1, 2, 3), 14)], 0),
}


@pytest.mark.parametrize(
    "case",
    mostly_slow(TWINS, "one comes from its twin", "both twins are lost", "its parts are of two"),
)
def test_a_stage_comes_from_its_twin(follow, together, case):
    """No step is done again where each stage is somewhere; the curve is that of one process."""
    script, num_again = TWINS[case]
    num_steps = script[-1][1]
    expected = together(1, lambda _: gpt(DataParallel()).fit(num_steps)["loss"].tolist())[0]
    strategy = Mesh(pipeline=Pipeline(2, "1f1b", 4, copy_every=3), data=DataParallel())
    outcomes = follow(script, lambda: gpt(strategy))
    check_curves(outcomes, script, expected)
    for number in script[-1][0]:
        losses, again = outcomes[number]
        if all(number in members for members, _ in script):
            assert (len(losses), again) == (num_steps, num_again)


def test_panels_come_from_their_twins(follow, together):
    """Without any copies, and exactly."""
    strategy = Mesh(tensor=2, data=2)
    expected = together(4, lambda _: panels(strategy).fit(14)["loss"].tolist())[0]
    bare = Mesh(tensor=TensorParallel(copy_every=0), data=2)
    outcomes = follow([((0, 1, 2, 3), 8), ((4, 1, 2, 5), 14)], lambda: panels(bare))
    assert outcomes[1] == outcomes[2] == (dict(enumerate(expected)), 0)


PIECED = {
    "one is lost": ([((0, 1, 2, 3), 8), ((0, 1, 2, 4), 14)], 2),
    "two are left": ([((0, 1, 2, 3), 8), ((0, 1), 14)], 2),
    "one is left": ([((0, 1), 8), ((1,), 14)], 2),
    "two join": ([((0, 1), 8), ((0, 1, 2, 3), 14)], 0),
    "back again": ([((0, 1, 2, 3), 8), ((0, 1), 12), ((0, 1, 2, 3), 18)], 2),
    "nobody has trained": ([((0, 1, 2, 3), 0), ((0, 1), 8)], 0),
}
ONE_OF = Pipeline(2, "1f1b", 4, copy_every=3)
DIVIDED = {
    "by panels, which give way": Mesh(pipeline=ONE_OF, tensor=TensorParallel()),
    "by rows": Mesh(pipeline=ONE_OF, data=Sharded()),
    "by panels": Mesh(pipeline=Pipeline(2, "looped-bfs", 4, copy_every=3), tensor=2),
}


@pytest.mark.parametrize(
    ("how", "case"),
    mostly_slow(
        list(itertools.product(DIVIDED, PIECED)),
        ("by rows", "back again"),
    ),
)
def test_stages_that_are_divided_are_cut_anew(follow, together, how, case):
    """All go back to the newest copies; the curve is that of one process."""
    script, num_again = PIECED[case]
    expected = together(1, lambda _: panels(DataParallel()).fit(script[-1][1])["loss"].tolist())[0]
    outcomes = follow(script, lambda: panels(DIVIDED[how]))
    check_curves(outcomes, script, expected)
    for number in script[-1][0]:
        if all(number in members for members, _ in script):
            assert outcomes[number][1] == num_again


@pytest.mark.parametrize(
    "strategy",
    mostly_slow(
        [Mesh(pipeline=2, data=2), Mesh(pipeline=2, tensor=2), Mesh(pipeline=2, data=Sharded())],
        Mesh(pipeline=2, data=2),
    ),
    ids=repr,
)
def test_three_of_a_mesh_of_four_say_how_many_there_must_be(together, tmp_path, strategy):
    """On each of them, and none trains on."""

    def body(number):
        rank = Rank(number, tmp_path, lambda: gpt(strategy))
        assert rank.form(0, (0, 1, 2, 3))
        rank.train(2)
        if rank.form(1, (0, 1, 2)):
            with pytest.raises(RecoveryFailed, match=r"3 ranks now, and there must be a multiple"):
                rank.train(4)
            dist.barrier()  # else one might be gone before the others have formed the group
        return True

    assert all(together(4, body, has_group=False))


@pytest.mark.parametrize(
    ("script", "strategy", "words"),
    [
        (
            [((0, 1, 2, 3), 4), ((0, 1), 8)],
            lambda: Pipeline(4, "1f1b", 8, copy_every=3),
            r"stages \[2, 3\] were lost with the weights of step 4: ranks 2, 3 of 4 had them",
        ),
        (
            [((0, 1, 2), 4), ((0, 2), 8)],
            lambda: Pipeline(3, "1f1b", 8, copy_every=0),
            r"stages \[1\] were lost .* nobody keeps copies, since copy_every is 0",
        ),
        (
            [((0, 1, 2), 4), ((0, 2), 8)],
            lambda: Pipeline(3, OWN, 3, copy_every=3),
            "cannot be cut anew for the 2 ranks .* schedule",
        ),
        (
            [((0, 1, 2, 3), 4), ((0, 1), 8)],
            lambda: Sharded(copy_every=3),
            r"rows of ranks 2, 3 of 4 were lost with the weights of step 4",
        ),
    ],
)
def test_what_cannot_go_on_says_why(together, tmp_path, script, strategy, words):
    """On every rank that is left, at once, and nobody trains with other weights."""

    def body(number):
        rank = Rank(number, tmp_path, lambda: make(strategy()))
        (first, until), (second, more) = script
        assert rank.form(0, first)
        rank.train(until)
        if rank.form(1, second):
            with pytest.raises(RecoveryFailed, match=words):
                rank.train(more)
        return True

    assert all(together(len(script[0][0]), body, has_group=False))
