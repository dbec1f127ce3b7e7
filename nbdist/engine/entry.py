"""An engine's process: builds it, and is where orders and the kernel's calls land.

All of it runs in the main thread. Started by the zygote (fork) or as `python -m nbdist.engine`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import ipyparallel.engine.app as engine_app
import numpy as np
import torch
import torch.distributed as dist

from nbdist.engine import rebind
from nbdist.engine.agent import Agent
from nbdist.engine.digests import parameters_digest
from nbdist.engine.group import Groups
from nbdist.engine.handover import Giving
from nbdist.engine.kernel import CellKernel
from nbdist.engine.namespace import push_again, to_cpu, user_names
from nbdist.engine.output import open_log
from nbdist.engine.port import is_trainer
from nbdist.engine.runs import Runs
from nbdist.engine.whereabouts import Whereabouts
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol import runs as rn
from nbdist.protocol import values
from nbdist.protocol.ids import EngineId, Generation, Slot
from nbdist.rundir import log_mark

if TYPE_CHECKING:
    from nbdist.rundir import RunDir

log = logging.getLogger(__name__)
_engine: Engine | None = None


class EngineApp(engine_app.IPEngine):  # type: ignore[misc]
    """ipyparallel's engine, which becomes ours once it is registered."""

    rundir: RunDir
    slot: Slot

    def init_signal(self) -> None:
        """SIGINT as ipyparallel has it; SIGTERM ends the process at once, in a collective too."""
        signal.signal(signal.SIGINT, self._signal_sigint)

    def redirect_output(self, iopub_socket: Any) -> None:
        """As ipyparallel's, without its stray print of each log handler."""
        handlers, self.log.handlers = self.log.handlers, []
        super().redirect_output(iopub_socket)
        self.log.handlers = handlers

    async def complete_registration(self, *args: Any, **kwargs: Any) -> None:
        """Registered: start the agent."""
        await super().complete_registration(*args, **kwargs)
        global _engine  # noqa: PLW0603 - one process, one engine; calls of the kernel find it here
        _engine = Engine(self)
        _engine.start()


class Engine:
    """What orders act on."""

    def __init__(self, app: EngineApp) -> None:
        self._app = app
        self._shell = app.kernel.shell
        self._hidden = set(self._shell.user_ns)
        self._shell.ask_exit = _refuse_exit
        self._slot = app.slot
        self._config, _, _ = app.rundir.read()
        self._replayed = 0
        self._groups = Groups()
        self._groups.install()
        self._device = torch.device("cuda:0" if torch.cuda.device_count() else "cpu")
        self._agent = Agent(
            app.rundir,
            app.slot,
            groups=self._groups,
            whereabouts=Whereabouts(self._shell.user_ns),
            post=self._post,
        )
        self._orders: deque[od.AgentOrder] = deque()
        self._is_draining = False
        self._runs = Runs(
            app.slot, self._groups, self._shell.user_ns, tell=self._agent.tell, poll=self._poll
        )
        self._agent.runs = self._runs
        self._giving = Giving(
            app.slot,
            self._shell.user_ns,
            self._hidden,
            groups=self._groups,
            runs=self._runs,
            tell=self._agent.tell,
        )
        app.kernel.bind(app.slot, self._agent, self._groups, self._runs)

    def start(self) -> None:
        """Say hello."""
        self._bind_names(rank=0, world_size=1)
        self._agent.start(self._hello())

    # ---- the main thread takes orders between cells, and in a cell's own training loop

    def _post(self, order: od.AgentOrder) -> None:
        """From the agent's thread."""
        self._orders.append(order)
        self._runs.wake()
        self._app.loop.add_callback(self._drain)

    async def _drain(self) -> None:
        if (
            self._is_draining
        ):  # a replay gives way to the loop; what came after it waits for its end
            return
        self._is_draining = True
        try:
            while self._orders:
                await self._handle(self._orders.popleft())
        finally:
            self._is_draining = False

    def _poll(self) -> None:
        """The same without the event loop, which stands while a cell's own loop trains."""
        while self._orders and not self._is_draining:
            coroutine = self._handle(self._orders.popleft())
            with contextlib.suppress(StopIteration):
                coroutine.send(None)
                raise RuntimeError("an order waited for the event loop inside a training loop")

    async def _handle(self, order: od.AgentOrder) -> None:
        """Carry out an order.

        An engine that cannot is of no use: it ends, and its seat is filled again.
        """
        try:
            await self._carry_out(order)
        except Exception:
            log.exception("%s could not be carried out", type(order).__name__)
            os._exit(70)

    async def _carry_out(self, order: od.AgentOrder) -> None:
        match order:
            case od.ReplayJournal():
                await self._replay(order)
            case od.BreakGroup(generation=generation):
                self._runs.stand()
                self._forget_errors()
                self._groups.destroy()
                self._agent.hello = self._hello()
                self._agent.tell(
                    ev.GroupBroken(slot=self._slot, pid=os.getpid(), generation=generation)
                )
            case od.FormGroup():
                self._form(order)
            case od.FingerprintNames():
                self._giving.fingerprint(order)
            case od.OfferNames():
                self._giving.offer(order)
            case od.ReceiveNames():
                self._giving.receive(order)
            case od.EndEngine():
                sys.stdout.flush()
                sys.stderr.flush()
                os.killpg(os.getpid(), signal.SIGKILL)  # with what the user's code has started
            case rn.BindRun() | rn.GoOn() | rn.HoldRun() | rn.EndRun():
                self._runs.take(order)

    def push(self, packed: dict[str, bytes]) -> None:
        """Bind names to packed values."""
        self._runs.check_names(packed)
        for name, data in packed.items():
            self._shell.user_ns[name] = values.unpack(data)

    def pull(self, name: str, *, as_numpy: bool) -> bytes:
        """A packed value; raises NameError where the name is not bound here."""
        if name not in self._shell.user_ns:
            raise NameError(f"name {name!r} is not defined")
        value = to_cpu(self._shell.user_ns[name])
        if as_numpy and isinstance(value, torch.Tensor):
            value = value.numpy()
        return values.pack_one(name, value)

    def names(self) -> dict[str, Any]:
        """The user's variables: neither ours nor private ones."""
        return {n: self._shell.user_ns[n] for n in user_names(self._shell.user_ns, self._hidden)}

    def parameter_digest(self, name: str) -> str:
        """Digest of a trainer's or a module's parameters.

        Raises:
            NameError: the name is not bound here.
            TypeError: it has no parameters.
        """
        if name not in self._shell.user_ns:
            raise NameError(f"name {name!r} is not defined")
        value = self._shell.user_ns[name]
        if is_trainer(value):
            return value.parameter_digest()
        if isinstance(value, torch.nn.Module):
            return parameters_digest(value.parameters())
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind}: a Trainer or a Module has parameters")

    # ---- orders

    def _form(self, order: od.FormGroup) -> None:
        membership = order.membership
        rank = membership.rank_of(self._slot)
        try:
            self._groups.destroy()
            self._groups.form(order, rank, self._backend)
        except Exception as error:  # noqa: BLE001 - torch raises many kinds; reported, and the next generation is formed
            failure = f"{type(error).__name__}: {error}"
        else:
            failure = ""
        if failure:
            log.warning("generation %s could not be formed: %s", membership.generation, failure)
            self._groups.destroy()
            self._agent.tell(
                ev.GroupFormFailed(
                    slot=self._slot,
                    pid=os.getpid(),
                    generation=membership.generation,
                    error=failure,
                )
            )
            return
        self._bind_names(rank=rank, world_size=membership.world_size)
        self._agent.hello = self._hello()
        self._agent.tell(
            ev.GroupFormed(
                slot=self._slot,
                pid=os.getpid(),
                generation=membership.generation,
                cuttable=self._groups.is_cuttable,
                step=self._runs.prepare(order.run),
            )
        )

    async def _replay(self, order: od.ReplayJournal) -> None:
        failed: list[str] = []
        unbound: dict[str, str] = {}
        if order.entries:
            self._groups.form_fake(order.rank, order.world_size)
            rebind.silence()
            self._bind_names(rank=order.rank, world_size=order.world_size)
            self._runs.is_replaying = True
            with contextlib.redirect_stdout(open_log()), contextlib.redirect_stderr(open_log()):
                self._shell.display_pub.register_hook(_drop)
                for entry in order.entries:
                    push_again(self.push, entry.values, unbound)
                    failed += await self._replay_one(entry)
                self._shell.display_pub.unregister_hook(_drop)
            self._runs.is_replaying = False
            rebind.speak()
            self._groups.destroy()
        self._replayed = order.until
        self._agent.hello = self._hello()
        self._agent.tell(
            ev.JournalReplayed(
                slot=self._slot, pid=os.getpid(), failed=(*failed, *unbound.values())
            )
        )

    async def _replay_one(self, entry: od.Entry) -> list[str]:
        if not entry.code.strip():
            return []
        first = entry.code.strip().splitlines()[0]
        pid, line = os.getpid(), first[:80]
        self._agent.tell_at_once(
            ev.ReplayBegins(slot=self._slot, pid=pid, cell=entry.cell, first_line=line)
        )
        result = await self._shell.run_cell_async(
            entry.code,
            store_history=False,
            silent=True,
            transformed_cell=self._shell.transform_cell(entry.code),
        )
        if result.success:
            return []
        error = result.error_before_exec or result.error_in_exec
        return [f"cell {first!r}: {type(error).__name__}: {error}"]

    # ---- helpers

    def _forget_errors(self) -> None:
        """IPython keeps the last error, and its frames keep the group that is to be destroyed."""
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        self._shell.InteractiveTB.tb = None

    @property
    def _backend(self) -> str:
        if self._config.backend != "auto":
            return self._config.backend
        return "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"

    def _hello(self) -> ev.EngineHello:
        return ev.EngineHello(
            slot=self._slot,
            pid=os.getpid(),
            engine_id=EngineId(self._app.id),
            host=socket.gethostname(),
            generation=Generation(self._groups.generation if dist.is_initialized() else 0),
            device=str(self._device),
            replayed=self._replayed,
        )

    def _bind_names(self, *, rank: int, world_size: int) -> None:
        ours = {
            "torch": torch,
            "dist": dist,
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "slot": int(self._slot),
            "device": self._device,
            "generation": self._groups.generation,
        }
        assert set(ours) == values.OURS
        self._shell.user_ns.update(ours)


def push(packed: dict[str, bytes]) -> None:
    """`protocol.calls.PUSH`."""
    present().push(packed)


def pull(name: str, *, as_numpy: bool = False) -> bytes:
    """`protocol.calls.PULL`."""
    return present().pull(name, as_numpy=as_numpy)


def parameter_digest(name: str) -> str:
    """`protocol.calls.PARAMETER_DIGEST`."""
    return present().parameter_digest(name)


def _refuse_exit() -> NoReturn:
    raise RuntimeError("exit and quit do not end an engine; %dist_kill and %dist_shutdown do")


def present() -> Engine:
    """This process's engine."""
    if _engine is None:
        raise RuntimeError("this process is no engine of nbdist")
    return _engine


def _drop(_message: dict[str, Any]) -> None:
    """A display hook that lets nothing through."""


def main(rundir: RunDir, slot: int, num_threads: int) -> int:
    """Be the engine of a slot until ordered to end; the process's exit code."""
    open_log().write(f"{log_mark(os.getpid())}\n")
    handler = logging.StreamHandler(open_log())
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    ours = logging.getLogger("nbdist")  # the root logger is the user's
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    faulthandler.enable(open_log())
    torch.set_num_threads(num_threads)
    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    np.random.seed(seed)  # the user's own code may use the old interface
    torch.manual_seed(seed)
    engine_app.Kernel = CellKernel  # ipyparallel makes its kernel by this name
    EngineApp.rundir, EngineApp.slot = rundir, Slot(slot)
    app = EngineApp.instance()
    app.initialize(
        [
            f"--file={rundir.connection_file('engine')}",
            f"--profile-dir={rundir.file('ipp')}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--IPEngine.timeout=20",
            "--IPEngine.out_stream_factory=nbdist.engine.output.LoggedStream",
            "--HistoryManager.enabled=False",
            "--InteractiveShell.cache_size=0",
            "--log-level=ERROR",
        ]
    )
    app.start()
    return 0
