"""Tensor parallelism: large matrices are cut over the ranks, and all compute each batch together.

Two layers go together: the first is cut by columns, so that each rank has some of what it returns;
the second by rows, so that it can go on with just that. What each rank comes to then is summed over
all, once forward and once backward. Attention is cut by heads. Runs in the engine's main thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nbdist.engine import runs
from nbdist.train.checks import check_whole, shown
from nbdist.train.randomness import seeded
from nbdist.train.strategies.axes import Axes, Portion
from nbdist.train.strategies.panels import Panelled, Panels, Plan, divide, hold
from nbdist.train.strategies.unison import Unison

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.train.strategies.base import Terms


@dataclass(frozen=True)
class TensorParallel:
    """Matrices are cut over the ranks, which take the same samples and compute together."""

    is_replicated: ClassVar[bool] = False
    relief: ClassVar[str] = (
        "On more engines each holds smaller panels of what plan= cuts. Copies that lost panels "
        "come back from take up to four times a rank's state: copy_every=0 makes none"
    )

    plan: str | Mapping[str, Any] = "auto"
    """Which parts of the model are cut, and how: "auto", as the model's `tensor_plan` says, which
    nbdist's GPT has; or names of parts ("blocks.*.mlp.widen") and torch's styles
    (`torch.distributed.tensor.parallel.ColwiseParallel()` …)."""
    copy_every: int = 10
    """After so many steps each rank's state is copied to the next rank's memory, to which all go
    back when a rank is lost; 0: never, and the run ends then."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_whole("copy_every", self.copy_every, 0)
        plan: Any = self.plan
        is_styles = isinstance(plan, Mapping) and all(
            isinstance(name, str) and hasattr(style, "_apply") and not isinstance(style, type)
            for name, style in plan.items()
        )
        if not (plan == "auto" or (is_styles and plan)):
            raise TypeError(
                f'plan is {shown(plan)}; it must be "auto", or a dict from names of the model\'s '
                "parts to torch's ParallelStyle objects, such as ColwiseParallel()"
            )

    def check(self, terms: Terms) -> None:
        """Any trainer will do."""

    def plan_of(self, model: nn.Module, num_ranks: int) -> Plan:
        """How a model is cut for so many ranks.

        Raises:
            ValueError: it cannot be, or nobody says how.
        """
        if not isinstance(self.plan, str):
            return dict(self.plan)
        own = getattr(model, "tensor_plan", None)
        if own is None:
            raise ValueError(
                f'plan="auto" is for models that have a plan, as nbdist\'s GPT; for a '
                f"{type(model).__name__} give plan={{name of a part: ColwiseParallel() …}}, or "
                "give it a method tensor_plan(num_ranks)"
            )
        return dict(own(num_ranks))

    def hold(self, terms: Terms, sample: Callable[[], Any]) -> nn.Module:
        """The panels of this rank."""
        return self.hold_along(Axes(), terms, sample)

    def hold_along(self, axes: Axes, terms: Terms, sample: Callable[[], Any]) -> nn.Module:  # noqa: ARG002 - as for all strategies
        """The same where other ranks may have the same panels."""

        def make() -> nn.Module:
            with seeded(terms.seed, torch.device("cpu")):
                return terms.make_module()

        is_given = isinstance(terms.model, nn.Module)

        def cut(_num_stages: int) -> Panels:
            own, plan_of = axes.present(), self.plan_of
            try:
                panels = hold(make, is_given=is_given, plan_of=plan_of, portion=own, axes=axes)
            except ValueError:
                if not runs.is_replaying() or own.num_ranks == 1:
                    raise
                # A newcomer of a world that cannot share the model: all its ranks say so together.
                alone = Portion(0, 1)
                panels = hold(make, is_given=is_given, plan_of=plan_of, portion=alone, axes=axes)
            panels.axes, panels.again = axes, cut
            return panels

        return cut(1)

    def divide(
        self, whole: nn.Module, device: torch.device, portion: Portion, axes: Axes
    ) -> Panelled:
        """Have a model without memory compute with this rank's panels, still to be given."""
        return divide(whole, self.plan_of, device, portion, axes)

    def exchange(self, module: nn.Module, terms: Terms, num_votes: int) -> Unison:  # noqa: ARG002 - as for all strategies
        """The working half."""
        assert isinstance(module, Panels)
        return Unison(module, copy_every=self.copy_every)

    def describe(self) -> str:
        """What it does and what it costs."""
        return (
            "Each of n ranks holds 1/n of the matrices that the plan cuts, of their gradients and "
            "optimizer state, and the rest whole; all take the same samples and compute together. "
            "For each pair of layers that are cut, a rank sends 2(n−1)/n times the bytes that pass "
            "between pairs, once forward and once backward."
        )
