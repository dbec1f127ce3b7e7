"""The wrapper around ipyparallel's controller: the ports that it hands out."""

from __future__ import annotations

import errno
import socket
import sys

import pytest
import zmq

from nbdist.config import LOOPBACK
from nbdist.supervisor import controller


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="holds on Linux only")
def test_a_port_is_held_from_its_choice_to_its_use(monkeypatch):
    """accelerate#74, #508, #3245, snowfall#152: between the two nobody is given it, nor can take
    it; ZMQ can."""
    holders = []
    monkeypatch.setattr(controller, "_holders", holders)
    ports = controller.hold_ports(3)
    try:
        assert len(set(ports)) == 3
        with socket.socket() as stranger, pytest.raises(OSError) as refused:  # noqa: PT011 - its number is looked at
            stranger.bind((LOOPBACK, ports[0]))
        assert refused.value.errno == errno.EADDRINUSE
        with zmq.Context() as context, context.socket(zmq.ROUTER) as ours:
            ours.bind(f"tcp://{LOOPBACK}:{ports[0]}")
            socket.create_connection((LOOPBACK, ports[0]), timeout=2).close()
    finally:
        for holder in holders:
            holder.close()
