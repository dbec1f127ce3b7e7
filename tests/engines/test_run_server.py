"""Runs with a parameter server, and engines that die, stop, come and go: workers and servers."""

import numpy as np
import pytest
import training

from nbdist.errors import RecoveryFailed, WrongState

MODES = [
    pytest.param('"sync"', marks=pytest.mark.slow),
    '"async"',
    pytest.param('"bounded", staleness=2', marks=pytest.mark.slow),
]


class Going:
    """A run under way: one more thing happens, and it goes on."""

    def __init__(self, engines, until):
        self.engines, self._until = engines, until
        self.run = engines.train("trainer", steps=1_000_000)
        self.on()

    def on(self, num=12):
        """So many more steps are committed."""
        mark = len(self.run.history["step"]) + num

        def has_come():
            assert self.run.state != "failed", self.run
            return len(self.run.history["step"]) >= mark

        self._until(has_come, 60, "the run goes on")

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
        self._until(
            lambda: not any(incident.samples_lost for incident in self.run.incidents),
            60,
            "no incident says that samples were lost: they were under way",
        )
        assert np.isfinite(self.run.history["loss"]).all()
        ages = self.engines.run("trainer.staleness", once=True).values
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
    for rank in (2, 0):
        going.lose(rank)
    going.lose(1, signal="STOP")
    for num in (4, 2):
        going.engines.scale(num)
        going.on()
    num_steps = going.end()
    whole = training.undisturbed(going.engines, num_steps)
    assert np.mean(going.run.history["loss"][-20:]) == pytest.approx(np.mean(whole[-20:]), rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(550)
def test_twenty_workers_die(cluster, until):
    """One after the other, and two at once: what was pushed is what was applied."""
    going = Going(start(cluster, 4, '"async"'), until)
    for number in range(18):
        going.lose(2 + number % 2)
    going.lose([2, 3])
    going.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_die_while_several_train(cluster, until):
    """Again and again, alone and with a worker: what was applied is known to who takes over."""
    going = Going(start(cluster, 4, '"async"'), until)
    for ranks in (0, 0, 1, [0, 3], 0, [1, 2], 0):
        going.lose(ranks)
    going.end()


@pytest.mark.timeout(200)
def test_a_quorum_goes_on_without_who_is_stuck(cluster, until, tmp_path):
    """Its part is dropped when it is lost, and that is counted; the seat is filled and trains."""
    engines = cluster(3, hang_timeout_s=100.0)
    engines.run(training.CELL)
    engines.run(
        "import os\n"
        "from nbdist.train import ParameterServer\n"
        "trainer = make(strategy=ParameterServer(quorum=1, replica=False))\n"
        "def stay(*_):\n"
        f"    mark = {str(tmp_path / 'stuck')!r}\n"
        "    if rank == 2 and not os.path.exists(mark):\n"
        "        open(mark, 'x').close()\n"
        "        time.sleep(3600)  # the fault itself: it computes and never comes back\n"
        "trainer.model.register_forward_hook(stay)"
    )
    going = Going(engines, until)
    until((tmp_path / "stuck").exists, 60, "rank 2 is stuck, with a part that is owed")
    going.lose(2)
    going.run.stop()
    training.check_steps(going.run)
    training.check_replicas(engines)
    late = engines.run("trainer.late_parts", once=True).values
    assert late[0]["dropped"] >= 1
    assert late[1] == late[2] == {}


def test_without_a_replica_the_server_takes_the_run_along(cluster, until):
    """The error says what was lost, and what would have kept it."""
    engines = start(cluster, 2, '"async"')
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: len(run.history["step"]) > 3, 60, "it trains")
    engines.kill(0)
    with pytest.raises(RecoveryFailed, match="replica"):
        run.wait(60)


@pytest.mark.timeout(200)
def test_a_slow_worker_is_not_hung(cluster):
    """Server and replica wait in each step anew, though at the same place in the code."""
    engines = start(cluster, 3, '"sync"')
    # The worker's work, while which others wait; the test waits for the run.
    engines.run("trainer.model.register_forward_hook(lambda *_: time.sleep(0.3))")
    run = engines.train("trainer", steps=12).wait(90)
    training.check_steps(run)
    assert run.incidents == []


@pytest.mark.timeout(200)
def test_a_newcomer_without_the_trainer_ends_the_run(cluster, until):
    """Others would wait for it for ever."""
    engines = cluster(3)
    engines.run(training.CELL)
    cell = "from nbdist.train import ParameterServer; served = make(strategy=ParameterServer())"
    engines.run(cell, once=True)
    run = engines.train("served", steps=1_000_000)
    until(lambda: len(run.history["step"]) > 3, 60, "it trains")
    engines.kill(2)
    with pytest.raises(WrongState, match=r"served is missing on slot 2.*without --once"):
        run.wait(60)
