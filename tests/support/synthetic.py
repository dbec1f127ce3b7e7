"""A made-up run as frames: four ranks that train, one slow for a while, one killed and replaced.

No engines, no clock of its own: `frame` is told what time it is.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from nbdist.protocol import frames as fr
from nbdist.protocol import tables as tb
from nbdist.protocol.events import Incident
from nbdist.protocol.telemetry import Kind
from nbdist.protocol.traffic import Axis, Op, Road
from nbdist.supervisor.details import DETAILS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEP_S = 0.2
KILL_AT = 20.0
SLOW = (30.0, 45.0)
NUM_BUCKETS = 4
BUCKET_BYTES = 1.2 * 2**20
LENGTH_S = 1200.0
"""Of a notebook's run: on no machine is it over before a test has it end."""
SETUP = f"""
import threading, time
from synthetic import SyntheticFeed, SyntheticRun
from nbdist.views.dashboard import Dashboard, listen
listen()
orders = []
def kill(slot, pid, factor):
    orders.append((slot, pid))
feed = SyntheticFeed(SyntheticRun(length_s={LENGTH_S}), start=22.0)
dashboard = Dashboard(feed, actions={{"kill": kill}})
"""
"""A notebook's first cell."""
END = f"feed.start += {LENGTH_S}"
"""Its run is over."""


class SyntheticRun:
    """Its whole course, made at once; a frame shows a part of it."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        length_s: float = 60.0,
        seed: int = 0,
        step_s: float = STEP_S,
        has_details: bool = True,
    ) -> None:
        self.num_slots, self.length_s = num_slots, length_s
        self._share, self._has_details = step_s / STEP_S, has_details
        self._rng = np.random.default_rng(seed)
        self.tables: dict[str, dict[str, list[float]]] = {
            table: {column: [] for column in columns} for table, columns in tb.TABLES.items()
        }
        self._times: dict[str, list[float]] = {table: [] for table in tb.TABLES}
        self.incidents: list[Incident] = []
        self._build()
        self._arrays = {
            table: {column: np.array(values) for column, values in columns.items()}
            for table, columns in self.tables.items()
        }
        self._when = {table: np.array(times) for table, times in self._times.items()}

    def delay(self, slot: int, by_s: float) -> None:
        """In each step, this slot comes so much later to the common sums."""
        steps = self._arrays["steps"]
        steps["ready_at"][steps["slot"] == slot] += by_s

    def _add(self, table: str, when: float, **values: float) -> None:
        self._times[table].append(when)
        for column, known in self.tables[table].items():
            known.append(values.get(column, float("nan")))

    def _build(self) -> None:
        for slot in range(self.num_slots):
            self._seat(0.0, slot, "starting", 0)
            self._seat(0.8, slot, "member", 1)
        self._phase(0.0, "starting", 0, 0)
        self._phase(0.8, "running", 1, self.num_slots)
        at, step, generation = 1.0, 0, 1
        was_killed = False
        while at < self.length_s:
            if not was_killed and at >= KILL_AT:
                was_killed = True
                generation = self._kill(at)
                at += 0.21
                continue
            at = self._step(at, step, generation)
            step += 1
        self.num_steps = step
        for second in range(1, int(self.length_s)):
            self._hold(second)

    def _hold(self, at: float) -> None:
        """What engines hold: 30 MiB more once they train, and a little more at the most."""
        for slot in range(self.num_slots):
            mib = (410 if at > 1 else 380) + 7 * slot
            held = {Kind.MEMORY_RSS: mib, Kind.MEMORY_PEAK: mib + 12, Kind.MEMORY_LIMIT: 8192}
            for kind, value in held.items():
                if kind is not Kind.MEMORY_LIMIT or at == 1:
                    self._add("memory", at, at=at, slot=slot, kind=kind, bytes=value * 2**20)

    def _flow(self, when: float, road: Road, calls: int, payload: float, **where: float) -> None:
        """What a slot sends in a step by one kind of exchange."""
        self._add(
            "traffic",
            when,
            payload_bytes=payload,
            sent_bytes=road.sent_bytes(payload),
            op=road.op,
            axis=road.axis,
            ranks=road.num_ranks,
            calls=calls,
            **{"attempt": 0, "seconds": float("nan")} | where,
        )

    def _kill(self, at: float) -> int:
        victim = min(2, self.num_slots - 1)
        self._seat(at, victim, "empty", 0)
        self._phase(at, "breaking", 1, self.num_slots)
        self._phase(at + 0.02, "forming", 2, self.num_slots - 1)
        self._phase(at + 0.2, "running", 2, self.num_slots - 1)
        for slot in range(self.num_slots):
            if slot != victim:
                self._seat(at + 0.2, slot, "member", 2)
        self._seat(at + 0.3, victim, "starting", 0)
        self._seat(at + 1.1, victim, "member", 3)
        self._phase(at + 1.1, "running", 3, self.num_slots)
        whole = {"ranks": (victim,), "slots": (victim,), "began_at": at}
        self.incidents = [
            Incident(
                kind="lost",
                cause="SIGKILL (by the user)",
                step=94,
                generation_before=1,
                generation_after=2,
                detect_s=0.004,
                regroup_s=0.121,
                restore_s=0.012,
                stall_s=0.192,
                steps_repeated=1,
                **whole,
            ),
            Incident(
                kind="joined",
                cause="seat filled again",
                step=98,
                generation_before=2,
                generation_after=3,
                regroup_s=0.083,
                restore_s=0.045,
                stall_s=0.131,
                **(whole | {"began_at": at + 1.1}),
            ),
        ]
        return 2

    def _seat(self, at: float, slot: int, state: str, generation: int) -> None:
        rank = slot if state == "member" else -1
        place = tb.STATES.index(state)  # type: ignore[arg-type]
        self._add("seats", at, at=at, slot=slot, rank=rank, state=place, generation=generation)

    def _phase(self, at: float, phase: str, generation: int, size: int) -> None:
        place = tb.PHASES.index(phase)  # type: ignore[arg-type]
        self._add("phases", at, at=at, phase=place, generation=generation, world_size=size)

    def _members(self, at: float) -> list[int]:
        away = KILL_AT <= at < KILL_AT + 1.1
        victim = min(2, self.num_slots - 1)
        return [slot for slot in range(self.num_slots) if not (away and slot == victim)]

    def _step(self, at: float, step: int, generation: int) -> float:
        members = self._members(at)
        if generation == 2 and at >= KILL_AT + 1.1:
            generation = 3
        is_slow = SLOW[0] <= at < SLOW[1]
        usual = 0.14 * self._share
        compute = {s: usual * (1 + 0.03 * self._rng.standard_normal()) for s in members}
        if is_slow:
            compute[1] *= 2.5
        last = at + 0.005 * self._share + max(compute.values())
        end = last + 0.018 * self._share
        for slot in members:
            start, own = at + 0.002, compute[slot]
            middle, ready = start + own * 0.35, start + own
            if self._has_details:
                self._spans(step, slot, generation, at, start, middle, ready, end)
                where = {"step": step, "slot": slot, "generation": generation, "seconds": 0.03}
                road = Road(Op.ALL_REDUCE, Axis.DATA, len(members))
                self._flow(end, road, NUM_BUCKETS, NUM_BUCKETS * BUCKET_BYTES, **where)
            for bucket in range(NUM_BUCKETS if self._has_details else 0):
                got = middle + (ready - middle) * (bucket + 1) / NUM_BUCKETS
                others = max(
                    at + 0.002 + c * (0.35 + 0.65 * (bucket + 1) / NUM_BUCKETS)
                    for c in compute.values()
                )
                self._add(
                    "buckets",
                    end,
                    step=step,
                    ready_at=got,
                    launch_at=got + 0.0005,
                    done_at=others + 0.012,
                    size_bytes=BUCKET_BYTES,
                    slot=slot,
                    generation=generation,
                    attempt=0,
                    bucket=bucket,
                )
            self._add(
                "steps",
                end,
                step=step,
                ended_at=end,
                ready_at=ready,
                slot=slot,
                generation=generation,
                attempt=0,
                samples=16,
                step_s=end - at,
                compute_s=own,
                exposed_s=end - ready - 0.004,
                wait_s=last - ready,
                data_s=0.002,
                optimizer_s=0.004,
            )
        loss = 1.6 + 3.9 * np.exp(-step / 60) + 0.03 * self._rng.standard_normal()
        seconds = end - at if step != 95 else end - at + 0.2
        self._add(
            "rows",
            end,
            step=step,
            at=end,
            loss=loss,
            lr=3e-4,
            seconds=seconds,
            samples=16 * self.num_slots,
            generation=generation,
            world_size=len(members),
        )
        return end

    def _spans(self, step: int, slot: int, generation: int, *edges: float) -> None:
        at, start, middle, ready, end = edges
        parts = (
            (8, at, start),
            (3, start, middle),
            (4, middle, ready),
            (5, ready, end - 0.004),
            (6, end - 0.004, end),
        )
        for kind, began, ended in parts:
            self._add(
                "spans",
                end,
                step=step,
                began_at=began,
                ended_at=ended,
                slot=slot,
                generation=generation,
                attempt=0,
                kind=kind,
                ident=0 if kind < 5 else -1,
            )

    def frame(
        self,
        now: float,
        *,
        after: float = -1.0,
        seq: int = 1,
        num_slots: int | None = None,
        has_run: bool = True,
    ) -> bytes:
        """What is known at `now`; with `after`, what came since then.

        Args:
            now: second of the run.
            after: what was known before is left out; without it, the frame is a snapshot.
            seq: the frame's number.
            num_slots: as if only the first ones were there; None: all.
            has_run: False: before any run was begun.
        """
        is_snapshot = after < 0
        sent: dict[str, Any] = {}
        for table in tb.TABLES:
            times = self._when[table]
            chosen = (times > after) & (times <= now)
            if num_slots is not None and "slot" in self.tables[table]:
                chosen &= self._arrays[table]["slot"] < num_slots
            if is_snapshot and table in DETAILS:
                chosen &= times > now - 10
            if chosen.any():
                sent[table] = {c: v[chosen] for c, v in self._arrays[table].items()}
        header = self._header(now, after, seq, is_snapshot=is_snapshot)
        seats = header.world.seats[:num_slots]
        world = replace(header.world, seats=seats, size=len(seats))
        run = header.run if has_run else None
        return fr.pack(replace(header, world=world, run=run), sent)

    def _header(self, now: float, after: float, seq: int, *, is_snapshot: bool) -> fr.Header:
        rows = self._arrays["rows"]["at"]
        step = int((rows <= now).sum())
        over = now >= self.length_s
        incidents = tuple(
            fr.Numbered(number=number, incident=incident)
            for number, incident in enumerate(self.incidents, 1)
            if after < (incident.began_at or 0) <= now
        )
        return fr.Header(
            seq=seq,
            kind="snapshot" if is_snapshot else "delta",
            clock_s=now,
            cluster="made-up",
            run=fr.Run(
                run="r1",
                name="trainer",
                state="finished" if over else "running",
                first=0,  # type: ignore[arg-type]
                step=step,
                target=self.num_steps,
                durable=max(0, step - 1),
                until=None,
                usual_s=0.18,
                fault="",
                samples=int(self._arrays["rows"]["samples"][:step].sum()),
                seconds=float(self._arrays["rows"]["seconds"][:step].sum()),
            ),
            is_live=True,
            world=self._world(now),
            incidents=incidents,
            evaluations=(),
            counters=replace(fr.NO_COUNTERS, records=step * 40),
        )

    def _world(self, now: float) -> fr.World:
        seats = []
        table = self.tables["seats"]
        for slot in range(self.num_slots):
            places = [i for i, s in enumerate(table["slot"]) if s == slot and table["at"][i] <= now]
            last = places[-1]
            state = tb.STATES[int(table["state"][last])]
            is_member = state == "member"
            seats.append(
                fr.Seat(
                    slot=slot,
                    rank=slot if is_member else None,
                    state=state,  # type: ignore[arg-type]
                    pid=4000 + slot if state != "empty" else None,
                    host="here",
                    device="cpu",
                    generation=int(table["generation"][last]),
                    memory_bytes=(410 + 7 * slot) * 2**20 if state != "empty" else 0,
                    activity="",
                    slow_factor=2.5 if slot == 1 and SLOW[0] <= now < SLOW[1] else 1.0,
                    num_not_restored=0,
                )
            )
        phases = self.tables["phases"]
        last = sum(at <= now for at in phases["at"]) - 1
        phase = tb.PHASES[int(phases["phase"][last])]
        size = sum(seat.rank is not None for seat in seats)
        return fr.World(
            phase=phase,
            generation=int(phases["generation"][last]),
            world_size=size,
            size=self.num_slots,
            healthy=size == self.num_slots,
            reason="",
            seats=tuple(seats),
        )


class SyntheticFeed:
    """Plays a run to whoever subscribes; a `views.dashboard.Feed`."""

    def __init__(self, run: SyntheticRun, *, start: float, is_moving: bool = True) -> None:
        self.run, self.start, self.is_moving = run, start, is_moving
        self._zero = time.monotonic()
        self.asked: list[tuple[str, ...]] = []
        """The views of each subscription."""
        self.acks: list[int] = []
        self.ended: Callable[[str], None] = print
        """Call it to end the newest subscription."""

    def now(self) -> float:
        """Second of the run."""
        return self.start + (time.monotonic() - self._zero if self.is_moving else 0.0)

    def subscribe(
        self,
        views: Sequence[str],
        take: Callable[[int, bytes], None],
        ended: Callable[[str], None],
    ) -> Playing:
        """Begin with a snapshot."""
        self.asked.append(tuple(views))
        self.ended = ended
        return Playing(self, take)

    @property
    def is_over(self) -> bool:
        """Nothing new will come."""
        return self.now() >= self.run.length_s

    def snapshot(self) -> bytes:
        """All that there is."""
        return self.run.frame(self.now())


class Playing:
    """One subscription: a frame four times a second, until it is closed."""

    def __init__(self, feed: SyntheticFeed, take: Callable[[int, bytes], None]) -> None:
        self._feed, self._take = feed, take
        self._ended = threading.Event()
        self._wanted = True
        threading.Thread(target=self._play, name="synthetic-feed", daemon=True).start()

    def _play(self) -> None:
        seq, last = 0, -1.0
        while not self._ended.is_set():
            now = self._feed.now()
            if self._wanted:
                self._wanted, last = False, -1.0
            if last < 0 or self._feed.is_moving:
                seq += 1
                self._take(seq, self._feed.run.frame(now, after=last, seq=seq))
                last = now
            self._ended.wait(0.25)

    def ack(self, seq: int) -> None:
        """Remembered for tests."""
        self._feed.acks.append(seq)

    def resync(self) -> None:
        """The next frame is a snapshot."""
        self._wanted = True

    def close(self) -> None:
        """Play no more."""
        self._ended.set()
