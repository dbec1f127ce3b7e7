"""Runs with a parameter server, and engines that die, stop, come and go: workers and servers."""

import numpy as np
import pytest
import training

MODES = ['"sync"', '"async"', '"bounded", staleness=2']


class Going:
    """A run under way: one more thing happens, and it goes on."""

    def __init__(self, engines, until):
        self.engines, self._until = engines, until
        self.run = engines.train("trainer", steps=1_000_000)
        self.on()

    def on(self, num=12):
        """So many more steps are committed."""
        mark = len(self.run.history["step"]) + num
        self._until(lambda: len(self.run.history["step"]) >= mark, 60, "the run goes on")

    def lose(self, rank, signal="KILL"):
        """A rank is lost, and its seat filled."""
        before = self.engines.generation
        self.engines.kill(rank, signal=signal)
        self.engines.wait_healthy(60, after=before + 1)
        self.on()

    def end(self):
        """Every step was committed once, and every sample applied as often as that says."""
        self.run.stop()
        num_steps = len(self.run.history["step"])
        training.check_steps(self.run)
        training.check_samples(self.engines, num_steps)
        training.check_replicas(self.engines)
        assert np.isfinite(self.run.history["loss"]).all()
        ages = self.engines.run("trainer.ages", once=True).values
        assert sum(ages[0].values()) == num_steps
        return num_steps


def start(cluster, num, mode, **more):
    engines = cluster(num, hang_timeout_s=1.0, **more)
    engines.run(training.CELL)
    engines.run(
        "from nbdist.train import ParameterServer\n"
        f"trainer = make(strategy=ParameterServer({mode}))"
    )
    return engines


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_killed_stopped_filled_and_grown(cluster, until, mode):
    """Server, replica or worker: no update is lost, and none is applied twice."""
    going = Going(start(cluster, 3, mode), until)
    for rank in (2, 0, 1):
        going.lose(rank)
    going.lose(2, signal="STOP")
    for num in (4, 3, 2, 3):
        going.engines.scale(num)
        going.on()
    num_steps = going.end()
    whole = training.undisturbed(going.engines, num_steps)
    assert np.mean(going.run.history["loss"][-20:]) == pytest.approx(np.mean(whole[-20:]), rel=0.15)
