"""The supervisor's two sockets to ipyparallel's hub.

It hears of engines that unregister on one, and unregisters dead ones on the other. Engines run
without ipyparallel's nanny processes, so the hub would notice a death only by missed heartbeats.
The supervisor knows at once, from the zygote, and says it in the nanny's own words, so that every
ipyparallel client sees it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.session import Session

from nbdist.protocol.ids import EngineId

if TYPE_CHECKING:
    from nbdist.rundir import RunDir


class HubLink:
    """Connected to one controller."""

    def __init__(self, context: zmq.Context[Any], rundir: RunDir) -> None:
        info = json.loads(rundir.connection_file("client").read_text())
        engine_info = json.loads(rundir.connection_file("engine").read_text())
        self._session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
        self._registrar = self._connect(context, zmq.DEALER, engine_info, "registration")
        self.notices = self._connect(context, zmq.SUB, info, "notification")
        self.notices.setsockopt(zmq.SUBSCRIBE, b"")

    @classmethod
    def open(cls, context: zmq.Context[Any], rundir: RunDir) -> HubLink | None:
        """Connect, if the controller has written its connection files."""
        return cls(context, rundir) if rundir.is_controller_ready else None

    def unregister(self, engine_id: EngineId) -> None:
        """Say that an engine is gone."""
        self._session.send(self._registrar, "unregistration_request", content={"id": engine_id})

    def unregistered(self) -> EngineId | None:
        """The engine that the next notice says is gone, or None where it says something else."""
        _, frames = self._session.feed_identities(self.notices.recv_multipart())
        message = self._session.deserialize(frames)
        if message["msg_type"] != "unregistration_notification":
            return None
        return EngineId(int(message["content"]["id"]))

    def close(self) -> None:
        """Close both sockets."""
        self._registrar.close(0)
        self.notices.close(0)

    def _connect(
        self, context: zmq.Context[Any], kind: int, info: dict[str, Any], channel: str
    ) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = info["curve_serverkey"].encode()
        socket.connect(f"{info['interface']}:{info[channel]}")
        return socket
