"""The benchmarks' own arithmetic: what is planned, judged and shown. No engines."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

import pytest

from nbdist.bench import __main__ as bench
from nbdist.bench import pipelines, rounds
from nbdist.bench.figures import (
    FIGURES,
    NOISE_LIMIT,
    Figure,
    Samples,
    Verdict,
    difference,
    evaluate,
    failed,
    judge,
)
from nbdist.bench.host import Host, cpu_model
from nbdist.bench.plan import DEFAULT_ROUNDS, Plan
from nbdist.bench.report import as_json, as_text, shown
from nbdist.cli import bench as command
from nbdist.cli.bench import BENCHMARKS
from nbdist.errors import StartFailed

PLAIN = Figure(benchmark="shutdown", label="it ends", value="end", unit="ms", bound=0.3)
RATIO = Figure(benchmark="start", label="ours / theirs", value="b", per="a", unit="×", bound=1.3)
HOST = Host(cpu="a CPU", num_cores=2, load=0.0, python="3.11.1", torch="2", ipyparallel="9")


def samples(**values):
    """Samples by name; `a` and `other_a` are the reference's two."""
    names = {"a": "a A", "other_a": "a A'"}
    out = Samples()
    for name, listed in values.items():
        for value in listed:
            out.add(names.get(name, name), value)
    return out


def row(figure, **values):
    (only,) = evaluate([figure], samples(**values))
    return only


# ---- verdicts


@pytest.mark.parametrize(
    ("value", "bound", "verdict"),
    [
        (0.3, 0.3, Verdict.HOLDS),
        (0.31, 0.3, Verdict.MISSED),
        (-1.0, 0.0, Verdict.HOLDS),
        (9.0, None, Verdict.NO_BOUND),
    ],
)
def test_judge(value, bound, verdict):
    """A value up to its bound holds; without a bound there is nothing to judge."""
    assert judge(value, bound) is verdict


def test_a_duration_is_judged_by_its_worst_value():
    """One value beyond the bound misses it, however good the others are."""
    judged = row(PLAIN, end=[0.1, 0.2, 0.1, 0.4])
    assert (judged.median, judged.worst, judged.num_values) == (pytest.approx(0.15), 0.4, 4)
    assert judged.verdict is Verdict.MISSED
    assert row(PLAIN, end=[0.1, 0.2]).verdict is Verdict.HOLDS
    assert row(replace(PLAIN, bound=None), end=[9.0]).verdict is Verdict.NO_BOUND


def test_a_ratio_is_judged_by_medians():
    """Both measurements of the reference count, and an outlier on either side does not."""
    judged = row(RATIO, a=[1.0, 1.0, 50.0], other_a=[1.0, 1.02, 1.0], b=[1.2, 1.2, 70.0])
    assert judged.median == pytest.approx(1.2)
    assert (judged.worst, judged.control) == (None, 0.0)
    assert judged.verdict is Verdict.HOLDS
    assert row(RATIO, a=[1.0], other_a=[1.0], b=[1.31]).verdict is Verdict.MISSED


@pytest.mark.parametrize(("a", "other_a"), [(1.0, 1.051), (1.051, 1.0)])
@pytest.mark.parametrize("b", [0.5, 9.0])
def test_a_ratio_is_void_where_its_reference_differs_from_itself(a, other_a, b):
    """Beyond 5 % in either direction nothing is judged, neither well nor badly."""
    judged = row(RATIO, a=[a], other_a=[other_a], b=[b])
    assert judged.control == pytest.approx(0.051)
    assert judged.verdict is Verdict.VOID
    assert not failed([judged])


def test_a_ratio_is_judged_up_to_the_limit():
    """Just within 5 % it counts."""
    judged = row(RATIO, a=[1.0], other_a=[1 + NOISE_LIMIT - 1e-9], b=[9.0])
    assert judged.verdict is Verdict.MISSED


def test_difference_is_of_medians_and_has_no_direction():
    """By what share the larger one exceeds the smaller one."""
    assert difference([1, 2, 99], [3, 3]) == difference([3, 3], [2]) == pytest.approx(0.5)


def test_the_reference_changes_its_name_each_time():
    """Neither A nor A' is always the one that was measured first: order is no difference."""
    out = Samples()
    for number in range(4):
        out.add_reference("a", 1.0, 2.0, number=number)
    assert out.of("a A") == [1.0, 2.0, 1.0, 2.0]
    assert out.of("a A'") == [2.0, 1.0, 2.0, 1.0]


def test_what_has_no_value_fails():
    """A figure that was asked for and not measured is not passed over in silence."""
    for figure, values in [
        (PLAIN, {}),
        (RATIO, {"a": [1.0], "other_a": [1.0]}),
        (RATIO, {"a": [1.0], "b": [1.0]}),
    ]:
        judged = row(figure, **values)
        assert judged.verdict is Verdict.NOT_MEASURED
        assert failed([judged])
    assert not failed([row(PLAIN, end=[0.1])])
    assert failed([row(PLAIN, end=[0.1]), row(PLAIN, end=[0.5])])


def test_a_part_that_did_not_take_place_is_no_value():
    """None is left out, 0 is not."""
    out = Samples()
    out.add("end", None)
    out.add("end", 0.0)
    assert out.of("end") == [0.0]
    assert out.of("other") == []


def test_a_median_is_judged_where_the_figure_says_so():
    """Then one value beyond the bound does not matter."""
    figure = replace(PLAIN, judged="median")
    assert row(figure, end=[0.1, 0.1, 9.0]).verdict is Verdict.HOLDS
    assert row(PLAIN, end=[0.1, 0.1, 9.0]).verdict is Verdict.MISSED


def test_figures_belong_to_benchmarks():
    """Every benchmark has a figure, every figure a benchmark, and no label comes twice."""
    assert {figure.benchmark for figure in FIGURES} == {*BENCHMARKS}
    assert len({figure.label for figure in FIGURES}) == len(FIGURES)


def test_bounds():
    """The promises, as they are written down."""
    bounds = {(f.value, f.judged): f.bound for f in FIGURES if f.bound is not None}
    medians = {value: bound for (value, judged), bound in bounds.items() if judged == "median"}
    assert medians == {"run lost": 0.15, "push": 0.268}
    assert {value: bound for (value, judged), bound in bounds.items() if judged == "worst"} == {
        "first cell": 3.0,
        "DDP": 0.1,
        "cell": 1.3,
        "push": 1 / 8,
        "loss 4 cell": 0.3,
        "loss 4 healthy": 1.5,
        "loss 8 cell": 0.3,
        "loss 8 healthy": 1.5,
        "raise": 1.0,
        "supervisor": 5.0,
        "shutdown": 10.0,
        "run step": 1 / 0.95,
        "local sum 1": 1 / 8,
        "local sum 25": 1 / 3,
        "shared lost": 1.25,
        "shared hung": 1.25,
        "seen step": 1 / 0.98,
        "pipeline 2 4 idle": 0.03,
        "pipeline 2 8 idle": 0.03,
        "pipeline 4 4 idle": 0.03,
        "pipeline 4 8 idle": 0.03,
        "interleaved step": 1 / 1.10,
        "pipeline copied": 1.03,
        "sharded copied": 1.03,
        "pipeline lost": 2.0,
        "sharded lost": 2.0,
        "async step": 1 / 0.9,
        "sync step": 1 / 0.95,
        "event": 1e-6,
        "run lost": 0.6,
        "run refilled": 1.5,
        "run joined": 0.2,
        "run hung": 0.3,
        "run scaled": 0.2,
    }


def test_what_a_rank_waits_is_held_against_the_formula():
    """Nothing is beyond it where a step takes as long as m + p - 1 micro-batches."""
    assert pipelines.idle_beyond(11 * 0.12, 4, 8) == pytest.approx(0.0)
    assert pipelines.idle_beyond(12 * 0.12, 4, 8) == pytest.approx(1 / 3 - 3 / 11)


# ---- plans


def test_the_default_plan():
    """300 pairs, and a kill of every rank: twelve of four, eight of eight."""
    plan = Plan.of(only=None, rounds=None, is_quick=False)
    every = range(plan.num_rounds)
    assert plan.only == BENCHMARKS
    assert plan.num_pairs * plan.num_rounds == 300
    assert [r for n in every for r in plan.victims(n, 4)] == [0, 1, 2, 3] * 3
    assert [r for n in every for r in plan.victims(n, 8)] == list(range(8))


def test_options_make_the_plan():
    """`--only` keeps the order of the report; `--rounds` stands over what `--quick` says."""
    plan = Plan.of(only=["loss", "start"], rounds=None, is_quick=True)
    assert plan.only == ("start", "loss")
    assert plan.num_rounds == 1
    assert plan.wants("loss", "memory")
    assert not plan.wants("memory")
    assert "start, loss; 1 round" in str(plan)
    assert Plan.of(only=None, rounds=2, is_quick=True).num_rounds == 2
    assert Plan.of(only=None, rounds=7, is_quick=False).num_rounds == 7
    assert Plan().num_rounds == DEFAULT_ROUNDS


# ---- the report


def test_shown():
    """Seconds and bytes are shown in the figure's unit, and nothing as a dash."""
    assert shown(0.0123, "ms") == "12.3"
    assert shown(1.234, "s") == "1.23"
    assert shown(50_000_000.0, "MB") == "50.0"
    assert shown(1.3, "×") == "1.30"
    assert shown(0.012, "%") == "1.2"
    assert shown(None, "s") == "–"


def test_table():
    """Each figure has a line with its verdict, and the end counts them."""
    values = samples(end=[0.1, 0.4], a=[1.0], other_a=[1.2], b=[1.1])
    text = as_text(evaluate([PLAIN, RATIO], values), ["round 2: TimeoutError: late"])
    header, plain, ratio, *rest = text.splitlines()
    assert " ".join(header.split()) == "figure unit median worst bound A/A n verdict"
    assert " ".join(plain.split()) == "it ends ms 250.0 400.0 300.0 – 2 MISSED"
    assert " ".join(ratio.split()) == "ours / theirs × 1.00 – 1.30 20.0% 1 void (noisy)"
    assert "FAILED: round 2: TimeoutError: late" in rest
    assert rest[-1] == "bounds: 0 hold; 1 missed; 1 not judged: A and A' differ by more than 5%"


def test_json_has_every_value():
    """What programs read: host, plan, rows, all samples, and it survives JSON."""
    values = samples(end=[0.1, 0.2])
    rows = evaluate([PLAIN, RATIO], values)
    record = json.loads(json.dumps(as_json(HOST, Plan(), rows, values, [])))
    assert record["host"]["cpu"] == "a CPU"
    assert record["plan"]["num_rounds"] == DEFAULT_ROUNDS
    assert record["samples"] == {"end": [0.1, 0.2]}
    assert [r["verdict"] for r in record["rows"]] == ["holds", "not_measured"]
    assert record["rows"][0]["figure"]["label"] == "it ends"


def test_cpu_model():
    """The first processor's name; where the file has none, the architecture."""
    assert cpu_model("processor : 0\nmodel name\t: A: 1 GHz\nmodel name\t: B\n") == "A: 1 GHz"
    assert cpu_model("Features : fp").endswith("(no model name)")


def test_host():
    """This machine is described in one line."""
    host = Host.this()
    assert host.num_cores >= 1
    assert f"{host.num_cores} cores" in str(host)
    assert f"torch {host.torch}" in str(host)


# ---- the command


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--only", "start", "loss"],
        ["--rounds", "3", "--quick", "--json", "out file.json"],
    ],
)
def test_nbdist_bench_passes_its_options_on(words):
    """`nbdist bench …` becomes `python -m nbdist.bench …`."""
    assert command.command(parse(*words))[1:] == ["-m", "nbdist.bench", *words]


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--rounds", "x"], ["--only", "nonsense"]])
def test_what_makes_no_sense_is_refused(words, capsys):
    """With what would make sense."""
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err


@pytest.fixture
def played(monkeypatch):
    """Stands in for the rounds: `played(values, failures)`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def stand_in(values, failures=()):
        def play(_plan, out, *, say):
            say("round 1 of 1")
            for name, listed in values.items():
                for value in listed:
                    out.add(name, value)
            return list(failures)

        monkeypatch.setattr(bench, "play", play)

    return stand_in


@pytest.mark.parametrize(
    ("seconds", "failures", "code"), [(1.0, [], 0), (11.0, [], 1), (1.0, ["round 2: late"], 1)]
)
def test_exit_code(played, seconds, failures, code, capsys, tmp_path):
    """1 where a bound is missed or a round failed; table and file are written either way."""
    played({"shutdown": [seconds]}, failures)
    file = tmp_path / "bench.json"
    assert bench.main(["--only", "shutdown", "--json", str(file)]) == code
    assert "shutdown, 4 engines" in capsys.readouterr().out
    assert json.loads(file.read_text())["samples"] == {"shutdown": [seconds]}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_round_that_fails_does_not_end_the_run(monkeypatch):
    """The next round is played, and what went wrong is told."""
    said = []

    def play_round(number, _plan, out):
        if number == 0:
            raise StartFailed("no engine came up")
        out.add("shutdown", 1.0)

    monkeypatch.setattr(rounds, "_play_round", play_round)
    out = Samples()
    failures = rounds.play(Plan(only=("shutdown",), num_rounds=2), out, say=said.append)
    assert failures == ["round 1: StartFailed: no engine came up"]
    assert out.of("shutdown") == [1.0]
    assert [line.endswith("FAILED") for line in said] == [True, False]
