"""The sender: what is in the ring goes out in time, and nothing is ever waited for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from nbdist.engine import emit, probe
from nbdist.engine import sender as module
from nbdist.engine.emit import Ring
from nbdist.engine.probe import Probe
from nbdist.engine.sender import MAX_UNANSWERED, SAMPLE_PERIOD_S, SEND_PERIOD_S, Sender
from nbdist.protocol import wire
from nbdist.protocol.events import AgentEvent
from nbdist.protocol.telemetry import MAX_BATCH_RECORDS, RECORD, Kind, decode_records


class Socket:
    """Takes what it is given, or not."""

    def __init__(self):
        self.sent, self.is_full = [], False

    def send(self, data, flags):
        assert flags == zmq.NOBLOCK
        if self.is_full:
            raise zmq.Again
        self.sent.append(wire.decode(data, AgentEvent))


class Road:
    """A sender without a probe, its ring and its socket; `at` is the time."""

    def __init__(self):
        self.ring, self.socket = Ring(), Socket()
        self.sender = Sender(2, self.ring)

    def put(self, num):
        for _ in range(num):
            self.ring.put(Kind.LOSS, 1, 2, 3, 4.0)

    def serve(self, now_s, num_unanswered=0):
        self.sender.serve(self.socket, now_s, generation=5, num_unanswered=num_unanswered)


@pytest.fixture
def road(monkeypatch):
    monkeypatch.setattr(Probe, "sample", lambda _self: None)
    return Road()


def test_what_is_in_the_ring_is_sent(road):
    """With slot, generation, and all that a receiver needs to read it."""
    road.put(3)
    road.serve(1.0)
    (batch,) = road.socket.sent
    assert (batch.slot, batch.generation, batch.first, batch.num_dropped) == (2, 5, 1, 0)
    assert decode_records(batch.layout, batch.records)["number"].tolist() == [1, 2, 3]


def test_one_batch_in_a_tenth_of_a_second(road):
    """What comes meanwhile goes with the next one; without anything new nothing is sent."""
    for now_s in np.arange(0, 1, SEND_PERIOD_S / 4):
        road.put(1)
        road.serve(float(now_s))
    assert len(road.socket.sent) == 10
    road.serve(9.0)
    road.serve(10.0)
    assert len(road.socket.sent) == 11


def test_a_batch_has_its_limit(road):
    """More waits for the next one."""
    road.put(MAX_BATCH_RECORDS + 5)
    road.serve(1.0)
    road.serve(2.0)
    assert [len(b.records) // RECORD.itemsize for b in road.socket.sent] == [MAX_BATCH_RECORDS, 5]


def test_what_the_socket_does_not_take_is_dropped_and_counted(road):
    """Nobody waits for it, and the next batch tells."""
    road.put(3)
    road.socket.is_full = True
    road.serve(1.0)
    road.socket.is_full = False
    road.put(2)
    road.serve(2.0)
    (batch,) = road.socket.sent
    assert (batch.first, batch.num_dropped) == (4, 3)


def test_nothing_is_sent_while_beats_are_not_answered(road):
    """Nobody reads: it stays in the ring, and is sent when somebody does."""
    road.put(3)
    road.serve(1.0, num_unanswered=MAX_UNANSWERED + 1)
    assert road.socket.sent == []
    road.serve(2.0, num_unanswered=MAX_UNANSWERED)
    assert len(road.socket.sent) == 1


def test_the_process_is_sampled_once_a_second(monkeypatch):
    """Whatever is sent or not."""
    times = []
    monkeypatch.setattr(Probe, "sample", lambda _self: times.append(1))
    road = Road()
    for now_s in np.arange(10, 13, 0.05):
        road.serve(float(now_s), num_unanswered=99)
    assert len(times) == 3 / SAMPLE_PERIOD_S
    assert module.RING is emit.RING


# ---- the probe


@pytest.fixture
def sampled(monkeypatch):
    """What a probe emits, as kind -> values."""
    out = {}
    monkeypatch.setattr(probe, "scalar", lambda kind, value: out.setdefault(kind, []).append(value))
    return out


def test_a_sample_has_memory_and_cores(sampled):
    """Of this process, in bytes and cores; what there is none of is left out."""
    one = Probe()
    deadline = one._used_s + 0.002
    while probe.time.process_time() < deadline:
        pass
    one.sample()
    assert sampled[Kind.MEMORY_RSS][0] > 1_000_000
    assert 0 < sampled[Kind.CPU][0] < 64
    assert Kind.MEMORY_DEVICE not in sampled


def test_a_process_that_cannot_be_sampled_is_left_alone(sampled, monkeypatch, caplog):
    """It is said once, and the agent goes on."""
    one = Probe()

    def refuse():
        raise RuntimeError("no")

    monkeypatch.setattr(one._process, "memory_info", refuse)
    one.sample()
    one.sample()
    assert sampled == {}
    assert len(caplog.records) == 1


def test_a_gpu_that_is_in_use_is_sampled(sampled, monkeypatch):
    """By what torch holds of it, without asking the driver."""
    has = SimpleNamespace(total_memory=200)
    cuda = {"is_initialized": True, "memory_reserved": 123, "memory_allocated": 45}
    for name, value in cuda.items():
        monkeypatch.setattr(probe.torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(probe.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(probe.torch.cuda, "get_device_properties", lambda _: has)
    Probe().sample()
    assert sampled[Kind.MEMORY_DEVICE] == [123]
    assert sampled[Kind.MEMORY_DEVICE_USED] == [45]
    assert sampled[Kind.MEMORY_DEVICE_LIMIT] == [200]
    assert sampled[Kind.MEMORY_PEAK][0] > 0
