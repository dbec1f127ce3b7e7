"""The one socket on which kernels and agents reach the supervisor.

Nobody without the cluster's key comes in.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import zmq
from zmq.auth.base import Authenticator

from nbdist.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from nbdist.rundir import Keys, RunDir

DOMAIN = "nbdist"
MAX_MESSAGES = 256
"""Taken from the socket at a time, so that a flood leaves room for the clock."""

log = logging.getLogger(__name__)


class Door:
    """A ROUTER with CURVE; clients must prove to hold the cluster's client key."""

    def __init__(self, context: zmq.Context[Any], rundir: RunDir, keys: Keys) -> None:
        self._authenticator = Authenticator(context, encoding="utf-8", log=log)
        self._authenticator.start()
        only = _OnlyKey(keys.client_public.encode())
        self._authenticator.configure_curve_callback(DOMAIN, credentials_provider=only)
        self.knocking = self._authenticator.zap_socket
        """Readable when a client wants to be let in."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_secretkey = keys.server_secret.encode()
        self.socket.curve_publickey = keys.server_public.encode()
        self.socket.zap_domain = DOMAIN.encode()
        self.socket.router_handover = True  # a kernel that comes back has its old identity
        old_mask = os.umask(0o177)
        self.socket.bind(rundir.endpoint)
        os.umask(old_mask)

    def let_in(self) -> None:
        """Judge a client that knocks."""
        coroutine = self._authenticator.handle_zap_message(self.knocking.recv_multipart())
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise RuntimeError("the authenticator waited for something")

    def messages(self) -> Iterator[tuple[bytes, bytes]]:
        """Identity and content of what waits, up to a number."""
        for _ in range(MAX_MESSAGES):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """Send, if the client is there."""
        self.socket.send_multipart([identity, wire.encode(message)])


class _OnlyKey:
    """Lets in whoever proves to hold one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - zmq's interface
        """Whether a client's public key (Z85) may connect."""
        return key == self._key
