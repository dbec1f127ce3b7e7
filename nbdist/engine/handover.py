"""The engine's side of a hand-over: digests of names, names offered, names received.

Runs in the engine's main thread. The bytes go over the group, whose sockets know no authentication;
their digest goes over the supervisor's, and nothing is unpacked that does not match it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.engine.digests import fingerprint
from nbdist.engine.namespace import pack_names, take_names, user_names
from nbdist.engine.works import WORKS
from nbdist.protocol import events as ev
from nbdist.protocol import values
from nbdist.protocol.ids import Generation, Slot
from nbdist.protocol.runs import TRAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.engine.group import Groups
    from nbdist.engine.runs import Runs
    from nbdist.protocol import orders as od

TRANSFER_LIMIT = timedelta(minutes=10)
"""For one receiver; the supervisor's own limit for the whole hand-over comes first."""
log = logging.getLogger(__name__)


class Giving:
    """Gives and takes names.

    Args:
        slot: this engine's.
        user_ns: the user's variables.
        hidden: names that are not the user's.
        groups, runs: this engine's.
        tell: sends an event to the supervisor.
    """

    def __init__(
        self,
        slot: Slot,
        user_ns: dict[str, Any],
        hidden: Iterable[str],
        *,
        groups: Groups,
        runs: Runs,
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._slot, self._user_ns, self._hidden = slot, user_ns, set(hidden)
        self._groups, self._runs, self._tell = groups, runs, tell

    def fingerprint(self, order: od.FingerprintNames) -> None:
        """Report digests of the user's names.

        But for what the present trainer carries, and what the cell that trains has bound itself.
        """
        owned = self._runs.owned()
        digests = {
            name: fingerprint(self._user_ns[name])
            for name in user_names(self._user_ns, self._hidden)
            if id(self._user_ns[name]) not in owned and not self._runs.is_of_the_loop(name)
        }
        self._tell(
            ev.NamesFingerprinted(slot=self._slot, generation=order.generation, digests=digests)
        )

    def offer(self, order: od.OfferNames) -> None:
        """Pack names, report their digest, send the bytes.

        Nothing is sent where the trainer cannot be packed: then nobody is to receive.
        """
        data, failed, digest = self._pack(order.names)
        self._tell(
            ev.NamesOffered(
                slot=self._slot,
                generation=order.generation,
                sha256=hashlib.sha256(data).hexdigest(),
                num_bytes=len(data),
                failed=failed,
                trainer_digest=digest,
            )
        )
        if TRAINER in failed:
            return
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            for receiver in order.receivers:
                self._transfer(partial(dist.isend, tensor, receiver))
        except RuntimeError as error:
            self._broke_off(error)

    def receive(self, order: od.ReceiveNames) -> None:
        """Take what was announced, if it is what was announced."""
        tensor = torch.empty(order.num_bytes, dtype=torch.uint8, device="cpu")
        try:
            self._transfer(partial(dist.irecv, tensor, order.donor))
        except RuntimeError as error:
            self._broke_off(error)
            return
        data, digest = tensor.numpy().tobytes(), ""
        if hashlib.sha256(data).hexdigest() == order.sha256:
            failed, digest = self._take(data, order.names)
        else:
            failed = dict.fromkeys(order.names, "what arrived is not what was sent")
        self._tell(
            ev.NamesReceived(
                slot=self._slot, generation=order.generation, failed=failed, trainer_digest=digest
            )
        )

    def _pack(self, names: tuple[str, ...]) -> tuple[bytes, dict[str, str], str]:
        data, failed = pack_names(self._user_ns, [n for n in names if n != TRAINER])
        state, digest = b"", ""
        try:
            state, digest = self._runs.offer() if TRAINER in names else (b"", "")
        except Exception as error:  # the user's state_dict() may raise anything
            log.exception("the trainer's state could not be packed")
            failed[TRAINER] = f"{type(error).__name__}: {error}"
        return values.pack((state, data)), failed, digest

    def _take(self, packed: bytes, names: tuple[str, ...]) -> tuple[dict[str, str], str]:
        state, data = values.unpack(packed)
        failed = take_names(self._user_ns, data, [n for n in names if n != TRAINER])
        if TRAINER not in names:
            return failed, ""
        try:
            return failed, self._runs.receive(state)
        except Exception as error:
            log.exception("the trainer's state could not be taken over")
            return failed | {TRAINER: f"{type(error).__name__}: {error}"}, ""

    def _transfer(self, begin: Callable[[], Any]) -> None:
        """Send or receive."""
        WORKS.call(lambda: begin().wait(TRANSFER_LIMIT))

    def _broke_off(self, error: RuntimeError) -> None:
        """The other side died, most likely; the group is of no use any more."""
        log.warning("the hand-over broke off: %s", error)
        self._tell(
            ev.CollectiveFailed(
                slot=self._slot,
                pid=os.getpid(),
                generation=Generation(self._groups.generation),
                error=str(error),
            )
        )
