"""What every strategy is to the training loop.

A strategy has two halves: the settings, a frozen dataclass that the user writes, and the exchange,
which the settings make for one trainer in one process and which does the communication. Settings
say what of the model a rank holds; the exchange says what of a batch it takes, and does forward and
backward with it, since only it knows who has which part of the model. The group is torch's default
group, whichever that is at the moment: an exchange keeps none. Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from nbdist.train.objective import Objective


class Place(NamedTuple):
    """Which part of a batch a rank takes, of how many.

    Ranks that take different parts compute with the same model, or part of it.
    """

    at: int
    num_places: int


class Summed(NamedTuple):
    """What came of a backward pass."""

    ready_ns: int
    """When this rank's own gradients were complete, by `time.perf_counter_ns`."""
    vote: list[float] | None
    """The vote that went along, summed over all ranks; None where none did."""
    is_finite: bool = True
    """False: the gradient is not, on any rank (where ranks train apart: on this one), and is not to
    be applied. True also where the exchange does not look."""


class Update(NamedTuple):
    """What a worker of a parameter server has come to, as the server applies it."""

    number: int
    """The step."""
    loss_sum: float
    weight: float
    """What it is the sum over."""
    is_applied: bool
    """False: its loss is not finite."""
    rate_factor: float
    """Times the optimizer's rate."""
    gradients: list[Tensor | None]
    """Of all parameters, means over the batch."""
    buffers: list[Tensor | None]
    """Of all; None: as it was."""


class Terms(Protocol):
    """What a strategy may know of the trainer that it is for: its `train.recipe.Recipe`."""

    @property
    def model(self) -> nn.Module | Callable[[], nn.Module]:
        """As the user gave it."""

    @property
    def loss(self) -> Callable[..., Any] | None:
        """None: the user gave a `forward`."""

    @property
    def global_batch(self) -> int:
        """Samples a step."""

    @property
    def accumulate(self) -> int:
        """Batches in which a rank goes through its share."""

    @property
    def seed(self) -> int:
        """Of everything random."""

    @property
    def precision(self) -> str:
        """In which models compute."""

    def for_axis(self, strategy: Strategy, num_places: int) -> Terms:
        """The same for one axis of a mesh, where ranks take one of so many parts of a batch."""

    def make_module(self) -> nn.Module:
        """The whole model; who calls this has seeded the generators."""


class Keeper(Protocol):
    """What one rank holds, as a whole: `train.snapshot.Whole`."""

    @property
    def step(self) -> int:
        """Committed steps."""

    def copy(self) -> bytes:
        """The state, as `take_back` takes it; from another rank too."""

    def take_back(self, data: bytes) -> None:
        """Have the state that a copy was made of."""

    def follow(self, data: bytes) -> None:
        """Have committed what a copy's rank has; parameters stay, and what is kept of each."""

    def move(self, module: nn.Module, copies: Iterable[bytes]) -> None:
        """Hold another part of the model, whose state is in the copies of all ranks."""

    # ---- where one rank deals the steps

    @property
    def wants_hold(self) -> bool:
        """This rank was told to have all stand."""

    def limit(self, low: int) -> int:
        """Steps up to which none are dealt before all below have been committed.

        Args:
            low: all below are.
        """

    def go_to(self, step: int) -> None:
        """Train this step next, which no other rank trains."""

    def stand(self, step: int, *, is_called: bool) -> None:
        """All ranks stand with so many steps; `is_called`: since somebody was told to."""

    def apply(self, update: Update) -> tuple[Any, ...]:
        """Apply what a worker has come to; the row that is to be reported of it."""

    def report(self, row: tuple[Any, ...]) -> None:
        """The step is committed."""

    num_skipped: int
    """Committed steps in which nothing was applied."""

    def drop_moments(self) -> None:
        """This rank's optimizer is not used."""


class Turn(Protocol):
    """One batch of a step, as an exchange is given it: `train.step.Step`."""

    number: int
    """Of the step."""

    @property
    def objective(self) -> Objective:
        """The trainer's loss."""

    @property
    def module(self) -> nn.Module:
        """What this rank holds of the model."""

    @property
    def slow_factor(self) -> float:
        """What this rank computes is to take so many times as long."""

    def backward(self, loss: Any, count: float | Tensor | None = None) -> None:
        """Where the rank has the whole model: go backward from the loss of the batch."""

    def weigh(self, loss: Any, count: float) -> Tensor:
        """Count a loss in, the mean over `count` samples, or (sum, count); what to go back from."""

    def went_back(self, ready_ns: int, compute_ns: int) -> None:
        """All gradients of the batch are there.

        Args:
            ready_ns: since when.
            compute_ns: for how long this rank itself has computed.
        """


class Exchange(Protocol):
    """The working half of a strategy."""

    place: Place
    """In the present group."""
    is_lockstep: bool
    """A pass through the model needs all ranks: each makes as many as the others."""
    num_lost: int
    """Steps of single ranks that were committed, and lost with these ranks."""

    @property
    def has_optimizer(self) -> bool:
        """Whether this rank applies its steps itself; else another one does, and reports them."""

    def fits(self, rank: int, world_size: int) -> bool:
        """Whether what this rank holds is what it should hold in a group of this size.

        Where it is not, and another group is to come, it waits for that.
        """

    def twins(self, rank: int, world_size: int) -> Place:
        """Which this rank is of those that hold the same in a group of this size, of how many."""

    def begin(self, rank: int, world_size: int, generation: int) -> None:
        """An attempt at a step begins, in a group of this size. Does no communication."""

    def settle(self, keeper: Keeper) -> bool:
        """Before it: see that what the ranks hold fits together. May communicate.

        Args:
            keeper: what this rank holds; an exchange may keep copies of it, and put one back.

        Returns:
            Whether something in it has changed.

        Raises:
            RecoveryFailed: it does not, and cannot be made to.
        """

    def train(self, batch: Any, turn: Turn) -> None:
        """Forward and backward of this rank's part of a batch."""

    def backward(
        self,
        loss: Tensor,
        weight: float,
        *,
        is_last: bool,
        vote: Sequence[float] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """Add the gradients of `loss * weight`.

        Args:
            loss: a tensor with one element.
            weight: what it counts.
            is_last: sum the gradients over all ranks; they are complete when this returns.
            vote: with the last: to be summed too, at little cost.
            meanwhile: may be called while the last sums are on their way.
        """

    def sum_vote(self, vote: list[float]) -> list[float]:
        """A vote that did not go along, summed over all ranks.

        What it says of buffers is summed over those ranks that have them.

        Gradients that several ranks share are complete afterwards.
        """

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole model's gradient. Every rank comes here."""

    def predict(self, inputs: Any) -> Any:
        """What the model returns, without gradients; None where another rank has that."""

    def commit(self, *, is_applied: bool, factor: float) -> None:
        """The step that went backward last is committed; what was kept for it is kept for good.

        Args:
            is_applied: its gradients were applied; else all ranks dropped them.
            factor: how many times as large the gradient of the same loss is in the next step.
        """

    def forget(self) -> None:
        """Parameters of another step were loaded: nothing of earlier steps is of use."""

    def restart(self) -> None:
        """A checkpoint was loaded, on all ranks: nothing that was kept of any step is of use."""

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor on the CPU over all ranks, in place; blocks."""

    def sum_places_(self, tensor: Tensor) -> None:
        """The same over the ranks that hold what this one holds."""

    def owned(self) -> list[object]:
        """What it holds on to, that the user could see."""

    def end(self) -> None:
        """A run is over. Every rank comes here; the next run begins anew on all of them alike."""


class Strategy(Protocol):
    """The settings."""

    is_replicated: ClassVar[bool]
    """Whether every rank holds the whole state, so that any can hand it over to any other."""
    relief: ClassVar[str]
    """What would need less memory on a rank, in a sentence."""

    def check(self, terms: Terms) -> None:
        """Raise ValueError where the settings do not fit the trainer."""

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:
        """What this rank holds of the model. Does no communication.

        Args:
            terms: what the trainer was given.
            sample: fetches a batch of one sample.
        """

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Exchange:
        """The working half, for what this rank holds and votes of so many numbers."""

    def describe(self) -> str:
        """What it does and what it costs, in one sentence."""
