"""Whether replicas are identical, of runs with real engines."""

from __future__ import annotations

import training

from nbdist.supervisor.replay import read
from nbdist.views.agreements import looks

CHANGE = "with torch.no_grad():\n    trainer.model.count[7] += 1"


def test_a_replica_that_was_changed_is_named(cluster, until, tmp_path):
    """While all are the same it says so; a cell changes one between two runs: from the next run's
    first step on its slot and block are named, in the figure and in what a replay of it shows."""
    engines = cluster(2, record=tmp_path)
    engines.run(training.CELL)
    (names,) = set(map(tuple, engines.run("trainer.blocks", once=True).values.values()))

    def found(run):
        return looks(run.story().tables)

    run = engines.train("trainer", steps=1_000_000)
    until(lambda: found(run), 60, "replicas are looked at")
    run.stop()
    assert [look.differs for look in found(run)] == [{0: (), 1: ()}]
    assert len(names) == found(run)[0].blocks
    began = run.num_committed
    engines.run(CHANGE, ranks=1, once=True)
    run = engines.train("trainer", steps=1_000_000)
    until(lambda: found(run), 60, "they are looked at again")
    run.stop()
    first = found(run)[0]
    assert first.step == began + 1
    assert first.found == {1: (names.index("count"),)}
    said = f"slot 1 differs in block {names.index('count')}; first seen at step {began + 1}"
    assert said in run.figure("agreement").text
    record = tmp_path / f"{engines.id}-{run.id}.jsonl"
    until(lambda: read(record).ended, 60, "the record has its end")
    replayed = looks(read(record).story().tables)
    assert replayed[0] == first
    assert replayed[-1].found == first.found
