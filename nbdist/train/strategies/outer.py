"""What ranks that train apart share: parameters of the last outer step, the outer optimizer.

Does no communication; runs in the engine's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


class Calendar(NamedTuple):
    """When fragments are exchanged, in committed steps."""

    period: int
    """From one outer step of a fragment to its next."""
    num_fragments: int = 1
    delay: int = 0
    """From the beginning of an outer step to its end."""

    @property
    def every(self) -> int:
        """Steps from the end of one outer step, of whichever fragment, to that of the next."""
        return self.period // self.num_fragments

    def num_ended(self, step: int) -> int:
        """Outer steps that have ended with so many steps, or end there."""
        return step // self.every

    def ends(self, number: int) -> int:
        """With how many steps an outer step ends; they are numbered from 0."""
        return (number + 1) * self.every

    def begins(self, number: int) -> int:
        """With how many steps it begins."""
        return self.ends(number) - self.delay

    def fragment(self, number: int) -> int:
        """Which fragment it is of."""
        return number % self.num_fragments

    def oldest(self, num_ended: int) -> int:
        """With how many steps that outer step ended since which every fragment had one."""
        return max(0, num_ended - self.num_fragments + 1) * self.every


class Rule(NamedTuple):
    """The outer optimizer: SGD."""

    lr: float
    momentum: float
    nesterov: bool


@dataclass
class Fragment:
    """Parameters that are exchanged together."""

    parameters: list[nn.Parameter]
    rule: Rule | None
    """None: the mean of the parameters takes their place."""
    anchors: list[Tensor] = field(default_factory=list)
    """The parameters of the last outer step, the same on all ranks."""
    momenta: list[Tensor] = field(default_factory=list)
    """Of the outer optimizer, likewise."""
    count: float = 0.0
    """What this rank has trained on since it has last said how far it has come."""
    unsent: list[Tensor] = field(default_factory=list)
    """What codes have left out of what this rank had to say; none: nothing."""

    def start(self) -> None:
        """The parameters are the same on all ranks now: begin."""
        self.anchors = [parameter.detach().clone() for parameter in self.parameters]
        has_momentum = self.rule is not None and self.rule.momentum > 0
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors if has_momentum]
        self.count, self.unsent = 0.0, []

    def said(self) -> list[Tensor]:
        """What this rank has to say: its parameters, or how far they have come from the anchors."""
        if self.rule is None:
            return [parameter.detach().clone() for parameter in self.parameters]
        pairs = zip(self.anchors, self.parameters, strict=True)
        return [anchor - parameter.detach() for anchor, parameter in pairs]

    def go(self, means: Sequence[Tensor]) -> None:
        """From the means of what all have said to the next anchors."""
        if self.rule is None:
            for anchor, mean in zip(self.anchors, means, strict=True):
                anchor.copy_(mean)
            return
        lr, momentum, nesterov = self.rule
        for place, (anchor, mean) in enumerate(zip(self.anchors, means, strict=True)):
            way = mean
            if momentum:
                kept = self.momenta[place].mul_(momentum).add_(mean)
                way = mean.add(kept, alpha=momentum) if nesterov else kept
            anchor.sub_(way, alpha=lr)

    def take(self, mixing: float = 0.0) -> None:
        """The anchors become the parameters, but for the part of these that is kept."""
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            if mixing:
                parameter.lerp_(anchor, 1 - mixing)
            else:
                parameter.copy_(anchor)

    def shared(self) -> dict[str, Any]:
        """What a rank that joins is given."""
        return {"anchors": self.anchors, "momenta": self.momenta}

    def load(self, shared: dict[str, Any]) -> None:
        """Have what another rank's `shared` gave."""
        if not self.anchors:
            self.start()
        for name, own in self.shared().items():
            for tensor, value in zip(own, shared[name], strict=True):
                tensor.copy_(value)


class Kept(NamedTuple):
    """What a checkpoint holds of outer steps."""

    tensors: dict[str, Tensor]
    """Of what `named` gives what there is."""
    num_lost: int
    """Of the training, until then."""
    own: dict[str, Any] | None
    """As `Apart.own_state` gave it on the rank that this one is; None: it is none of them."""


def named(module: nn.Module, fragments: Sequence[Fragment]) -> dict[str, Tensor]:
    """What is shared, by kind and the parameters' names."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{kind}/{names[id(parameter)]}": tensor
        for fragment in fragments
        for kind, tensors in fragment.shared().items()
        for parameter, tensor in zip(fragment.parameters, tensors or (), strict=bool(tensors))
    }


def cut(module: nn.Module, num_fragments: int, rule: Rule | None) -> list[Fragment]:
    """The module's trained parameters in so many fragments of about the same size, in their order.

    Raises:
        ValueError: there are fewer parameters.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if len(trained) < num_fragments:
        raise ValueError(
            f"fragments is {num_fragments}, and the model has {len(trained)} parameters that are "
            "trained; each fragment takes one at least"
        )
    total = sum(parameter.numel() for parameter in trained)
    cuts: list[list[nn.Parameter]] = [[]]
    num_done = 0
    for place, parameter in enumerate(trained):
        num_left, num_open = len(trained) - place, num_fragments - len(cuts)
        is_full = num_done + parameter.numel() / 2 > total * len(cuts) / num_fragments
        if cuts[-1] and num_open and (is_full or num_left == num_open):
            cuts.append([])
        cuts[-1].append(parameter)
        num_done += parameter.numel()
    return [Fragment(parameters, rule) for parameters in cuts]
