"""What a run of any method keeps between rounds, and what a round makes of it. Pure; contributions
are added up as they come, and none is kept.

Memory: the anchor, the outer step's state, one sum, and the vectors of the method (c, G, the anchor
before), however many members there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ..outer.step import OuterStep
from .inner import mean_direction
from .member import Served
from .methods import Method


class FederatedServer:
    """The anchor of a run, from contribution to contribution and from step to step.

    ``anchor``: float32 (numel,), or float64 where the outer step is plain, of lr 1; parameters
    first. ``layout`` says what in it are running statistics, which are averaged. `add` what members
    contribute, then `step` once; or, where a mean was made elsewhere (by a rule, by arrivals),
    `step_with` it.
    """

    def __init__(
        self, method: Method, outer: OuterSettings, anchor: Tensor, layout: Layout | None = None
    ) -> None:
        self.method, self.anchor, self.version = method, anchor.clone(), 0
        self.parameters = (
            anchor.numel()
            if layout is None
            else sum(spec.numel for spec in layout.tensors if spec.role == "parameter")
        )
        self._outer = OuterStep(outer, layout)
        self._state = torch.zeros(self._outer.state_numel(anchor.numel()))
        self._next = torch.empty_like(self.anchor)
        self._sum, self._weight = torch.zeros_like(self.anchor), 0.0
        self.common = torch.zeros(self.parameters, dtype=anchor.dtype) if method.control else None
        self.momentum = (
            torch.zeros(self.parameters, dtype=anchor.dtype) if method.momentum else None
        )
        self.before = self.anchor[: self.parameters].clone() if method.reduced else None

    def served(self) -> Served:
        """What a member gets now: a copy of the anchor, and the method's vectors."""
        return Served(
            self.anchor.clone(),
            _copy(self.common),
            _copy(self.momentum),
            _copy(self.before),
            self.version,
        )

    def add(self, pseudo: Tensor, weight: float) -> None:
        """A contribution, anchor - parameters, with its weight in the mean of this round."""
        if not weight > 0:
            raise ConfigError(
                f"a contribution with weight {weight}", key="weight", why="weights are above 0"
            )
        self._sum.add_(pseudo, alpha=weight)
        self._weight += weight

    def note(self, change: Tensor, share: float) -> None:
        """c_i' - c_i of a member with this share of all, contributing or not: so c stays the mean
        of all c_i by these shares.
        """
        assert self.common is not None
        self.common.add_(change, alpha=share)

    def step(self, steps: float = 1, lr: float = 1.0) -> None:
        """The outer step with the mean of what was added; nothing where nothing was. ``steps``
        inner steps of ``lr`` made it, on average.
        """
        if self._weight:
            mean = self._sum.div_(self._weight)
            self.step_with(mean, steps, lr)
            self._sum.zero_()
            self._weight = 0.0

    def step_with(self, mean: Tensor, steps: float = 1, lr: float = 1.0) -> None:
        """The outer step with this mean, which may be changed."""
        if self.momentum is not None:
            self.momentum = mean_direction(mean[: self.parameters], steps, lr)
        if self.before is not None:
            self.before = self.anchor[: self.parameters].clone()
        self._outer.apply(self.anchor, mean, self._state, self._next)
        self.anchor, self._next = self._next, self.anchor
        self.version += 1

    def move_to(self, anchor: Tensor) -> None:
        """An outer step without a rule: this is the anchor now."""
        self.anchor = anchor
        self.version += 1


def _copy(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.clone()
