"""Runs whose gradients are summed through shared memory, while ranks die, stop, come and go."""

import training

LOOK = """
import pathlib
from nbdist.engine.local_sum import LOCAL_SUM

def shared():
    '''Whether sums go through shared memory, and none but this generation's is open here.'''
    is_agreed, found = LOCAL_SUM.agree(), set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except FileNotFoundError:
            continue
        if "memfd:nbdist-sum-" in name:
            found.add(int(name.split("-")[2]))
    return is_agreed, found == {generation}
"""


def test_killed_stopped_filled_and_grown(cluster, until):
    """It is chosen by itself in each generation, those before leave nothing open, replicas are
    equal, and each sample has its part once."""
    engines = cluster(2, hang_timeout_s=1.0)
    engines.run(LOOK)
    engines.run(training.cell("DataParallel(bucket_mb=0.25)"))
    run = engines.train("trainer", steps=1_000_000)

    def look():
        run.pause()
        training.check_replicas(engines)
        for answer in engines.run("shared()", once=True).values.values():
            assert answer == (True, True)
        run.resume()

    training.disturb(engines, run, until, between=look)
    run.stop()
    training.check_steps(run)
    training.check_replicas(engines)
    training.check_samples(engines, len(run.history["step"]))
