"""The ipyparallel client: runs code on one engine, calls a function on some.

ipyparallel's own views send on the bare socket whose stream they read. Such a send can swallow the
notice of a reply that came meanwhile, and the client then waits for ever (ipyparallel#373). Here
everything is sent on the stream, which looks for replies after each send.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellFailed, RankError, WrongState, headline
from nbdist.protocol.ids import EngineId

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path


REGISTERED_LIMIT_S = 5.0
CHECK_PERIOD_S = 0.05


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
        uuid = client._engines.get(engine_id)  # noqa: SLF001 - shown nowhere else
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

    def wait_known(self, engine_id: EngineId, is_gone: Callable[[], bool]) -> bool:
        """Wait until ipyparallel's notice of a new engine has come, soon after the supervisor's."""
        known: Container[EngineId] = self.connect()._engines  # noqa: SLF001 - as above
        deadline = time.monotonic() + REGISTERED_LIMIT_S
        while engine_id not in known and not is_gone() and time.monotonic() < deadline:
            time.sleep(0.002)
        return engine_id in known

    def call(
        self,
        engines: dict[int, EngineId],
        function: str,
        *args: Any,
        check: Callable[[], None],
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Call a function of `protocol.calls` on engines (rank -> engine), return what each did.

        Args:
            engines: where.
            function: its name.
            *args: of the function.
            check: called while waiting; raises where waiting is of no use.
            **kwargs: of the function.

        Raises:
            CellFailed: it raised on one of them.
            WrongState: ipyparallel does not know one of them.
        """
        import ipyparallel as ipp  # noqa: PLC0415 - as above

        client = self.connect()
        for rank, engine_id in engines.items():
            if not self.wait_known(engine_id, lambda: False):
                raise WrongState(f"the engine of rank {rank} is gone; %dist_status shows the world")
        view = client.direct_view(list(engines.values()))
        view._socket = client._mux_stream  # noqa: SLF001 - see above
        answers = view.apply_async(ipp.Reference(function), *args, **kwargs)
        while not answers.wait(CHECK_PERIOD_S):
            check()
        try:
            return dict(zip(engines, answers.get(timeout=0), strict=True))
        except ipp.error.CompositeError as error:
            raise _failed(engines, error.elist) from None

    def close(self) -> None:
        """Close its sockets and end its thread."""
        with self._lock:
            if self._client is not None:
                self._client.close(linger=0)
                self._client = None


def _failed(engines: dict[int, EngineId], errors: list[tuple[Any, ...]]) -> CellFailed:
    ranks = {engine_id: rank for rank, engine_id in engines.items()}
    found: dict[int, RankError] = {}
    for name, text, _, info in errors:
        rank = ranks.get((info or {}).get("engine_id", EngineId(-1)), -1)
        found[rank] = RankError(rank, str(name), str(text), [f"{name}: {text}"])
    return CellFailed(headline(found), dict(sorted(found.items())))
