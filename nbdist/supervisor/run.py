"""What the supervisor knows of one training run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.protocol import runs as rn
from nbdist.protocol.ids import Slot
from nbdist.supervisor.progress import Progress

if TYPE_CHECKING:
    from nbdist.protocol.ids import CellId, RunId
    from nbdist.protocol.story import Evaluation
    from nbdist.protocol.topology import Membership

ENDED: tuple[rn.RunState, ...] = ("finished", "stopped", "failed")

MAX_REMARKS = 200
"""More are not kept."""


def loop_of(run: RunId) -> int:
    """Which of its cell's loops a run is, by its name."""
    return int(run.rpartition(".")[2])


@dataclass(frozen=True)
class Place:
    """At which step a member stands, and since when."""

    step: int
    at: float


@dataclass
class Run:
    """One run."""

    spec: rn.RunSpec
    steps: int
    """So many more steps were asked for."""
    state: rn.RunState = "binding"
    step: int = 0
    """Committed steps at the last boundary at which the run stood."""
    target: int = 0
    until: int | None = None
    """Pause when so many steps are committed."""
    is_going: bool = False
    """Members were told to go on, and have not all come to a stand."""
    is_even: bool = True
    """All members hold the same step: they have all come to a stand, or were given the newest."""
    number: int = 0
    """Of the last order to go on."""
    is_hold_ordered: bool = False
    is_paused: bool = False
    paused_since: float | None = None
    """When it came to stand because the user wants it to."""
    is_stopping: bool = False
    bound: dict[Slot, rn.RunBound] = field(default_factory=dict)
    held: dict[Slot, Place] = field(default_factory=dict)
    entered: set[Slot] = field(default_factory=set)
    """An own loop: newcomers that have come to it."""
    left: dict[Slot, Place] = field(default_factory=dict)
    """An own loop: who left it early."""
    wanted_lr: float | None = None
    """To be set with the next order to go on."""
    lr: float | None = None
    """What the last order to go on has set."""
    fault: rn.RunFault | None = None
    progress: Progress = field(default_factory=lambda: Progress(0))
    evaluations: list[Evaluation] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What the user did to it that a reader should know."""
    broken: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) of attempts that came to nothing."""

    @classmethod
    def taken_up(cls, view: rn.RunView, rows: bytes) -> Run:
        """As another supervisor wrote it down; `rows`: the committed steps."""
        run = cls(view.spec, 0, state=view.state, target=view.target)
        run.progress = Progress(None)
        run.progress.add(Slot(-1), rows)
        run.until, run.fault, run.is_going = view.until, view.fault, not view.stands
        run.number, run.lr, run.step = view.number, view.lr, view.step
        run.is_even = False  # it may have stood because its group was broken
        if not run.is_over:
            run.is_paused = view.state == "paused"
            run.state = "paused" if run.is_paused else "running"
            since = f"from step {run.progress.step} on"
            run.remarks.append(f"{since}: another supervisor, which lacks the telemetry before")
        return run

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.state in ENDED

    @property
    def wants_stand(self) -> bool:
        """Whether the user wants something that takes place at a boundary."""
        return self.is_paused or self.is_stopping or self.wanted_lr is not None

    @property
    def will_go(self) -> bool:
        """Whether it trains on once the world lets it."""
        is_wanted = self.state == "running" and not self.is_paused and not self.is_stopping
        return is_wanted and self.step < min(self.target, self.until or self.target)

    @property
    def has_twins(self) -> bool:
        """What each member holds is held by another one, too; False: it is not known."""
        return bool(self.bound) and all(bound.has_twin for bound in self.bound.values())

    def note_pause(self, now: float) -> None:
        """Leave what the user has it stand out of the next step's time; called at each change."""
        if self.is_paused and self.state == "paused":
            self.paused_since = now if self.paused_since is None else self.paused_since
        elif self.paused_since is not None:
            self.progress.leave_out(self.step, now - self.paused_since)
            self.paused_since = None

    def num_leaving(self, num_members: int) -> int:
        """Of so many, how many may leave together; where they have twins, any number may."""
        by = min((bound.leaves_by for bound in self.bound.values()), default=0)
        return max(1, num_members // 2 // by * by) if by else 1

    def leavers(self, membership: Membership) -> list[Slot]:
        """Members that have left the loop early."""
        return [slot for slot in membership.slots if slot in self.left]

    def remark_slow(self, slots: tuple[Slot, ...], factor: float) -> None:
        """The user has made engines so many times as slow."""
        what = "as fast as before" if factor == 1 else f"made {factor:g} times as slow"
        who = f"slot{'' if len(slots) == 1 else 's'} {', '.join(map(str, slots))}"
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(f"from step {self.progress.step} on {who}: {what}")

    def view(self, *, is_whole: bool, cells: tuple[CellId, ...] = ()) -> rn.RunView:
        """As the kernel is told it; `is_whole`: the group is formed; `cells`: it stands for them.

        A run that is paused is no less paused while the world around it is repaired.
        """
        is_broken = not is_whole and self.state == "running"
        return rn.RunView(
            spec=self.spec,
            state="recovering" if is_broken else self.state,
            target=self.target,
            stands=not self.is_going,
            until=self.until,
            fault=self.fault,
            step=self.step,
            number=self.number,
            lr=self.lr,
            cells=cells,
        )
