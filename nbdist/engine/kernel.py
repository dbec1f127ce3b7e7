"""ipyparallel's engine kernel, which tells the agent what cell runs and adds to the reply.

It adds the value of the last expression, or whether an error only says that the group was cut.
Runs in the main thread. Cells of other ipyparallel clients pass through untouched.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from traceback import clear_frames
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from ipyparallel.engine.kernel import IPythonParallelKernel

from nbdist.engine.group import Groups, is_communication_error
from nbdist.engine.namespace import to_cpu
from nbdist.errors import GroupGone, NbdistError, RunEnded, WrongState, leave_out_ours
from nbdist.protocol import events as ev
from nbdist.protocol import values
from nbdist.protocol.calls import METADATA
from nbdist.protocol.ids import CellId, Generation, Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.engine.agent import Agent
    from nbdist.engine.runs import Runs

CUT_LIMIT_S = 1.0
"""A failed collective waits this long for the group's cut; then it is an error of its own."""
MAX_RECURSION_FRAMES = 20
MAX_VALUE_BYTES = 1_000_000
"""The value of a cell's last expression travels with the reply up to this size."""
_TOO_LATE = GroupGone("the group of this cell broke before the cell came here; it was not begun")
"""Of a cell that came when its group was gone: in none, or in the next, it is not what it was meant
to be."""


class CellKernel(IPythonParallelKernel):  # type: ignore[misc]
    """Kernel of one engine; `bind` gives it its parts before the first cell."""

    agent: Agent | None = None
    groups: Groups | None = None
    runs: Runs | None = None
    slot = Slot(-1)

    def bind(self, slot: Slot, agent: Agent, groups: Groups, runs: Runs) -> None:
        """Give it what it reports to."""
        self.slot, self.agent, self.groups, self.runs = slot, agent, groups, runs
        self.shell.set_custom_exc((Exception,), self._show_error)

    async def do_execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell.

        The reply has our part under `METADATA`, in `engine_info` where the cell failed.
        """
        ours = self.get_parent("shell").get("metadata", {}).get(METADATA, {})
        cell = ours.get("cell")
        if cell is None or self.agent is None or self.groups is None or self.runs is None:
            return dict(await super().do_execute(*args, **kwargs))
        if ours["generation"] is not None and self.groups.has_left(ours["generation"]):
            return self._failure(_TOO_LATE, released=True, is_begun=False)
        generation = self.groups.generation
        # An engine's history has no reader, would keep every result, and formats errors twice.
        kwargs["store_history"] = False
        self.agent.cell = CellId(cell)
        self.runs.begin_cell(CellId(cell), ours["over"])
        try:
            with self._main_thread_known():
                reply = dict(await super().do_execute(*args, **kwargs))
        finally:
            self.agent.leave_cell()
            result = self.shell.last_execution_result
            self.runs.end_cell(_error_of(result))
        self.shell.last_execution_result = None
        if (wrong := self.runs.restore_name()) and reply["status"] == "ok":
            self.agent.tell(ev.CellFailedOnRank(slot=self.slot, cell=CellId(cell)))
            return self._failure(WrongState(wrong), released=False)
        if reply["status"] == "ok":
            reply[METADATA] = _value(result.result if result is not None else None)
            return reply
        error = _error_of(result)
        is_same = generation == self.groups.generation or isinstance(error, RunEnded)
        released = is_same and self._is_released(error)
        reply.setdefault("engine_info", {})[METADATA] = {"released": released}
        if error is not None:
            self._explain(reply, error)
        if not released:
            self.agent.tell(ev.CellFailedOnRank(slot=self.slot, cell=CellId(cell)))
        return reply

    def _failure(self, error: NbdistError, **about: bool) -> dict[str, Any]:
        """The reply of a cell that failed without an error of its own."""
        kind, text = type(error).__name__, str(error)
        return {
            "status": "error",
            "ename": kind,
            "evalue": text,
            "traceback": [f"{kind}: {text}"],
            "engine_info": {**self.get_engine_info("execute"), METADATA: about},
        }

    def _abort_queues(self, *_args: Any, **_kwargs: Any) -> None:
        """A cell that fails takes no other with it: what is queued here is not of its notebook run.

        The kernel sends a cell when the one before is over for it; a rank may be late.
        """

    @contextlib.contextmanager
    def _main_thread_known(self) -> Iterator[None]:
        """ipykernel 7 asks a thread that ipyparallel's engines lack which thread runs cells.

        It does so for cells with `await` only, which would otherwise end without any reply.
        """
        if getattr(self, "shell_channel_thread", self) is not None:  # ipykernel 6, or cured
            yield
            return
        stand_in: Any = SimpleNamespace(parent_thread=threading.main_thread())
        self.shell_channel_thread = stand_in
        try:
            yield
        finally:
            self.shell_channel_thread = None

    def _is_released(self, error: BaseException | None) -> bool:
        """Whether an error only says that this rank waited in a group that was cut.

        The neighbour of a rank that died hears of it before anybody else: then the supervisor is
        told, and the cut waited for. A group in which a collective failed is of no use any more,
        whatever the cause.
        """
        if isinstance(error, RunEnded):
            return True
        if self.groups is None or self.agent is None or not is_communication_error(error):
            return False
        if self.groups.cut_generation != self.groups.generation:
            generation = Generation(self.groups.generation)
            self.agent.tell(
                ev.CollectiveFailed(
                    slot=self.slot, pid=os.getpid(), generation=generation, error=str(error)
                )
            )
        return self.groups.wait_cut(CUT_LIMIT_S)

    def _show_error(
        self, shell: Any, kind: Any, error: Any, traceback: Any, tb_offset: int | None = None
    ) -> None:
        """IPython's way of showing an error, but for one that is a mere consequence.

        To format that one would cost 0.1 s and more.
        """
        if self.runs is not None:
            self.runs.cell_raised(error)
        if self._is_released(error):
            clear_frames(traceback)  # they hold the group, in a cycle with IPython's own frame
            shell._last_traceback = [f"{kind.__name__}: {error}"]  # noqa: SLF001 - what the reply takes it from
        else:
            if isinstance(error, RecursionError):
                _shorten(traceback)
            leave_out_ours(traceback)
            shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

    def _explain(self, reply: dict[str, Any], error: BaseException) -> None:
        """Say `GroupGone` where native code could only say that it does not know a group."""
        explained = self.groups.explain(error) if self.groups is not None else error
        if isinstance(explained, GroupGone) and explained is not error:
            reply["ename"], reply["evalue"] = "GroupGone", str(explained)
            reply["traceback"] = [*reply["traceback"], f"GroupGone: {explained}"]


def _error_of(result: Any) -> BaseException | None:
    """What a cell raised."""
    if result is None:
        return None
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def _shorten(traceback: TracebackType | None) -> None:
    """Leave the first frames of an endless recursion: formatting thousands takes half a minute."""
    for _ in range(MAX_RECURSION_FRAMES):
        if traceback is None:
            return
        traceback = traceback.tb_next
    if traceback is not None:
        traceback.tb_next = None


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
            "not_sent": f"a {type(value).__name__} of {size} stays on its engine; "
            "fetch it with pull"
        }
    return {"value": base64.b64encode(packed).decode()}
