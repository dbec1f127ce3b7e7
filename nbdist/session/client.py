"""The ipyparallel client: runs code on one engine, calls a function on some.

ipyparallel's own views send on the bare socket whose stream they read. Such a send can swallow the
notice of a reply that came meanwhile, and the client then waits for ever (ipyparallel#373). Here
everything is sent on the stream, which looks for replies after each send.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, RankError, WrongState
from nbdist.protocol.ids import EngineId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


REGISTERED_LIMIT_S = 5.0
CALL_LIMIT_S = 120.0


class EngineClient:
    """Connected on first use; for any thread."""

    def __init__(self, connection_file: Path) -> None:
        self._connection_file = connection_file
        self._client: Any = None
        self._lock = threading.Lock()

    def connect(self) -> Any:
        """The ipyparallel client."""
        with self._lock:
            if self._client is None:
                import ipyparallel as ipp  # noqa: PLC0415 - half a second, spent while the engines start

                self._client = ipp.Client(str(self._connection_file))
            return self._client

    def execute(
        self, engine_id: EngineId, code: str, metadata: dict[str, Any], hook: Callable[[Any], None]
    ) -> Any:
        """Send code to an engine; a future of the reply, or None where the engine is gone.

        Args:
            engine_id: where.
            code: source.
            metadata: of the request.
            hook: called with the future before anything is sent.
        """
        client = self.connect()
        uuid = self._uuid(engine_id)
        if uuid is None:
            return None
        return client.send_execute_request(
            client._mux_stream,  # noqa: SLF001 - see above
            code,
            silent=False,
            metadata=metadata,
            ident=uuid.encode(),
            message_future_hook=hook,
        )

    def call(
        self, engines: dict[int, EngineId], function: str, *args: Any, **kwargs: Any
    ) -> dict[int, Any]:
        """Call a function of `protocol.calls` on engines (rank -> engine); what each returned.

        Raises:
            CellFailed: it raised on one of them.
        """
        import ipyparallel as ipp  # noqa: PLC0415 - as above

        client, ranks = self.connect(), list(engines)
        for rank, engine_id in engines.items():
            if self._uuid(engine_id) is None:
                raise WrongState(f"the engine of rank {rank} is gone; %dist_status shows the world")
        view = client.direct_view(list(engines.values()))
        view._socket = client._mux_stream  # noqa: SLF001 - see above
        answers = view.apply_async(ipp.Reference(function), *args, **kwargs)
        try:
            return dict(zip(ranks, answers.get(timeout=CALL_LIMIT_S), strict=True))
        except ipp.error.CompositeError as error:
            raise _failed(engines, error.elist) from None

    def close(self) -> None:
        """Close its sockets and end its thread."""
        with self._lock:
            if self._client is not None:
                self._client.close(linger=0)
                self._client = None

    def _uuid(self, engine_id: EngineId) -> str | None:
        """ipyparallel's name of an engine; its notice may come a little after the supervisor's."""
        known: Sequence[Any] = self._client._engines  # noqa: SLF001 - shown nowhere else
        deadline = time.monotonic() + REGISTERED_LIMIT_S
        while engine_id not in known and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._client._engines.get(engine_id)  # type: ignore[no-any-return]  # noqa: SLF001 - as above


def _failed(engines: dict[int, EngineId], errors: list[tuple[Any, ...]]) -> CellFailed:
    ranks = {engine_id: rank for rank, engine_id in engines.items()}
    found: dict[int, RankError] = {}
    for name, text, traceback, info in errors:
        rank = ranks.get((info or {}).get("engine_id", EngineId(-1)), -1)
        found[rank] = RankError(rank, str(name), str(text), str(traceback).splitlines())
    return CellFailed(str(next(iter(found.values()))), dict(sorted(found.items())))
