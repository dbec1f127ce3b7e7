"""Has engines forked for the seats that want one. Called by the supervisor's one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.gpus import num_cores
from nbdist.processes import RUNDIR_VARIABLE
from nbdist.protocol import events as ev
from nbdist.supervisor.devices import engine_environment, offered_slots
from nbdist.supervisor.seats import SeatState

if TYPE_CHECKING:
    from nbdist.config import ClusterConfig
    from nbdist.protocol.ids import Slot
    from nbdist.rundir import RunDir
    from nbdist.supervisor.launch import Zygote
    from nbdist.supervisor.state import Machine


class Starter:
    """Of one cluster."""

    def __init__(
        self, rundir: RunDir, config: ClusterConfig, machine: Machine, zygote: Zygote
    ) -> None:
        self._rundir, self._config = rundir, config
        self._machine, self._zygote = machine, zygote
        self._wanted: list[Slot] = []

    def want(self, slot: Slot) -> None:
        """A process is wanted for a seat, as soon as there can be one."""
        self._wanted.append(slot)

    def begin_again(self) -> None:
        """Another zygote: orders may be lost with the one before; who sits is not forked again."""
        starting = self._machine.roster.in_state(SeatState.STARTING)
        self._wanted = [seat.slot for seat in starting if seat.pid is None]

    def start(self, now: float) -> None:
        """Order what is wanted; the zygote is ready."""
        wanted, self._wanted = dict.fromkeys(self._wanted), []
        for slot in wanted:
            seat = self._machine.seats.get(slot)
            if seat is None or seat.state is not SeatState.STARTING or seat.pid is not None:
                continue
            try:
                device = offered_slots(self._machine.size, self._config.devices)[slot]
            except (ValueError, IndexError) as error:
                event = ev.EngineStartFailed(slot=slot, reason=f"no device for it: {error}")
                self._machine.start_failed(event, now)
                continue
            threads = self._config.threads_per_engine
            threads = threads or max(1, num_cores() // self._machine.size)
            env = engine_environment(device, threads)
            env[RUNDIR_VARIABLE] = str(self._rundir.path)
            if (forked := self._zygote.start_engine(slot, env, threads)) is not None:
                self._machine.forked(ev.EngineForked(slot=forked.slot, pid=forked.pid))
