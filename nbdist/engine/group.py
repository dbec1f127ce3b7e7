"""Form and break the process group of a generation; to use an old one is an error, not a hang.

Runs in the engine's main thread, but for `cut`, which the agent's thread calls. Every gloo group
that is made in this process, the user's own and those of a mesh too, goes through one function of
torch (`_new_process_group_helper`); it is wrapped here to note the group's sockets. Two more are
wrapped so that a group of an earlier generation raises `GroupGone`. These three names are torch's
own; a test holds that they exist, and `install` refuses to start without them.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from nbdist.engine import rebind, sockets
from nbdist.engine.local_sum import LOCAL_SUM
from nbdist.engine.works import WORKS
from nbdist.errors import GroupGone

if TYPE_CHECKING:
    from nbdist.protocol.orders import FormGroup

FORM_TIMEOUT = timedelta(seconds=3)
"""A member that has not come by then does not come; the supervisor tells so long before."""
USER_TIMEOUT = timedelta(minutes=30)
"""torch's own default for collectives: one rank may prepare data for long while the others wait."""
STUCK_AFTER_S = 0.05
"""A collective that has not ended so long after its sockets were cut will not end."""
UNBLOCK_LIMIT_S = 1.0
"""How long the agent's thread tries to free a main thread that forms a group."""
NAMES_PER_GENERATION = 1_000_000
"""torch names groups by a counter; each generation starts at a multiple: no name comes twice."""

log = logging.getLogger(__name__)
_TRANSPORT = re.compile(r"gloo/|Connection (closed|reset) by")
_UNRESOLVED = re.compile(r"[Cc]ould not resolve the process group.*?(\d+)")


class Groups:
    """The groups of the present generation, in this engine."""

    def __init__(self) -> None:
        self.generation = 0
        self.pids: tuple[int, ...] = ()
        """The members' processes, in rank order."""
        self.is_cuttable = True
        self.cut_generation = 0
        """Newest generation that was cut."""
        self.others_come = False
        """Seats were being filled when the group was formed: another one follows."""
        self._was_cut = threading.Event()
        self._superseded = -1
        """Newest generation that nobody is to form any more."""
        self._forming_own = False
        self._forming: tuple[str, int, int] | None = None
        """Name, own rank and size of the group that the main thread is forming."""
        self._refs: list[sockets.SocketRef] = []
        self._stuck: list[tuple[Any, list[Any]]] = []
        """Groups that are kept until their last operations end."""
        self._gone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._store: Any = None
        self._store_at: tuple[str, int] | None = None

    def is_whole(self, generation: int) -> bool:
        """Whether the group of `generation` is the present one, formed and not cut."""
        is_present = generation == self.generation and dist.is_initialized()
        return is_present and self.cut_generation != generation

    # ---- form and break

    def form(self, order: FormGroup, rank: int, backend: str) -> None:
        """Become `rank` of the order's membership.

        Raises what torch raises where a member does not come.
        """
        membership = order.membership
        address = (order.store_host, order.store_port)
        if address != self._store_at:
            self._store = dist.TCPStore(*address, None, False, FORM_TIMEOUT, wait_for_workers=False)
            self._store_at = address
        WORKS.begin()
        self.generation, self.is_cuttable, self._refs = membership.generation, True, []
        self.pids = tuple(member.pid for member in membership.members)
        self.others_come = order.others_come
        self._was_cut.clear()
        distributed_c10d._world.group_count = membership.generation * NAMES_PER_GENERATION
        self._forming_own = True
        # Not by torch's own timeout: gloo's send and recv would keep it for the group's whole life.
        limit_s, generation = FORM_TIMEOUT.total_seconds(), self.generation
        in_time = threading.Timer(limit_s, self._give_up_forming, (generation,))
        in_time.name, in_time.daemon = "nbdist-forming", True
        in_time.start()
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"g{membership.generation}", self._store),
                rank=rank,
                world_size=membership.world_size,
                timeout=USER_TIMEOUT,
            )
        finally:
            in_time.cancel()
            self._forming_own = False
        LOCAL_SUM.begin(membership, rank)
        rebind.attach_all()

    def form_fake(self, rank: int, world_size: int) -> None:
        """A group whose collectives do nothing, for a replay."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def cut(self, generation: int) -> None:
        """Free whatever waits in a collective of `generation`.

        From the agent's thread; returns at once.
        """
        self._superseded = max(self._superseded, generation)  # before `_forming` is looked at
        if generation == self.generation:
            self.cut_generation = generation
            sockets.cut(list(self._refs))
            WORKS.give_up()
            self._was_cut.set()
            self._unblock()

    def _give_up_forming(self, generation: int) -> None:
        """A member has not come in time. From a thread of its own."""
        if self._forming_own and generation == self.generation:
            self._unblock()

    def _unblock(self) -> None:
        """Free the main thread where it waits for a member, gone now, to form a group."""
        forming = self._forming
        if forming is None or self._store_at is None:
            return
        name, rank, size = forming
        client = dist.TCPStore(*self._store_at, None, False, FORM_TIMEOUT, wait_for_workers=False)
        store = dist.PrefixStore(f"g{self.generation}", client)
        if not self._forming_own:  # torch keeps the user's groups below the default group
            store = dist.PrefixStore(f"{self.generation * NAMES_PER_GENERATION}/", store)
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", store))
        deadline = time.monotonic() + UNBLOCK_LIMIT_S
        while self._forming == forming and time.monotonic() < deadline:
            sockets.unblock_forming(store, rank, size)
            time.sleep(0.02)

    def wait_cut(self, timeout_s: float) -> bool:
        """Whether the present group has been cut, or is within the time."""
        self._was_cut.wait(timeout_s)
        return self.cut_generation == self.generation

    def has_left(self, generation: int) -> bool:
        """Whether the group of `generation` was broken and has been left here."""
        is_between = self.cut_generation == self.generation and not dist.is_initialized()
        return generation < self.generation or is_between

    def destroy(self) -> None:
        """Leave all groups, the user's own too. Must be over before the next group is formed."""
        if not dist.is_initialized():
            return
        self._gone.update(distributed_c10d._world.pg_map)
        rebind.detach_all()
        sockets.cut(self._refs)
        WORKS.give_up()
        LOCAL_SUM.end()
        self._keep_stuck()
        dist.destroy_process_group()
        if any(map(sockets.is_open, self._refs)):
            # An error's frames hold the group in a cycle. What was imported before the fork is
            # not looked at.
            gc.collect()
        if any(map(sockets.is_open, self._refs)):
            log.info("something still refers to the group of generation %s", self.generation)
        self._refs = []

    def _keep_stuck(self) -> None:
        """A group in which an operation never ends (`works`) cannot be destroyed: it would wait.

        It may be the default group, or one within it.
        """
        self._stuck = [(g, w) for g, w in self._stuck if not all(x.is_completed() for x in w)]
        if works := WORKS.take_stuck(STUCK_AFTER_S):
            log.warning("%s collectives of generation %s never end", len(works), self.generation)
            self._stuck.append((list(distributed_c10d._world.pg_map), works))

    # ---- what is wrapped in torch

    def install(self) -> None:
        """Wrap torch's three functions, and keep sockets from forked children. Once per process."""
        helper = distributed_c10d._new_process_group_helper
        not_in_group = distributed_c10d._rank_not_in_group
        resolve = device_mesh._resolve_process_group
        signature = inspect.signature(helper)

        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self._forming = (
                str(bound.arguments["group_name"]),
                bound.arguments["group_rank"],
                bound.arguments["group_size"],
            )
            try:
                if self._superseded >= self.generation:
                    raise dist.DistNetworkError(f"generation {self.generation} is broken already")
                group, store = helper(*bound.args, **bound.kwargs)
            finally:
                self._forming = None
            if store is not None:
                self._note(group, store)
            return group, store

        def rank_not_in_group(group: Any) -> bool:
            if group is not None and group in self._gone:
                raise GroupGone(self._advice("process group"))
            return bool(not_in_group(group))

        def resolve_process_group(name: Any) -> Any:
            try:
                return resolve(name)
            except RuntimeError as error:
                raise self.explain(error) from error

        distributed_c10d._new_process_group_helper = new_process_group_helper
        distributed_c10d._rank_not_in_group = rank_not_in_group
        distributed_c10d._resolve_process_group = resolve_process_group  # type: ignore[assignment]
        device_mesh._resolve_process_group = resolve_process_group  # type: ignore[assignment]
        os.register_at_fork(after_in_child=lambda: sockets.hide(self._refs))

    def explain(self, error: BaseException) -> BaseException:
        """`GroupGone` where native code misses a group of an earlier generation, else the error."""
        found = _UNRESOLVED.search(str(error))
        if found and int(found[1]) // NAMES_PER_GENERATION < self.generation:
            return GroupGone(self._advice("process group or mesh"))
        return error

    def _note(self, group: Any, store: Any) -> None:
        if "gloo" not in dist.get_backend_config(group):
            return
        try:
            refs = sockets.find(dist.PrefixStore("cpu/", store), group.rank(), group.size())
        except sockets.NotExact as problem:
            log.warning("a group of generation %s cannot be cut: %s", self.generation, problem)
            self.is_cuttable = False
            return
        sockets.close_on_exec(refs)
        self._refs.extend(refs)

    def _advice(self, what: str) -> str:
        return (
            f"this {what} belongs to an earlier generation; the present one is {self.generation}, "
            "and its default group is ready. Make your own again: dist.new_group(…), "
            "init_device_mesh(…), or run the cell that made it"
        )


def is_communication_error(error: BaseException | None) -> bool:
    """Whether an error says that a group is broken; by gloo's rule any later use fails too."""
    if isinstance(error, GroupGone):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _TRANSPORT.search(str(error)) is not None
