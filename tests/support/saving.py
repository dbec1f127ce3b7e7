"""Checkpoints that a group of ranks writes in a test."""

from nbdist import checkpoints


def save(together, path, num, step, *, make, then):
    """Save as so many ranks after so many steps; what `then(trainer)` returns on each."""
    partial = checkpoints.begin(path, step=step, generation=1)

    def body(rank):
        trainer = make()
        trainer.fit(step)
        trainer.part(rank, num).write(partial)
        return then(trainer)

    outcomes = together(num, body)
    parts = [checkpoints.part_name(rank) for rank in range(num)]
    checkpoints.commit(partial, parts, step=step, generation=1)
    return outcomes
