"""The tables that views draw from: their columns, what each means, who is sent which. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

View = Literal[
    "overview",
    "ranks",
    "loss",
    "throughput",
    "sync",
    "pipeline",
    "traffic",
    "bytes",
    "memory",
    "distance",
    "agreement",
    "membership",
]
"""What may be subscribed to. World, run, incidents, evaluations and counters come with all."""

TABLES: dict[str, dict[str, str]] = {
    "rows": {
        "step": "f8",
        "at": "f8",
        "loss": "f8",
        "lr": "f8",
        "seconds": "f4",
        "samples": "f4",
        "generation": "f4",
        "world_size": "f4",
    },
    "steps": {
        "step": "f8",
        "ended_at": "f8",
        "ready_at": "f8",
        "slot": "f4",
        "generation": "f4",
        "attempt": "f4",
        "samples": "f4",
        "step_s": "f4",
        "compute_s": "f4",
        "exposed_s": "f4",
        "wait_s": "f4",
        "data_s": "f4",
        "optimizer_s": "f4",
    },
    "buckets": {
        "step": "f8",
        "ready_at": "f8",
        "launch_at": "f8",
        "done_at": "f8",
        "size_bytes": "f8",
        "slot": "f4",
        "generation": "f4",
        "attempt": "f4",
        "bucket": "f4",
    },
    "spans": {
        "step": "f8",
        "began_at": "f8",
        "ended_at": "f8",
        "slot": "f4",
        "generation": "f4",
        "attempt": "f4",
        "kind": "f4",
        "ident": "f4",
        "value": "f8",
    },
    "plans": {
        "generation": "f4",
        "slot": "f4",
        "kind": "f4",
        "ident": "f4",
        "stage": "f4",
        "began": "f4",
        "ended": "f4",
    },
    "traffic": {
        "step": "f8",
        "payload_bytes": "f8",
        "sent_bytes": "f8",
        "seconds": "f4",
        "slot": "f4",
        "generation": "f4",
        "attempt": "f4",
        "op": "f4",
        "axis": "f4",
        "ranks": "f4",
        "calls": "f4",
    },
    "sent": {"step": "f8", "at": "f8", "sent_bytes": "f8", "slot": "f4"},
    "memory": {"at": "f8", "bytes": "f8", "slot": "f4", "kind": "f4"},
    "distance": {"at": "f8", "value": "f8", "slot": "f4", "kind": "f4"},
    "agreement": {
        "at": "f8",
        "step": "f8",
        "differs": "f8",
        "blocks": "f4",
        "stride": "f4",
        "anchors": "f4",
        "slot": "f4",
        "generation": "f4",
    },
    "seats": {"at": "f8", "slot": "f4", "rank": "f4", "state": "f4", "generation": "f4"},
    "phases": {"at": "f8", "phase": "f4", "generation": "f4", "world_size": "f4"},
}
"""Table -> its columns -> their type. A column's name in a frame is `table.column`.

rows: one committed step of the run. step: from 0. loss: mean over the global batch. lr: rate used.
seconds: since the committed step before, stalls included. samples: over all ranks. A later row on
the same step stands over the earlier one: it was committed again, since its holders were lost.

steps: one attempt at a step on one slot. ended_at: its end. ready_at: when its last gradient was
there, that is, when it came to the common sum. samples: this rank's. step_s: all of it. compute_s:
its own forward and backward. exposed_s: communication and waiting that nothing hid, from `ready_at`
to the end of the sums. wait_s: how long after it the last slot came to the sum; whoever comes last
has 0, and NaN stands where a slot told of the attempt too late to say. data_s: waiting for batches.
optimizer_s: the update. A slot of which nothing came has no row; a part of which nothing came is
NaN. Of the last 2,000 attempts of each slot.

buckets: one bucket of gradients in one attempt on one slot. ready_at: all its gradients are there;
launch_at: its sum has begun; done_at: it has ended. size_bytes: of the bucket.

spans: what the slot's main thread did when. kind: a number of `telemetry.Kind`: 3 forward,
4 backward, 5 vote, 6 optimizer, 7 evaluate, 8 data, 9 checkpoint, 10 and 11 the two halves of a
backward pass. ident: the micro-batch. value: in a pipeline the stage. There 23 and 24 are all that
the slot sent and asked for in the attempt: from the first to the last, ident: how many, value:
their bytes.

plans: what the ranks of a pipeline are to do in the group of a generation, slot by slot, each in
its order. kind, ident and stage as in spans; began and ended: in forwards, as if nothing were sent
and each half of a backward took as long as a forward.

traffic: what a slot exchanged with others in one attempt, by one kind of collective. op, axis,
ranks: as in `protocol.traffic`. calls: how many. payload_bytes: handed over, all calls together.
sent_bytes: what it had to send for them at least. seconds: in which at least one went on, waiting
for others included; NaN: not known.

sent: what a slot had to send since the run began, until the end of an attempt at `step`; whatever
engine was in it, and whether the attempt was broken or not.

memory: what a slot's engine held at `at`, about once a second. kind: a number of `telemetry.Kind`:
45 resident, 48 the most that was so far, 49 what it can have; 46 held by torch on its GPU, 50 of
that by tensors, 51 what the GPU has. Of 48, 49 and 51 only changes have rows.

distance: how far ranks were apart at `at`. kind: a number of `telemetry.Kind`: 52 at a parameter
server, whose slot it is, one update's staleness; 53 how far the slot's parameters had drifted.

agreement: what a slot's replica was like when it was looked at. Rows with the same `at` are one
look; those of the first one that found a difference, and of the newest. step: committed steps.
differs: a bit for each block, from the lowest: it is another than most slots have, or, where none
has most, than the lowest slot has. blocks: how many. stride: one value in so many was looked at.
anchors: 1 where slots train apart: it is what they came to at the last outer step. A frame that has
rows has all there are: they stand for those of earlier ones.

seats: from `at` on, a slot has this state, a place in `STATES`, and this rank (-1: none).

phases: from `at` on, the world has this phase, a place in `PHASES`, and so many members.

buckets, spans and traffic hold the last steps only, each whole over all slots, and no more of them
than have room: they are a sample. rows, steps, sent, memory and distance are thinned out where they
are many, sent and distance evenly; a frame's `thinned` names them.
"""

TABLES_OF: dict[View, tuple[str, ...]] = {
    "overview": ("rows", "steps", "memory", "seats", "phases", "buckets", "spans", "plans"),
    "ranks": ("steps", "memory"),
    "loss": ("rows", "phases"),
    "throughput": ("rows", "steps", "phases"),
    "sync": ("steps", "buckets", "spans"),
    "pipeline": ("spans", "plans"),
    "traffic": ("traffic",),
    "bytes": ("rows", "sent"),
    "memory": ("memory", "phases"),
    "distance": ("distance",),
    "agreement": ("agreement",),
    "membership": ("seats", "phases"),
}
"""View -> the tables that it is sent."""

STATES = ("empty", "starting", "replaying", "ready", "member", "leaving", "given up")
PHASES = ("starting", "forming", "restoring", "running", "breaking", "failed", "ended")
Table = dict[str, "NDArray[np.generic]"]
"""Column -> its values, all equally many."""


def num_rows(table: Table) -> int:
    """Of all its columns."""
    return len(next(iter(table.values())))
