"""Checkpoints of real engines: while training goes on, and whatever is lost meanwhile."""

import os
import signal

import numpy as np
import pytest
import training

import nbdist
from nbdist import checkpoints
from nbdist.rundir import runtime_root

ALL = f"""
{training.CELL}
from nbdist.train import Pipeline, Sharded, bench_model

class Plain(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, i):
        x = torch.randn(64, generator=torch.Generator().manual_seed(int(i)))
        return x, x[:10] * 0.5

def plain(strategy):
    return make(model=bench_model, data=Plain(), loss=torch.nn.functional.mse_loss,
                global_batch=48, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
                strategy=strategy)

trainer, other = plain(Pipeline(2, "1f1b", 4, copy_every=5)), plain(DataParallel())
rows = plain(Sharded())
"""


def passed(run, step):
    return len(run.history["step"]) >= step


def folders(path):
    return {p.name for p in path.iterdir() if p.is_dir()}


def hold(engines, go, **options):
    """Have engines write nothing until there is a file."""
    code = f"""
import pathlib, time
from nbdist.train import checkpoint
write = checkpoint.Part.write
def held(part, partial):
    while not pathlib.Path({str(go)!r}).exists():
        time.sleep(0.01)
    write(part, partial)
checkpoint.Part.write = held
"""
    engines.run(code, once=True, **options)


@pytest.mark.timeout(240)
def test_a_run_goes_on_while_it_is_saved(cluster, until, tmp_path):
    """What is trained after a load is what the run had trained then, bit for bit; a run that goes
    on is not loaded into."""
    engines = cluster(2)
    engines.run(training.CELL)
    with pytest.raises(nbdist.WrongState, match="has not trained yet"):
        engines.save(tmp_path)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: passed(run, 5), 60, "the run trains")
    saved = [engines.save(tmp_path, keep=2) for _ in range(3)]
    assert run.state == "running"
    assert saved[0].name == "trainer"
    assert 5 <= saved[0].step <= saved[1].step <= saved[2].step
    assert folders(tmp_path) == {s.path.name for s in saved[1:]}
    until(lambda: passed(run, saved[2].step + 20), 60, "the run goes on")
    with pytest.raises(nbdist.WrongState, match="a run goes on"):
        engines.load(tmp_path)
    run.stop()
    training.check_steps(run)
    loaded = engines.load(tmp_path)
    assert (loaded.path, loaded.step, loaded.notes) == (saved[2].path, saved[2].step, ())
    again = engines.train("trainer", steps=20).wait(90).history
    first = loaded.step
    assert again["step"].tolist() == list(range(first, first + 20))
    np.testing.assert_array_equal(again["loss"], run.history["loss"][first : first + 20])
    training.check_replicas(engines)
    training.check_samples(engines, first + 20)


@pytest.mark.timeout(240)
def test_stages_are_loaded_by_replicas_and_rows(cluster, tmp_path):
    """And rows by stages; what is loaded into a pipeline comes back when a stage is lost."""
    engines = cluster(2)
    engines.run(ALL)
    with pytest.raises(nbdist.CellFailed, match="there are trainer, other, rows: say which"):
        engines.save(tmp_path)
    for path in (None, "", 3):
        with pytest.raises(ValueError, match=f"path is {path!r}; it must name a folder"):
            engines.save(path, "trainer")
    engines.train("trainer", steps=12).wait(90)
    engines.save(tmp_path, "trainer")
    for name in ("other", "rows"):
        assert engines.load(tmp_path, name).step == 12
    names = ("trainer", "other", "rows")
    losses = [engines.train(name, steps=8).wait(90).history["loss"] for name in names]
    for its in losses[1:]:
        np.testing.assert_allclose(its, losses[0], rtol=1e-5)
    engines.save(tmp_path, "rows")
    engines.load(tmp_path, "trainer")
    engines.train("trainer", steps=7).wait(90)
    before = engines.generation
    engines.kill(1)
    engines.wait_healthy(60, after=before + 1)
    more = engines.train("trainer", steps=3).wait(90).history
    assert more["step"].tolist() == [27, 28, 29]
    losses = engines.train("other", steps=10).wait(90).history["loss"]
    np.testing.assert_allclose(more["loss"], losses[-3:], rtol=1e-5)


@pytest.mark.timeout(240)
def test_what_comes_in_between_costs_that_one_alone(cluster, background, until, tmp_path):
    """A disk that is full, a rank that is killed while it writes: it is told, nothing of it is
    left, training goes on, and the next one is whole."""
    engines = cluster(2)
    engines.run(training.CELL)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: passed(run, 5), 60, "the run trains")
    first = engines.save(tmp_path)

    code = """
from nbdist.train import tensors
def full(folder, *_):
    raise OSError(28, "No space left on device", str(folder / "x"))
tensors.write = full
"""
    engines.run(code, ranks=1, once=True)
    with pytest.raises(nbdist.FileUnwritable, match=r"rank-1/x: No space left on .* \(ENOSPC\)"):
        engines.save(tmp_path)
    assert folders(tmp_path) == {first.path.name}

    hold(engines, tmp_path / "never", ranks=1)
    saving = background(engines.save, tmp_path)
    until(lambda: list(tmp_path.glob("*.partial/rank-0/part.json")), 60, "rank 0 has written")
    before = engines.generation
    engines.kill(1)
    with pytest.raises(nbdist.SaveAbandoned, match="rank 1 ended while writing"):
        saving.result(90)
    assert folders(tmp_path) == {first.path.name}

    engines.wait_healthy(60, after=before + 1)
    mark = len(run.history["step"])
    until(lambda: passed(run, mark + 5), 60, "the run goes on")
    second = engines.save(tmp_path)
    assert checkpoints.newest(tmp_path).path == second.path
    run.stop()
    training.check_steps(run)


@pytest.mark.timeout(240)
def test_a_supervisor_that_is_lost_loses_no_checkpoint(
    cluster, background, running, until, tmp_path
):
    """The one that takes over commits what the engines write."""
    engines = cluster(2)
    engines.run(training.CELL)
    engines.train("trainer", steps=5).wait(90)
    hold(engines, tmp_path / "go")
    saving = background(engines.save, tmp_path / "runs")
    until(lambda: list((tmp_path / "runs").glob("*.partial")), 60, "it is begun")
    (pid,) = running(runtime_root() / engines.id, "nbdist.supervisor")
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    saved = saving.result(90)
    assert checkpoints.newest(tmp_path / "runs").path == saved.path
    assert engines.load(tmp_path / "runs").step == 5
