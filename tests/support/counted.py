"""What ranks have exchanged: by their own telemetry, and by the kernel's count of bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch.distributed as dist

from nbdist.engine.emit import RING
from nbdist.protocol.telemetry import RECORD, Kind
from nbdist.protocol.traffic import Axis, Op, Road, unpacked

BYTES_ACKED = struct.Struct("=120xQ")
"""Of Linux's struct tcp_info."""


def taken():
    """Records of this process that nobody has taken."""
    return np.frombuffer(RING.drain(4096).records, RECORD)


def payloads(records=None, *, since=0):
    """Step -> road -> payload bytes that this process told of; what stages send is a road too."""
    records = taken() if records is None else records
    found = defaultdict(lambda: defaultdict(int))
    for record in records[records["step"] >= since]:
        if record["kind"] == Kind.COLLECTIVE:
            found[int(record["step"])][unpacked(int(record["ident"]))] += int(record["value"])
        elif record["kind"] == Kind.SEND:
            found[int(record["step"])][Road(Op.SEND, Axis.PIPELINE, 2)] += int(record["value"])
    return {step: dict(roads) for step, roads in found.items()}


def num_sent(work):
    """Bytes that this rank sent over TCP while all ranks did this work."""
    dist.barrier()
    before = _num_acked()
    work()
    dist.barrier()
    sent = _num_acked() - before
    dist.barrier()  # a rank that ended would take its neighbours' sockets, and their counts
    return sent


def _num_acked():
    """Bytes that this process has sent over its open sockets, and the others have."""
    total = 0
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(place.name))) as its:
            info = its.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += BYTES_ACKED.unpack_from(info)[0]
    return total
