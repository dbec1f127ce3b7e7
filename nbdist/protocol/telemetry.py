"""Telemetry records: what their kinds mean, how they lie in memory and on the wire, their check.

Written by engines, read by the supervisor and by whoever reads a run's record. Times are
nanoseconds of the host's monotonic clock (`time.perf_counter_ns`, on Linux CLOCK_MONOTONIC), so
that `t1_ns * 1e-9` compares with `time.monotonic()` of any process of the host. Pure.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Kind(IntEnum):
    """What a record tells; the numbers are those of the wire and never change their meaning.

    A *span* lasts from `t0_ns` to `t1_ns`; of the others both are the moment. A *scalar* is a
    `value`; an *instant* is neither. What a rank has done in a step that is then broken is told
    too, with the attempt: SAMPLES, TOKENS, LOSS, GRAD_NORM and LEARNING_RATE come at the commit.
    """

    STEP = 1
    """Span: one attempt at a step, from its beginning to the end of its last part."""
    COMPUTE = 2
    """Span: forward and backward by the rank itself, without waiting for others."""
    FORWARD = 3
    """Span: from a micro-batch to its loss; `ident`: the micro-batch."""
    BACKWARD = 4
    """Span: from the loss to the last gradient; `ident`: the micro-batch."""
    VOTE = 5
    """Span: the vote at the end of a step, waiting included."""
    OPTIMIZER = 6
    """Span: clipping, the update, the scheduler."""
    EVALUATE = 7
    """Span: an evaluation at a step boundary."""
    DATA = 8
    """Span: waiting for the next batch."""
    CHECKPOINT = 9
    """Span: taking a snapshot or writing a checkpoint, as far as training waits for it."""
    BACKWARD_INPUT = 10
    """Span: the part of a stage's backward pass that others wait for; `ident`: the micro-batch,
    `value`: the stage. In a pipeline FORWARD and BACKWARD have the stage as their value too."""
    BACKWARD_WEIGHT = 11
    """Span: the rest of it, to the weights; `ident` and `value` likewise."""

    BUCKET_READY = 20
    """Instant: all gradients of a bucket are there; `ident`: the bucket, from 0."""
    BUCKET_LAUNCH = 21
    """Instant: its reduction has begun; `ident`: the bucket."""
    BUCKET_DONE = 22
    """Span: its reduction, from launch to end; `ident`: the bucket, `value`: its bytes."""
    SEND = 23
    """Instant: a stage's output or gradient is on its way; `ident`: the micro-batch, `value`: its
    bytes."""
    RECEIVE = 24
    """Instant: a stage is ready for it; `ident` and `value` likewise. It has come at the latest
    when the stage computes next."""
    COLLECTIVE = 25
    """Span: the exchange of a payload between ranks, waiting for others included; `ident`: what is
    done between whom, as `protocol.traffic` packs it, `value`: the payload that this rank handed
    over, in bytes. What stages send is told by SEND instead."""

    SAMPLES = 40
    """Scalar: samples that this rank trained on in the step."""
    TOKENS = 41
    """Scalar: tokens that this rank trained on in the step."""
    LOSS = 42
    """Scalar: mean loss over this rank's share of the step."""
    GRAD_NORM = 43
    """Scalar: norm of the global gradient before it is clipped."""
    LEARNING_RATE = 44
    """Scalar: the rate that the optimizer used, of its first parameter group."""
    MEMORY_RSS = 45
    """Scalar: resident memory of the process, bytes."""
    MEMORY_DEVICE = 46
    """Scalar: memory that torch holds on the engine's GPU for this process, bytes."""
    CPU = 47
    """Scalar: cores that the process kept busy since the sample before."""

    MEMORY_PEAK = 48
    """Scalar: the most memory that was resident so far, bytes."""
    MEMORY_LIMIT = 49
    """Scalar: memory that the process can have, by its control group or its host, bytes."""
    MEMORY_DEVICE_USED = 50
    """Scalar: of MEMORY_DEVICE what tensors take, bytes."""
    MEMORY_DEVICE_LIMIT = 51
    """Scalar: memory that the engine's GPU has, bytes."""
    STALENESS = 52
    """Scalar: how many other updates came between an update's parameters and it; told by who
    applies it."""
    DRIFT = 53
    """Scalar: how far a rank's parameters were from the mean of all at an outer step, as a share of
    the length of those that all had begun with."""
    SENT = 54
    """Scalar: bytes that this rank has had to send since it began with the run, at the end of an
    attempt; 0: it begins. Of a payload so much has to be sent as `protocol.traffic` reckons."""
    DIGEST = 55
    """Scalar: digest of one block of what replicas should have alike, of so many bits as it holds
    exactly; `ident`: which block, as `protocol.looks` packs it. `step`: committed steps."""

    STEP_BROKEN = 60
    """Instant: this attempt at the step was given up."""
    PLANNED = 61
    """Instant: a rank of a pipeline is to do this; told with its first batch in a group. `ident`:
    its place in the rank's order, from 0, `value`: which action, as `protocol.plans` packs it."""


SERIES = {
    Kind.STEP: "step_s",
    Kind.COMPUTE: "compute_s",
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.VOTE: "vote_s",
    Kind.OPTIMIZER: "optimizer_s",
    Kind.EVALUATE: "evaluate_s",
    Kind.DATA: "data_s",
    Kind.CHECKPOINT: "checkpoint_s",
    Kind.BACKWARD_INPUT: "backward_input_s",
    Kind.BACKWARD_WEIGHT: "backward_weight_s",
    Kind.SAMPLES: "samples",
    Kind.TOKENS: "tokens",
    Kind.LOSS: "loss",
    Kind.GRAD_NORM: "grad_norm",
    Kind.LEARNING_RATE: "lr",
    Kind.MEMORY_RSS: "memory_rss_bytes",
    Kind.MEMORY_DEVICE: "memory_device_bytes",
    Kind.CPU: "cpu_cores",
    Kind.MEMORY_PEAK: "memory_peak_bytes",
    Kind.MEMORY_LIMIT: "memory_limit_bytes",
    Kind.MEMORY_DEVICE_USED: "memory_device_used_bytes",
    Kind.MEMORY_DEVICE_LIMIT: "memory_device_limit_bytes",
    Kind.STALENESS: "staleness",
    Kind.DRIFT: "drift",
    Kind.SENT: "sent_bytes",
}
"""Kinds of which a series over time is kept: of spans their duration, of scalars their value."""

SPANS = frozenset(k for k, name in SERIES.items() if k < Kind.BUCKET_READY)
"""Kinds whose series is of durations."""

TIMELINE = frozenset({*SPANS, *(k for k in Kind if Kind.BUCKET_READY <= k < Kind.SAMPLES)})
"""Kinds that are kept whole for some steps, to draw what happened when within each."""

LAYOUT = 1
"""Version of `RECORD`; raised with every change of it."""

PACKED = "<qqdqiiHH4xq"
"""`RECORD` for the struct module."""

RECORD = np.dtype(
    [
        ("t0_ns", "<i8"),
        ("t1_ns", "<i8"),
        ("value", "<f8"),
        ("step", "<i8"),
        ("generation", "<i4"),
        ("ident", "<i4"),
        ("kind", "<u2"),
        ("attempt", "<u2"),
        ("number", "<i8"),
    ],
    align=True,
)
"""One record. `number` counts the records of a process from 1: a gap is a loss. It stands last, so
that a record that was not written to its end has none. `step`, `attempt` and `generation` are those
in which it was written."""

MAX_BATCH_BYTES = 65_536
"""The largest batch on the wire."""

MAX_BATCH_RECORDS = MAX_BATCH_BYTES // RECORD.itemsize

_KINDS = np.array(sorted(Kind), dtype=np.uint16)


class BatchError(ValueError):
    """Bytes that are no batch of records of this layout; says why."""


def decode_records(layout: int, data: bytes) -> NDArray[np.void]:
    """The records of a batch, of dtype `RECORD`.

    Raises:
        BatchError: they are not what an engine of this version sends.
    """
    if layout != LAYOUT:
        raise BatchError(f"layout {layout}, expected {LAYOUT}")
    if not data or len(data) > MAX_BATCH_BYTES or len(data) % RECORD.itemsize:
        size = f"1 to {MAX_BATCH_RECORDS} records of {RECORD.itemsize}"
        raise BatchError(f"{len(data)} bytes, expected {size}")
    records: NDArray[np.void] = np.frombuffer(data, RECORD)
    check(records)
    return records


def check(records: NDArray[np.void]) -> None:
    """Raises BatchError unless these can be records of one process in their order."""
    numbers = records["number"]
    if numbers[0] < 1 or np.any(np.diff(numbers) <= 0):
        raise BatchError("numbers of records that do not rise")
    if not np.isin(records["kind"], _KINDS).all():
        raise BatchError(f"a kind that is not known, in {np.unique(records['kind'])}")
    if np.any(records["t1_ns"] < records["t0_ns"]):
        raise BatchError("a span that ends before it begins")
