"""Runs whose gradients are compressed, and ranks that die, stop, come and go."""

import numpy as np
import pytest
import training

STALL_S = 4 * 0.6


@pytest.mark.parametrize(
    "name",
    ["topk", "powersgd"]  # one that keeps a residual, one with state of its own
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "bf16", "int8")],
)
def test_killed_stopped_filled_and_grown(cluster, until, name):
    """Every step once, equal replicas throughout, the loss of a run that sends everything."""
    engines = cluster(2, hang_timeout_s=1.0)
    engines.run(training.cell(f"DataParallel(compress={name!r}, bucket_mb=0.25)"))
    run = engines.train("trainer", steps=1_000_000)

    def compare():
        run.pause()
        training.check_replicas(engines)
        run.resume()

    training.disturb(engines, run, until, between=compare)
    run.stop()
    num_steps = len(run.history["step"])
    training.check_steps(run)
    training.check_replicas(engines)
    assert set(run.history["world_size"]) >= {2, 3}
    if name in (
        "fp16",
        "bf16",
        "powersgd",
    ):  # with a residual, what a rank had not sent dies with it
        training.check_samples(engines, num_steps)
    assert all(i.samples_lost == i.samples_repeated == 0 for i in run.incidents)
    lost = [i.stall_s for i in run.incidents if i.kind == "lost" and i.stall_s is not None]
    assert len(lost) == 3
    assert max(lost) <= STALL_S
    whole = training.undisturbed(engines, num_steps)
    assert np.mean(run.history["loss"][-20:]) == pytest.approx(np.mean(whole[-20:]), rel=0.1)


def test_the_last_one_trains_alone_for_a_while(cluster, until):
    """What it has not sent goes into its own gradient; whoever joins begins with nothing left."""
    engines = cluster(2, policy="shrink")
    engines.run(training.cell("DataParallel(compress='int8', bucket_mb=0.25)"))
    run = engines.train("trainer", steps=1_000_000)
    left = "trainer._state.exchange._courier.codec.residual.total()"

    training.go_on(run, until)
    assert all(v > 0 for v in engines.run(left, once=True).values.values())
    engines.kill(0)
    until(lambda: run.history["world_size"][-1] == 1, 60, "it is alone")
    training.go_on(run, until)
    assert engines.run(left, once=True).values == {0: 0}
    engines.scale(2)
    until(lambda: run.history["world_size"][-1] == 2, 60, "another one has come")
    training.go_on(run, until)
    assert all(v > 0 for v in engines.run(left, once=True).values.values())
    run.stop()
    training.check_steps(run)
    training.check_replicas(engines)
