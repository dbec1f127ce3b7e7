"""ipyparallel's engine kernel, which tells the agent what cell runs and adds what nbdist wants to know to the reply.

Runs in the main thread. Cells of other ipyparallel clients pass through untouched.
"""

from __future__ import annotations

import base64
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel

from nbdist.engine.agent import Agent
from nbdist.engine.group import Groups, is_communication_error
from nbdist.engine.namespace import to_cpu
from nbdist.errors import GroupGone
from nbdist.protocol import events as ev
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.protocol.ids import CellId, Slot

MAX_VALUE_BYTES = 1_000_000
"""The value of a cell's last expression travels with the reply up to this size."""


class CellKernel(IPythonParallelKernel):
    """Kernel of one engine; `bind` gives it its parts before the first cell."""

    agent: Agent | None = None
    groups: Groups | None = None
    slot = Slot(-1)

    def bind(self, slot: Slot, agent: Agent, groups: Groups) -> None:
        """Give it what it reports to."""
        self.slot, self.agent, self.groups = slot, agent, groups

    async def do_execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell. The reply has our part under `METADATA`, in `engine_info` where the cell failed."""
        cell = self.get_parent("shell").get("metadata", {}).get(METADATA, {}).get("cell")
        if cell is None or self.agent is None or self.groups is None:
            return dict(await super().do_execute(*args, **kwargs))
        generation = self.groups.generation
        self.agent.cell = CellId(cell)
        try:
            reply = dict(await super().do_execute(*args, **kwargs))
        finally:
            self.agent.cell = None
        result = self.shell.last_execution_result
        self.shell.last_execution_result = None
        if reply["status"] == "ok":
            reply[METADATA] = _value(result.result if result is not None else None)
            return reply
        error = (result.error_before_exec or result.error_in_exec) if result is not None else None
        released = self.groups.cut_generation == generation and is_communication_error(error)
        reply.setdefault("engine_info", {})[METADATA] = {"released": released}
        if error is not None:
            self._explain(reply, error)
        if not released:
            self.agent.tell(ev.CellFailedOnRank(slot=self.slot, cell=CellId(cell)))
        return reply

    def _explain(self, reply: dict[str, Any], error: BaseException) -> None:
        """Say `GroupGone` where native code could only say that it does not know a group."""
        explained = self.groups.explain(error) if self.groups is not None else error
        if isinstance(explained, GroupGone) and explained is not error:
            reply["ename"], reply["evalue"] = "GroupGone", str(explained)
            reply["traceback"] = [*reply["traceback"], f"GroupGone: {explained}"]


def _value(value: Any) -> dict[str, str]:
    """The value of a cell's last expression, packed; or why it stays here."""
    if value is None:
        return {}
    try:
        packed = values.pack(to_cpu(value))
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled; told as the reason
        return {
            "not_sent": f"a {type(value).__name__} cannot be sent: {type(error).__name__}: {error}"
        }
    if len(packed) > MAX_VALUE_BYTES:
        size = f"{len(packed) / 1e6:.1f} MB"
        return {
            "not_sent": f"a {type(value).__name__} of {size} stays on its engine; fetch it with pull"
        }
    return {"value": base64.b64encode(packed).decode()}
